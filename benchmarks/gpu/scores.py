"""Attention: whole rows as torch has them, and rows of packed documents."""

import torch
import torch.nn.functional as F
from harness import Entry, leaf

from mtcli.kernels.flash import flash

SIZES = [(4, 32, 8, 8192, 128), (1, 32, 8, 16384, 128), (32, 12, 12, 1024, 64)]
DOCUMENT = 1000  # tokens of a document


def heads(device, dtype, b, h, g, n, d):
    """Queries, keys and values as a model has them: token by token."""
    sizes = ((b, n, h, d), (b, n, g, d), (b, n, g, d))
    made = (leaf(size, dtype, device, i).detach() for i, size in enumerate(sizes))
    return [x.transpose(1, 2).requires_grad_() for x in made]


def with_spans(device, dtype, b, h, g, n, d):
    """The same, and the first key and the end of the keys that each query sees."""
    place = torch.arange(n, device=device, dtype=torch.int32)[None]
    return *heads(device, dtype, b, h, g, n, d), place // DOCUMENT * DOCUMENT, place + 1


def causal(q, k, v):
    return flash(q, k, v, True, None, None)[0]


def documents(q, k, v, first, end):
    return flash(q, k, v, False, first, end)[0]


def torch_causal(q, k, v):
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def torch_documents(q, k, v, first, end):
    place = torch.arange(k.shape[2], device=k.device)
    mask = (place >= first[..., None]) & (place < end[..., None])
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=grouped)


def causal_flops(products):
    """Two products forward, five backward, of half the scores."""
    return lambda b, h, g, n, d: products * b * h * n * n * d


def document_flops(products):
    return lambda b, h, g, n, d: products * b * h * n * min(n, DOCUMENT) * d


# fmt: off
ENTRIES = [
    Entry("flash", causal, {"torch": torch_causal}, heads, SIZES, (1, 4, 2, 37, 20),
        backward_bytes=lambda itemsize, *size: 0, forward_flops=causal_flops(2),
        backward_flops=causal_flops(5), compiled=(1, 4, 2, 256, 128)),
    Entry("flash_documents", documents, {"torch": torch_documents}, with_spans, SIZES[:1],
        (1, 4, 2, 37, 20), backward_bytes=lambda itemsize, *size: 0,
        forward_flops=document_flops(2), backward_flops=document_flops(5),
        compiled=(1, 4, 2, 256, 128)),
]
