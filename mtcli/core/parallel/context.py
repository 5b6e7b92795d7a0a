"""Context parallelism: each rank has a shard of every sequence, and attends to all of it.

A sequence is split into 2 * cp chunks, and rank r has chunks r and 2 * cp - 1 - r (zigzag), so that
a causal mask gives every rank the same work. b sequences, h query heads, g groups, n local tokens
(half early, half late), d head width.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import compress, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.core.mesh.visibility import PositionRange, Visibility
from mtcli.core.parallel.attention_mask import AttentionMask, KernelMask
from mtcli.core.parallel.collectives import RingShift, all_to_all, gather_in
from mtcli.core.parallel.groups import Axis
from mtcli.kernels.attention.attention import (
    attention,
    attention_backward,
    document_sdpa,
    masked_sdpa,
    sdpa,
)
from mtcli.kernels.attention.merge import merge_
from mtcli.kernels.attention.sinks import sinks_gradient, with_sinks
from mtcli.kernels.attention.varlen import packed_sdpa, takes_documents
from mtcli.kernels.triton_launch import runs_triton

LEAST_BAND_BLOCK = 64  # queries, for a GEMM
Attend = Callable[[Tensor, Tensor, Tensor, Axis, AttentionMask], Tensor]


def zigzag(seq_len: int, axis_size: int, rank: int, device: torch.device | None = None) -> Tensor:
    """The positions that a rank holds, ascending: int64 [seq_len / cp]."""
    if axis_size == 1:
        return torch.arange(seq_len, device=device)  # odd lengths too
    chunks = _chunks(seq_len, axis_size, rank)
    return torch.cat([torch.arange(*chunk, device=device) for chunk in chunks])


def _chunks(seq_len: int, axis_size: int, rank: int) -> tuple[PositionRange, PositionRange]:
    """The early and the late positions of `zigzag`."""
    size = seq_len // (2 * axis_size)
    starts = rank * size, (2 * axis_size - 1 - rank) * size
    return PositionRange(starts[0], starts[0] + size), PositionRange(starts[1], starts[1] + size)


def attention_over(mode: str) -> Attend:
    """The attention of a `cp_mode` over a context sharded by `zigzag`.

    It takes q [b, h, n, d], k and v [b, g, n, d] of this rank's tokens, the axis and a mask, and
    returns [b, h, n, d]. A cp of one rank has full rows in every mode.
    """
    over_ranks = {"ring": _ring, "all_gather": _gathered, "a2a": _by_heads}[mode]

    def attend(q: Tensor, k: Tensor, v: Tensor, axis: Axis, masking: AttentionMask) -> Tensor:
        if axis.size == 1:
            return _local(q, k, v, masking)
        return over_ranks(q, k, v, axis, masking)

    return attend


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """[b, g, n, d] on each rank -> [b, g, s, d] in the order of positions. Differentiable."""
    if axis.size == 1:
        return x
    parts = gather_in(x.transpose(0, 2).contiguous(), axis)  # [cp * n, g, b, d], rank by rank
    return in_sequence(parts, axis, 0).transpose(0, 2)


def in_sequence(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Reorders cp * n tokens along `dim`, which lie rank by rank, to the order of positions.

    Copies slices: the host waits for no index, and the backward sorts none.
    """
    if axis.size == 1:
        return x
    early, late = x.unflatten(dim, (axis.size, 2, -1)).unbind(dim + 1)
    return torch.cat([early, late.flip(dim)], dim).flatten(dim, dim + 1)


