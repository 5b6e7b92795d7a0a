"""Seconds of a step's parts on this machine's processor, from a calibration.

A pass over some blocks is counted (`Amounts`), and each count costs the seconds per unit that
`mtcli.core.plan.measure_cpu` has fitted to real steps; attention and what ranks send each other
come from measurements of their own. Processes beyond the machine's cores share them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import log
from operator import mul

from mtcli.core.plan import traffic
from mtcli.core.plan.calibration import Amounts, AttentionRow, Calibration
from mtcli.core.plan.communication import (
    context_parallel,
    exchange_seconds,
    expert_parallel,
    passes,
    tensor_parallel,
    transfer_seconds,
)
from mtcli.core.plan.costs import Costs, Pass
from mtcli.core.plan.elements import block_elements, rank_elements
from mtcli.core.plan.gpu_time import dense_gemms
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.traffic import Transfer
from mtcli.core.plan.workload import Workload

Ways = tuple[Amounts, Amounts]  # of a forward pass, and of its backward pass

END = 0.5  # launches of an end of the model, in blocks
NORM = Transfer("all_reduce", 16.0, 2)  # of gradients


def stage_amounts(work: Workload) -> Ways:
    """Amounts of both passes of a model that one rank holds alone."""
    ways = zip(block_amounts(work), embedding_amounts(work), head_amounts(work), strict=True)
    forward, backward = (
        first + last + tuple(work.model.num_layers * count for count in block)
        for block, first, last in ways
    )
    return forward, backward


def block_amounts(work: Workload) -> Ways:
    """Amounts of both passes of a block on a rank."""
    m, tp, tokens = work.model, work.layout.tp, work.tokens
    flops = sum(2.0 * a * b * c for a, b, c in dense_gemms(work)) / tp
    inner = m.dense_ffn_hidden_size / tp
    amounts = Amounts(
        launches=1.0,
        flops=flops,
        residual=tokens * m.hidden_size / work.sequence_shards,
        inner=tokens * inner,
        weights=block_elements(work).total,
    )
    return _there_and_back(work, amounts + _routed(work) if m.num_experts else amounts)


def _there_and_back(work: Workload, forward: Amounts) -> Ways:
    """Amounts of both passes, where each GEMM of a forward pass has two in the backward pass, or
    one where its weight is frozen."""
    return forward, forward._replace(flops=work.gemms_back * forward.flops)


def _routed(work: Workload) -> Amounts:
    m, layout = work.model, work.layout
    rows, width = work.expert_rows, m.moe_ffn_hidden_size / layout.etp
    gemms = 1 + m.up_factor
    return Amounts(
        flops=2.0 * rows * gemms * width * m.hidden_size,
        inner=rows * width,
        copies=rows * m.hidden_size,
        experts=m.num_experts / layout.ep,
    )


def embedding_amounts(work: Workload) -> Ways:
    """Amounts of the lookup; in the backward pass of the table's gradient, as large as it."""
    m, tp = work.model, work.layout.tp
    there = Amounts(launches=END, residual=END * work.tokens * m.hidden_size)
    return there, there._replace(weights=m.vocab_size * m.hidden_size / tp)


def head_amounts(work: Workload) -> Ways:
    """Amounts of the last norm, the logits and their loss."""
    m, tp = work.model, work.layout.tp
    columns = m.vocab_size / tp
    there = Amounts(
        launches=END,
        flops=2.0 * work.tokens * columns * m.hidden_size,
        residual=END * work.tokens * m.hidden_size / work.sequence_shards,
        logits=work.tokens * columns,
        weights=columns * m.hidden_size,
    )
    return _there_and_back(work, there)


def seconds_of(amounts: Ways, known: Calibration) -> Pass:
    """Seconds of amounts at a calibration's prices, attention aside."""
    ways = zip(amounts, (known.forward, known.backward), strict=True)
    return Pass(*(sum(map(mul, counts, prices)) for counts, prices in ways))


