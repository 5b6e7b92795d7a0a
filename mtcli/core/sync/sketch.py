"""A linear sketch of many tensors, whose length tells theirs (Charikar, Chen and Farach-Colton,
2002, "Finding frequent items in data streams"): element i is added to bucket i mod 8191 with a
random sign, so that the expected square of the sketch is the square of the tensors' norm."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

BUCKETS = 8191  # a prime, so that columns of a matrix share no bucket; the norm's error is 0.8 %


def sketch(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The float64 sketch [8191] of tensors, each of any shape, in their order."""
    found, first = torch.zeros(BUCKETS, dtype=torch.float64, device=device), 0
    for tensor in tensors:
        flat = tensor.flatten().to(found)
        flat = flat * _signs(first, flat.numel(), device)
        before = first % BUCKETS
        after = -(before + flat.numel()) % BUCKETS
        found += F.pad(flat, (before, after)).view(-1, BUCKETS).sum(0)
        first += flat.numel()
    return found


def _signs(first: int, count: int, device: torch.device) -> Tensor:
    """Signs of elements first, first + 1, ...: bits of a multiplicative hash of their numbers."""
    x = torch.arange(first, first + count, device=device)
    x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return ((x >> 15) & 1) * 2.0 - 1.0
