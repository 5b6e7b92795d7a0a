"""Estimates the activations of a stage by closed forms, by which a search ranks layouts.

As in arXiv:2205.05198, section 4, the forms add up the tensors that each part of a block saves for
its backward; here for the tensors that mtcli's layers save. Flash attention saves a log-sum-exp per
query and no scores. On a GPU the activations of an MLP and dropout are recomputed. A layout that is
shown is rehearsed: `core/rehearse` runs its real stages. MARGIN is the error of the forms.
"""

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from mtcli.core.config.model import CLASSIFIERS, MASKED_SHARE
from mtcli.core.mesh.sharding import VOCAB_MULTIPLE
from mtcli.core.plan.elements import (
    block_elements,
    is_sharded,
    parameter_copies,
    rank_elements,
)
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.rank_bytes import RankBytes, StageBytes
from mtcli.core.plan.workload import BlockCounts, Workload
from mtcli.kernels.limits import chunk_rows

WIDE = 4  # bytes of a float32
# 95 of 100 estimates are too high by at most this share (benchmarks/bench_estimates.py).
MARGIN = 0.045


def estimated(work: Workload, device: Device, pp_rank: int) -> RankBytes:
    """Estimates the live bytes of a pipeline rank, without weights, gradients and optimizer
    state."""
    on_cpu = device.name == "cpu"
    stages = [_stage(work, on_cpu, stage) for stage in work.layout.stages(pp_rank)]
    return RankBytes(stages, _update(work, pp_rank), _panels(work))


@lru_cache(maxsize=4096)
def _stage(work: Workload, on_cpu: bool, stage: int) -> StageBytes:
    """Adds up a stage: its blocks, the working memory of one block, and embedding or head."""
    first, last = stage == 0, stage == work.layout.num_stages - 1
    counts, stream = work.block_counts([stage]), _stream(work)
    blocks = [(counts.mixed, _block(work, on_cpu))]
    if counts.dense:
        dense = replace(work, model=work.model.of_first_layers)
        blocks.append((counts.dense, _block(dense, on_cpu)))
    widest = max((block for _, block in blocks), key=lambda block: block.backward)
    saved = sum(count * block.saved for count, block in blocks) or stream
    head = _head(work, on_cpu) if last else HeadBytes(stream, stream)
    waiting = sum(count * block.waiting for count, block in blocks) * work.splits_backward
    halved = (waiting + _entered(work) + 5 * stream) * work.splits_backward
    ends, gathered = _gathered(work, first, last)
    return StageBytes(
        saved=saved + head.saved,
        waiting=waiting,
        forward_peak=saved + max(widest.forward, head.peak) + gathered / 2,
        backward_peak=max(saved + widest.backward + gathered, saved + head.peak, halved),
        weight_peak=waiting + stream,
        sent=stream * (not first),
        gathered=ends,
    )


def _stream(work: Workload) -> float:
    """Bytes of the residual stream on a rank, sharded by tokens and, on a grid, by columns."""
    if work.layout.tp_rows > 1:
        return work.row_tokens * work.model.hidden_size / work.columns * work.sizes.weight
    return work.stream_bytes / work.sequence_shards


def _entered(work: Workload) -> float:
    """Bytes of the input of a column-parallel GEMM: all tokens, or a grid's shard of them."""
    if work.layout.tp_rows > 1:
        return _stream(work)
    return work.tokens * work.model.hidden_size * float(work.sizes.weight)


class PartBytes(NamedTuple):
    """Bytes of a part of a block: saved for backward, and temporary in its forward and its
    backward."""

    saved: float
    forward: float
    backward: float


class BlockBytes(NamedTuple):
    """Bytes of a block: saved for backward, temporary in its forward and its backward, and saved
    for W where the backward is split."""

    saved: float
    forward: float
    backward: float
    waiting: float


class HeadBytes(NamedTuple):
    """Bytes of the head and the loss: saved for backward, and at the peak."""

    saved: float
    peak: float


