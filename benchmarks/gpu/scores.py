"""Attention: whole rows as torch has them, rows of packed documents, and the blocks of a ring."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from harness import Entry, leaf

from mtcli.core.mesh.visibility import Visibility
from mtcli.core.parallel.context import in_sequence, visible_block, zigzag
from mtcli.kernels.attention.attention import (
    attention,
    attention_backward_reference,
    attention_reference,
)
from mtcli.kernels.attention.flash_backward import flash_backward
from mtcli.kernels.attention.flash_forward import flash
from mtcli.kernels.attention.library import LIBRARIES, tuned_sizes
from mtcli.kernels.attention.merge import merge_, merge_reference_

RING = 4  # ranks of the ring that one device plays, one after another
SIZES = [(4, 32, 8, 8192, 128), (1, 32, 8, 16384, 128), (32, 12, 12, 1024, 64)]
DOCUMENT = 1000  # tokens of a document
BLOCKS = [  # b, h, g, n, m, d of a ring's blocks: squares are causal, rectangles are seen whole
    (1, 32, 8, 8192, 8192, 128), (1, 32, 8, 8192, 4096, 128), (1, 32, 8, 1024, 1024, 128),
    (1, 32, 8, 2048, 2048, 128), (1, 32, 8, 16384, 16384, 128), (4, 16, 16, 4096, 4096, 64),
]  # fmt: skip


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
    """The forward of every rank of a ring without its messages: blocks and merges of context.py."""
    mixed = []
    for rank, (mine, _, _) in enumerate(ranks):
        out = torch.zeros(mine.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(mine.shape[:-1], float("-inf"), device=q.device)
        for hop in range(RING):
            axis = SimpleNamespace(rank=rank, size=RING)
            at, keys, _ = visible_block(mine.shape[2], hop, axis, Visibility())
            theirs = [x[:, :, keys] for x in ranks[rank - hop][1:]]
            part, part_lse = attention(mine[:, :, at], *theirs, hop == 0)
            merge_(out[:, :, at], lse[:, :, at], part, part_lse)
        mixed.append(out.to(q.dtype))
    return in_sequence(torch.cat(mixed, 2), SimpleNamespace(size=RING), 2)


def torch_causal(q, k, v, *others):
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def torch_documents(q, k, v, first, end):
    place = torch.arange(k.shape[2], device=k.device)
    mask = (place >= first[..., None]) & (place < end[..., None])
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=grouped)


def block(device, dtype, b, h, g, n, m, d):
    """Queries of a rank, and keys and values that come to it."""
    sizes = (b, n, h, d), (b, m, g, d), (b, m, g, d)
    made = (leaf(size, dtype, device, i).detach() for i, size in enumerate(sizes))
    return [x.transpose(1, 2) for x in made]


def block_with_gradient(device, dtype, b, h, g, n, m, d):
    """The gradient of the output, the block with the output, and the log-sum-exp."""
    q, k, v = block(device, dtype, b, h, g, n, m, d)
    out, lse = attention(q, k, v, n == m)
    return leaf((b, n, h, d), dtype, device, 3).detach().transpose(1, 2), (q, k, v, out), lse


def block_of(function, *none):
    return lambda q, k, v: function(q, k, v, q.shape[2] == k.shape[2], *none)


def block_backward_of(function, *none):
    def backward(grad, saved, lse):
        q, k, *_ = saved
        return function(grad, saved, lse, q.shape[2] == k.shape[2], *none)

    return backward


def by_group(q, k, v):
    """The reference, one group of heads after another: scores of all of them would not fit."""
    queries = q.chunk(k.shape[1], 1)
    parts = zip(queries, k.split(1, 1), v.split(1, 1), strict=True)
    found = [block_of(attention_reference)(*part) for part in parts]
    return [torch.cat(x, 1) for x in zip(*found, strict=True)]


def by_group_backward(grad, saved, lse):
    q, k, v, out = saved
    groups = k.shape[1]
    queries = zip(*(x.chunk(groups, 1) for x in (grad, q, out, lse)), strict=True)
    keys = zip(k.split(1, 1), v.split(1, 1), strict=True)
    function = block_backward_of(attention_backward_reference)
    found = [
        function(part, (*q_kv[:1], *key, q_kv[1]), sums)
        for (part, *q_kv, sums), key in zip(queries, keys, strict=True)
    ]
    return [torch.cat(x, 1) for x in zip(*found, strict=True)]


def our_backward(grad, saved, lse, causal):
    return flash_backward(grad, *saved, lse, causal, None, None)


def two_results(device, dtype, b, h, n, d):
    """Half of the queries of a sum so far, twice as it is overwritten, and a result for them."""

    def sums():
        out = leaf((b, h, 2 * n, d), torch.float32, device).detach()
        lse = leaf((b, h, 2 * n), torch.float32, device, 2).detach()
        return out[:, :, n:], lse[:, :, n:]

    part = leaf((b, n, h, d), dtype, device, 1).detach().transpose(1, 2)
    return sums(), sums(), part, leaf((b, h, n), torch.float32, device, 3).detach()


def our_merge(ours, theirs, part, part_lse):
    merge_(*ours, part, part_lse)
    return ours


def torch_merge(ours, theirs, part, part_lse):
    merge_reference_(*theirs, part, part_lse)
    return theirs


def causal_flops(products):
    """Two products forward, five backward, of half the scores."""
    return lambda b, h, g, n, d: products * b * h * n * n * d


def block_flops(products):
    return lambda b, h, g, n, m, d: products * b * h * n * m * d * (1 if n == m else 2)


def document_flops(products):
    return lambda b, h, g, n, d: products * b * h * n * min(n, DOCUMENT) * d


CHOSEN = {
    "chosen": tuple(LIBRARIES), "magnitudes": lambda b, h, g, n, m, d: tuned_sizes(m, d),
    "torch_compiles": "",
}  # fmt: skip

# fmt: off
ENTRIES = [
    Entry("flash", causal, {"torch": torch_causal}, heads, SIZES, (1, 4, 2, 37, 20),
        backward_bytes=lambda itemsize, *size: 0, forward_flops=causal_flops(2),
        backward_flops=causal_flops(5)),
    Entry("flash_documents", documents, {"torch": torch_documents}, with_spans, SIZES[:1],
        (1, 4, 2, 37, 20), backward_bytes=lambda itemsize, *size: 0,
        forward_flops=document_flops(2), backward_flops=document_flops(5)),
    Entry("ring_of_4", ring, {"torch": torch_causal}, cut, [(1, 32, 8, 32768, 128)],
        (1, 4, 2, 64, 20), forward_flops=causal_flops(2)),
    Entry("attention", block_of(flash, None, None),
        {"torch": by_group, **{name: block_of(lib.forward) for name, lib in LIBRARIES.items()}},
        block, BLOCKS, (1, 4, 2, 37, 20, 20), forward_flops=block_flops(2), **CHOSEN),
    Entry("attention_backward", block_backward_of(our_backward),
        {"torch": by_group_backward,
         **{name: block_backward_of(lib.backward) for name, lib in LIBRARIES.items()}},
        block_with_gradient, BLOCKS, (1, 4, 2, 37, 20, 20), forward_flops=block_flops(5),
        **CHOSEN),
    Entry("merge", our_merge, {"torch": torch_merge}, two_results,
        [(1, 32, 4096, 128)], (2, 3, 37, 20),
        lambda itemsize, b, h, n, d: b * h * n * d * (8 + itemsize), torch_compiles=""),
]
