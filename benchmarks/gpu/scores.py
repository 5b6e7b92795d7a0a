"""Attention: whole rows as torch has them, rows of packed documents, and the blocks of a ring."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from harness import Entry, leaf

from mtcli.core.parallel.cp import _rectangle as rectangle
from mtcli.core.parallel.cp import sequence_order, zigzag
from mtcli.kernels.attention import attention, merge_
from mtcli.kernels.flash import flash

RING = 4  # ranks of the ring that one device plays, one after another
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


def cut(device, dtype, b, h, g, n, d):
    """Whole rows, and what each rank of a ring has of them."""
    q, k, v = (x.detach() for x in heads(device, dtype, b, h, g, n, d))
    places = [zigzag(n, RING, rank).to(device) for rank in range(RING)]
    return q, k, v, [[x[:, :, at].contiguous() for x in (q, k, v)] for at in places]


def ring(q, k, v, ranks):
    """The forward pass of every rank of a ring, without its messages: cp.py's blocks and merges."""
    mixed = []
    for rank, (mine, _, _) in enumerate(ranks):
        out = torch.zeros(mine.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(mine.shape[:-1], float("-inf"), device=q.device)
        for hop in range(RING):
            axis = SimpleNamespace(rank=rank, size=RING)
            at, keys = rectangle(mine.shape[2], hop, axis)
            theirs = [x[:, :, keys] for x in ranks[rank - hop][1:]]
            part, part_lse = attention(mine[:, :, at], *theirs, hop == 0)
            merge_(out[:, :, at], lse[:, :, at], part.float(), part_lse)
        mixed.append(out.to(q.dtype))
    order = sequence_order(q.shape[2], SimpleNamespace(size=RING))
    return torch.cat(mixed, 2)[:, :, order.to(q.device)]


def torch_causal(q, k, v, *others):
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
    Entry("ring_of_4", ring, {"torch": torch_causal}, cut, [(1, 32, 8, 32768, 128)],
        (1, 4, 2, 64, 20), forward_flops=causal_flops(2), compiled=(1, 4, 2, 256, 128)),
]