def attention_seconds(work: Workload, known: Calibration) -> Pass:
    """Seconds of scores, softmax and values of a rank's heads; of a ring, of all its hops."""
    layout, heads = work.layout, work.model.num_heads / work.layout.tp
    if layout.cp == 1 or work.cp_mode == "a2a":
        row = row_at(known.attention, work.seq_len)
        scores = work.micro_batch_size * heads / layout.cp * work.seq_len**2
        return Pass(scores * row.forward, scores * row.backward)
    length = work.seq_len / layout.cp
    row = row_at(known.attention, length)
    scores, hops = work.micro_batch_size * heads * length**2, layout.cp - 1
    return Pass(
        scores * (row.square_forward + hops * row.part_forward / 2),
        scores * (row.square_backward + hops * row.part_backward / 2),
    )


def row_at(rows: Sequence[AttentionRow], length: float) -> AttentionRow:
    """Interpolates the row of a length by its logarithm; beyond the ends it is the end's."""
    at = bisect_right([row.length for row in rows], length)
    if at == 0 or at == len(rows):
        return rows[max(0, at - 1)]
    before, after = rows[at - 1], rows[at]
    share = log(length / before.length) / log(after.length / before.length)
    return AttentionRow(*(a + share * (b - a) for a, b in zip(before, after, strict=True)))


def host_block(work: Workload, device: Device) -> Costs:
    """Costs of a step's parts that depend neither on the pipeline nor on the data ranks."""
    known = device.measured
    attention = attention_seconds(work, known)
    compute = seconds_of(block_amounts(work), known) + attention
    tensor = tensor_parallel(work, device)
    context = context_parallel(work, device)
    expert = expert_parallel(work, device) + _sorted_rows(work, device)
    busy = compute + tensor + context + expert
    again = {"full": busy.forward, "selective": attention.forward, "none": 0.0}[work.recompute]
    # Activations enter the head, or leave the embedding, by one of the two collectives of a half.
    half = 0.5 * transfer_seconds(traffic.half_block(work), device)
    entry = Pass(half, half)
    return Costs(
        block=Pass(busy.forward, busy.backward + again),
        compute=compute,
        tensor=tensor,
        context=context,
        expert=expert,
        first=seconds_of(embedding_amounts(work), known) + entry,
        last=seconds_of(head_amounts(work), known) + entry,
        recomputed=again,
    )


def host_step(work: Workload, parts: Costs, device: Device) -> Costs:
    """Costs of all of a step's parts: `parts`, gradients and the update. Nothing of it is hidden,
    as ranks' collectives take the cores that compute."""
    layout, known = work.layout, device.measured
    gradients = max(_gradients(rank, work, device) for rank in work.large_ranks)
    gradients += transfer_seconds(traffic.tied_embedding(work), device)
    shards = layout.dp * layout.cp if work.zero else 1
    per_block, per_element = known.update
    update = max(
        per_block * work.layers_of_rank(rank)
        + per_element * rank_elements(work, rank).total / shards
        for rank in work.large_ranks
    )
    sums = 2 if work.optimizer == "lamb" else 1  # the gradient norm, and then LAMB's norms
    agreement = 0.0 if layout.world == 1 else sums * transfer_seconds([NORM], device)
    costs = replace(
        parts,
        block=parts.block + parts.sharded,
        gradients=gradients,
        gradients_exposed=gradients,
        optimizer=update,
        overhead=known.overhead + agreement,
    )
    return costs.crowded(known.crowd(layout.world))


def _sorted_rows(work: Workload, device: Device) -> Pass:
    """Seconds of sorting a block's rows that came from several ranks by expert, and back."""
    layout = work.layout
    if layout.ep * layout.etp == 1 or work.dispatcher != "all_to_all":
        return Pass()
    each = 2 * 2 * work.routed_bytes / device.measured.memory_bandwidth
    return Pass(each, each)


def _gradients(pp_rank: int, work: Workload, device: Device) -> float:
    """Seconds of reducing gradients over the data ranks of a replica, with zero=1 of a scatter and
    a gather; and of what replicas exchange."""
    total = exchange_seconds(work, pp_rank, device)
    if work.zero == 3:
        return total
    both = passes(traffic.gradient_reduction(rank_elements(work, pp_rank), work), device)
    return total + both.forward + both.backward