def _block(work: Workload, on_cpu: bool) -> BlockBytes:
    """Adds up a block: its norms' inputs, attention, and an MLP, experts, or both.

    A recomputed block saves its input alone and makes the other tensors in its backward. W needs
    the input of each GEMM and the gradient of its output (arXiv:2401.10241).
    """
    m, stream, entered = work.model, _stream(work), _entered(work)
    parts = [_attention(work, on_cpu)]
    parts += [_mlp(work, on_cpu)] if m.dense_ffn_hidden_size else []
    parts += [_experts(work, on_cpu)] if m.num_experts else []
    saved = work.block_bytes or m.norms_per_block * stream + sum(part.saved for part in parts)
    forward = max(part.forward for part in parts) + entered + 2 * stream
    backward = max(part.backward for part in parts) + entered + 2 * stream
    halves = 2 * entered * work.sharded_halves + _inner(work) * (m.up_factor + 1)
    waiting = halves + work.head_bytes + _mixed(work)
    if work.recompute == "full":
        # In its backward the parts behind a part have released what they saved; the residual stream
        # and its gradient are alive.
        behind = [sum(part.saved for part in parts[i + 1 :]) for i in range(len(parts))]
        most = max(part.backward - free for part, free in zip(parts, behind, strict=True))
        return BlockBytes(stream, forward, saved + most + 2 * stream, waiting)
    return BlockBytes(saved, backward / 2, backward, waiting)


def _attention(work: Workload, on_cpu: bool) -> PartBytes:
    """Counts attention's input, its queries, keys and values (also rotated), and its output.

    With dropout, attention probabilities are saved too, before and after dropout, and on a CPU the
    inputs of softmax and mask.
    """
    m, heads, mixed = work.model, work.head_bytes, _mixed(work)
    queries = work.row_tokens * m.num_heads / work.columns
    keys = heads - mixed  # and values
    scores = queries * work.seq_len * work.sizes.weight * bool(m.attention_dropout)
    scores *= 4 if on_cpu else 2
    saved, moving = _entered(work) + heads + mixed, heads + mixed + scores
    if work.recompute != "selective":
        saved += (mixed + keys / 2) * m.copies_of_heads + queries * WIDE + scores
    if work.layout.cp > 1:
        moving += 2 * heads  # another rank's, in flight
        saved += keys * work.layout.cp * (work.cp_mode == "all_gather")
    return PartBytes(saved, moving, moving + _wide(work, heads))


def _mlp(work: Workload, on_cpu: bool) -> PartBytes:
    """Counts the input and inner values of a dense or shared MLP. Its activations are saved on a
    CPU, on a grid, and inside a recomputed block."""
    inner, up = _inner(work), work.model.up_factor
    has_activations = on_cpu or work.layout.tp_rows > 1 or work.recompute == "full"
    moving = inner * (up + 1)
    returned = moving - inner * (work.recompute == "full")  # an activation's memory is free by then
    return PartBytes(
        _entered(work) + inner * (up + has_activations), moving, returned + _wide(work, inner * up)
    )


def _experts(work: Workload, on_cpu: bool) -> PartBytes:
    """Counts the token copies sent and received, their inner values, and the outputs to sum. On a
    CPU the gradients of all of a rank's experts are alive at once; on a GPU, GEMMs add them to
    their sums.

    With etp the rows of an expert are those of all ranks of etp (arXiv:2504.14960, section 3.2).
    """
    m, size, layout = work.model, work.sizes.weight, work.layout
    inner = work.expert_rows * m.moe_ffn_hidden_size / layout.etp * size
    sent = work.sent_rows * m.hidden_size * size
    outputs = 2 * _stream(work) * (2 if m.shared_expert_ffn_hidden_size else 1)
    router = work.tokens / work.sequence_shards * m.num_experts * max(WIDE, size)
    saved = work.routed_bytes + inner * m.up_factor + sent + outputs + 3 * router
    elements = m.num_experts // layout.ep * m.hidden_size * m.moe_ffn_hidden_size / layout.etp
    table = elements * m.up_factor * size * on_cpu * (not (work.lora.rank or is_sharded(work)))
    moving = work.routed_bytes + inner * (m.up_factor + 1)
    return PartBytes(saved, moving + work.routed_bytes, moving + table)


