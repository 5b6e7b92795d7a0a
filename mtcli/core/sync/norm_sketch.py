"""Estimates the norm of many tensors from a linear sketch (Charikar, Chen and Farach-Colton, 2002,
"Finding frequent items in data streams"): element i is added to bucket i mod 8191 with a random
sign, so the expected squared norm of the sketch is the squared norm of the tensors.

The norm's relative standard deviation is sqrt(1 / (2 * 8191)) = 0.8 %. The sign of an element is
the product of two random signs: of its block of 2^20 elements, and of its offset in the block. Each
block begins in another bucket, so that no two elements of a bucket have the same offset. For
tensors of equal elements the deviation is 1.1 %.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BUCKETS = 8191  # a prime, so that columns of a matrix share no bucket
BLOCK = 2**20
SEED = 8191


def sketch(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The float64 sketch [8191] of tensors, each of any shape, in their order."""
    buckets, first = torch.zeros(BUCKETS, dtype=torch.float64, device=device), 0
    end = sum(tensor.numel() for tensor in tensors)
    offsets = _signs(min(end, BLOCK), SEED).to(device)
    blocks = _signs(end // BLOCK + 1, SEED + 1).tolist()
    for tensor in tensors:
        for part in tensor.flatten().split(BLOCK):
            for chunk in part.tensor_split([BLOCK - first % BLOCK]):
                start, bucket = first % BLOCK, first % BUCKETS
                signed = chunk.double() * offsets[start : start + len(chunk)]
                padding = bucket, -(bucket + len(chunk)) % BUCKETS
                sums = F.pad(signed, padding).view(-1, BUCKETS).sum(0)
                buckets.add_(sums, alpha=blocks[first // BLOCK])
                first += len(chunk)
    return buckets


def _signs(count: int, seed: int) -> Tensor:
    """Random signs [count], float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, (count,), generator=generator).double() * 2.0 - 1.0