def _by_rank(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """The inverse of `in_sequence`."""
    early, late = x.unflatten(dim, (2, axis.size, -1)).unbind(dim)
    return torch.stack([early, late.flip(dim)], dim + 1).flatten(dim, dim + 2)


def _ring(q: Tensor, k: Tensor, v: Tensor, axis: Axis, masking: AttentionMask) -> Tensor:
    """Ring attention (arXiv:2310.01889): keys and values travel around the ring, overlapping the
    computation."""
    return _Ring.apply(q, torch.stack([k, v]), masking.sinks, axis, masking)  # type: ignore[no-untyped-call, no-any-return]  # torch


def _gathered(q: Tensor, k: Tensor, v: Tensor, axis: Axis, masking: AttentionMask) -> Tensor:
    """All-gathers all keys and values (Llama 3, arXiv:2407.21783, section 3.3.2)."""
    k, v = gather_sequence(k, axis), gather_sequence(v, axis)
    size = k.shape[2]
    if _is_narrow(q, size, masking.visibility):
        early, late = _chunks(size, axis.size, axis.rank)
        parts = zip(q.chunk(2, 2), (early, late), strict=True)
        return torch.cat([_banded(part, k, v, chunk.first, masking) for part, chunk in parts], 2)
    queries = zigzag(size, axis.size, axis.rank, q.device)
    keys = torch.arange(size, device=q.device)
    mask = masking.between(q, queries, keys)
    return masked_sdpa(q, k, v, mask, masking.cap, masking.sinks)


def _by_heads(q: Tensor, k: Tensor, v: Tensor, axis: Axis, masking: AttentionMask) -> Tensor:
    """Ulysses (arXiv:2309.14509): an all-to-all to full sequences of 1/cp of the heads, and
    back."""
    q, k, v = (_to_heads(x, axis) for x in (q, k, v))
    if masking.sinks is not None:
        masking = replace(masking, sinks=masking.sinks.chunk(axis.size, 1)[axis.rank])
    mixed = _local(q, k, v, masking)
    return _to_tokens(mixed, axis)


def _local(q: Tensor, k: Tensor, v: Tensor, masking: AttentionMask) -> Tensor:
    """Attention of full rows [b, h, s, d]; on CPU one document at a time, without a mask."""
    if _is_narrow(q, q.shape[2], masking.visibility):
        return _banded(q, k, v, 0, masking)
    if masking.packed is not None and takes_documents(q):
        limits = masking.visibility.left, masking.visibility.right
        return packed_sdpa(q, k, v, masking.packed, *limits)
    kind = masking.visibility.kind(q.shape[2])
    by_document = kind != "band" and not runs_triton(q) and masking.sinks is None
    if masking.documents is not None and by_document:
        lengths = [length for row in masking.documents.lengths for length in row]
        return document_sdpa(q, k, v, kind == "causal", lengths, masking.cap)
    causal, mask = masking.of_rows(q)
    if mask is None:
        return sdpa(q, k, v, causal, masking.cap, masking.sinks)
    return masked_sdpa(q, k, v, mask, masking.cap, masking.sinks)


def _is_narrow(q: Tensor, length: int, visibility: Visibility) -> bool:
    """Whether a CPU takes a row's queries block by block: no kernel there skips hidden keys."""
    widest = visibility.widest(length)
    return not runs_triton(q) and widest + _band_block(widest) < length


def _band_block(widest: int) -> int:
    """Queries of a block, for each of which the keys that any of them sees are scored."""
    return max(LEAST_BAND_BLOCK, widest // 2)


def _banded(q: Tensor, k: Tensor, v: Tensor, first: int, masking: AttentionMask) -> Tensor:
    """Attention of queries [b, h, n, d] at `first` and after to a row's keys [b, g, s, d], each
    block of queries to the keys in its window."""
    return _Banded.apply(q, k, v, masking.sinks, first, masking)  # type: ignore[no-untyped-call, no-any-return]  # torch


class _Banded(torch.autograd.Function):
    """Attention block by block. The gradients of keys are added where they lie: autograd's own
    would be as long as the row for each block."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd takes no containers of tensors
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        first: int,
        masking: AttentionMask,
    ) -> Tensor:
        """q [b, h, n, d], k and v [b, g, s, d] -> [b, h, n, d]."""
        ctx.blocks = list(_band_blocks(q, k.shape[2], first, masking))
        parts = [
            attention(q[:, :, queries], k[:, :, keys], v[:, :, keys], False, mask, masking.cap)
            for queries, keys, mask in ctx.blocks
        ]
        out, lse = (torch.cat(blocks, 2) for blocks in zip(*parts, strict=True))
        out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.cap = masking.cap
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of q, k, v and sinks."""
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), *(torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
        for queries, keys, mask in ctx.blocks:
            block = q[:, :, queries], k[:, :, keys], v[:, :, keys], out[:, :, queries]
            given = grad[:, :, queries], block, lse[:, :, queries], False, mask
            grads = attention_backward(*given, ctx.cap)
            dq[:, :, queries] = grads[0]
            dk[:, :, keys] += grads[1]
            dv[:, :, keys] += grads[2]
        of_sinks = sinks_gradient(grad, out, lse, sinks)
        return dq, dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None


def _band_blocks(
    q: Tensor, length: int, first: int, masking: AttentionMask
) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yields blocks of the queries at `first` and after, the row's keys that each sees, and the
    mask between them."""
    positions, visibility = torch.arange(length, device=q.device), masking.visibility
    size = _band_block(visibility.widest(length))
    for start in range(0, q.shape[2], size):
        end = min(start + size, q.shape[2])
        queries = PositionRange(first + start, first + end)
        keys = slice(*visibility.keys_of(queries, length))
        mask = masking.mask(positions[slice(*queries)], positions[keys])
        yield slice(start, end), keys, mask


def _to_heads(x: Tensor, axis: Axis) -> Tensor:
    """[b, h, n, d] of this rank's tokens -> [b, h / cp, s, d] of this rank's heads."""
    b, h, n, d = x.shape
    sent = x.view(b, axis.size, h // axis.size, n, d).transpose(0, 1)
    parts = all_to_all(sent.contiguous(), axis)  # [cp of the sender, b, h / cp, n, d]
    full = parts.permute(1, 2, 0, 3, 4).reshape(b, h // axis.size, axis.size * n, d)
    return in_sequence(full, axis, 2)


def _to_tokens(x: Tensor, axis: Axis) -> Tensor:
    """[b, h / cp, s, d] -> [b, h, n, d], the inverse of `_to_heads`."""
    b, h, s, d = x.shape
    sent = _by_rank(x, axis, 2).view(b, h, axis.size, s // axis.size, d).permute(2, 0, 1, 3, 4)
    parts = all_to_all(sent.contiguous(), axis)  # [cp of the heads, b, h / cp, n, d]
    return parts.transpose(0, 1).reshape(b, axis.size * h, s // axis.size, d)


class _Ring(torch.autograd.Function):
    """Attention to one rank's keys at a time, merged by log-sum-exp.

    A causal layer computes half of another rank's block: of an earlier rank, all queries see the
    early half of the keys; of a later rank, the late half of the queries sees all keys. Full
    attention computes all of it, and a window near chunks alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        sinks: Tensor | None,
        axis: Axis,
        masking: AttentionMask,
    ) -> Tensor:
        """q [b, h, n, d], kv [2, b, g, n, d] -> [b, h, n, d]."""
        wide = torch.promote_types(q.dtype, torch.float32)
        mixed = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], float("-inf"), dtype=wide, device=q.device)
        received = kv
        for step in range(axis.size):
            shift = RingShift(received, axis) if step + 1 < axis.size else None
            if block := _block(q, step, axis, masking):
                queries, keys, causal, mask = block
                k, v = received[:, :, :, keys]
                part, part_lse = attention(q[:, :, queries], k, v, causal, mask, masking.cap)
                merge_(mixed[:, :, queries], lse[:, :, queries], part, part_lse)
            received = shift.wait() if shift else received
        mixed, lse = with_sinks(mixed, lse, sinks)
        out = mixed.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse, sinks)
        ctx.axis, ctx.masking = axis, masking
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sends keys and values around again; their gradients travel along and end on their own
        ranks."""
        q, kv, out, lse, sinks = ctx.saved_tensors
        axis, grad = ctx.axis, grad.contiguous()
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        received, dkv = kv, torch.zeros(kv.shape, dtype=lse.dtype, device=q.device)
        for step in range(axis.size):
            shift = RingShift(received, axis) if step + 1 < axis.size else None
            if block := _block(q, step, axis, ctx.masking):
                queries, keys, causal, mask = block
                saved = q[:, :, queries], *received[:, :, :, keys], out[:, :, queries]
                own_grad, own_lse = grad[:, :, queries], lse[:, :, queries]
                options = causal, mask, ctx.masking.cap
                parts = attention_backward(own_grad, saved, own_lse, *options)
                dq[:, :, queries] += parts[0]
                dkv[:, :, :, keys] += torch.stack(parts[1:])
                del parts  # before the next step's are there
            # Waited for at once: to overlap it with the next block's backward would take the
            # memory of another float32 sum. It is a sum over ranks, so it is not rounded between.
            dkv = RingShift(dkv, axis).wait()
            received = shift.wait() if shift else received
        of_sinks = sinks_gradient(grad, out, lse, sinks)
        return dq.to(q.dtype), dkv.to(kv.dtype), of_sinks, None, None


class _Block(NamedTuple):
    """A block of a ring's step: this rank's queries, another rank's keys, and their mask."""

    queries: slice
    keys: slice
    causal: bool
    mask: KernelMask