def _mixed(work: Workload) -> float:
    """Bytes of attention's output ahead of its projection; the queries take as many."""
    heads = work.model.num_heads * work.model.padded_head_dim
    return work.row_tokens * heads / work.columns * work.sizes.weight


def _inner(work: Workload) -> float:
    """Bytes of one inner value of the dense or shared MLP for each token."""
    width = work.model.dense_ffn_hidden_size
    return work.row_tokens * width / work.columns * work.sizes.weight


def _wide(work: Workload, output: float) -> float:
    """Bytes of the float32 accumulators of a grid's GEMM, by the bytes of its output."""
    return 2 * output * (work.layout.tp_rows > 1 and work.sizes.weight < WIDE)


def _head(work: Workload, on_cpu: bool) -> HeadBytes:
    """Counts the head's input, and the logits; or, of a fused loss, the gradients and a chunk of
    logits. The weight's gradient is added to its sum by GEMMs unless zero=3 shards that."""
    m, size, stream = work.model, work.sizes.weight, _stream(work)
    if m.head in CLASSIFIERS:
        return HeadBytes(stream, 2 * stream)
    share = MASKED_SHARE if m.head == "mlm" else 1.0
    tokens, entered = work.row_tokens * share, _entered(work) * share
    columns = -(-m.vocab_size // (VOCAB_MULTIPLE * work.columns)) * VOCAB_MULTIPLE
    if on_cpu or size > WIDE or work.layout.tp_rows > 1:
        logits = tokens * columns * size
        saved = stream + entered + logits * (1 + (m.logit_softcap > 0))
        return HeadBytes(saved, saved + entered + _wide(work, logits))
    rows = min(tokens, chunk_rows(columns * size))
    table = columns * m.hidden_size * (is_sharded(work) and work.lora.rank == 0)
    saved = stream + entered + table * (size if rows == tokens else max(WIDE, size))
    return HeadBytes(saved, saved + entered + rows * columns * size)


def _gathered(work: Workload, first: bool, last: bool) -> tuple[float, float]:
    """(bytes of embedding and head that zero=3 keeps gathered, temporary bytes of its all-gathers).

    Temporary are embedding and head, a block and the next one, and one block's gradients
    (arXiv:1910.02054, section 5).
    """
    if not is_sharded(work):
        return 0.0, 0.0
    sizes, block, run = work.sizes, block_elements(work).total, work.run
    ends = sizes.weight * sum(
        times * prod(parameter.local_shape(work.layout))
        for parameter, times in parameter_copies(run, BlockCounts(0, 0), (first, last))
        if parameter.trained or parameter.frozen
    )
    return ends, ends + block * (2 * sizes.weight + sizes.gradient)


def _update(work: Workload, pp_rank: int) -> float:
    """Bytes of zero=1's update: copies of rows to gather, and of the largest parameter of them."""
    widest = rank_elements(work, pp_rank).widest * (work.zero == 1)
    return gathered_bytes(work, pp_rank) + widest * work.sizes.weight


def gathered_bytes(work: Workload, pp_rank: int) -> float:
    """Bytes of the copies that zero=1 gathers of updated rows: this rank's and all owners'."""
    copies = work.zero == 1 and not work.gathers_without_copy
    return copies * rank_elements(work, pp_rank).copied * float(work.sizes.weight)


def _panels(work: Workload) -> float:
    """Bytes of the receive buffers of a grid's panels (arXiv:2104.05343); 0 without a grid."""
    if work.layout.tp_rows == 1:
        return 0.0
    m = work.model
    widest = max(m.up_factor * m.dense_ffn_hidden_size, m.vocab_size) / work.columns
    rows = work.row_tokens + widest
    return min(2, work.panels - 1) * rows * m.hidden_size / work.panels * work.sizes.weight