def _block(q: Tensor, step: int, axis: Axis, masking: AttentionMask) -> _Block | None:
    """The queries, keys and mask of a ring's step, whose keys are those of rank - step.

    None where no query attends to a key. On a GPU documents are not checked, which would make the
    host wait: the kernel skips hidden keys.
    """
    tokens, visibility = q.shape[2], masking.visibility
    chosen = visible_block(tokens, step, axis, visibility)
    if chosen is None:
        return None
    queries, keys, is_full = chosen
    causal = step == 0 and visibility.kind(tokens * axis.size) == "causal"
    if masking.documents is None and (causal or is_full):
        return _Block(queries, keys, causal, None)
    ranks = axis.rank, (axis.rank - step) % axis.size
    of_queries, of_keys = (zigzag(tokens * axis.size, axis.size, rank, q.device) for rank in ranks)
    mask = masking.between(q, of_queries[queries], of_keys[keys])
    if isinstance(mask, Tensor) and not mask.any():
        return None
    return _Block(queries, keys, False, mask)


def visible_block(
    tokens: int, step: int, axis: Axis, visibility: Visibility
) -> tuple[slice, slice, bool] | None:
    """(queries of this rank, keys of rank - step, whether the block is unmasked), without the
    chunks that see nothing or that no query sees; None where no query sees a key."""
    ranks = axis.rank, (axis.rank - step) % axis.size
    of_queries, of_keys = (_chunks(tokens * axis.size, axis.size, rank) for rank in ranks)
    see = [any(visibility.sees_some(q, k) for k in of_keys) for q in of_queries]
    visible = [any(visibility.sees_some(q, k) for q in of_queries) for k in of_keys]
    if not any(visible):
        return None
    pairs = product(compress(of_queries, see), compress(of_keys, visible))
    is_full = all(visibility.sees_all(q, k) for q, k in pairs)
    return _halves(tokens, see), _halves(tokens, visible), is_full


def _halves(tokens: int, chosen: list[bool]) -> slice:
    """The early half, the late half, or both."""
    early, late = chosen
    return slice(None if early else tokens // 2, None if late else tokens // 2)
