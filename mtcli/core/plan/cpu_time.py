"""Seconds of a step's parts on this machine's processor, from a calibration.

A pass over some blocks is counted (`Amounts`), and each count costs the seconds per unit that
`mtcli.core.plan.measure_cpu` has fitted to real steps; attention and what ranks send each other
come from measurements of their own. Processes beyond the machine's cores share them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import log
from operator import mul

from mtcli.core.plan import traffic
from mtcli.core.plan.calibration import Amounts, AttentionRow, Calibration, Exchange
from mtcli.core.plan.elements import block_elements, rank_elements
from mtcli.core.plan.exchange.arithmetic import cpu_seconds
from mtcli.core.plan.exchange.methods import exchange_of
from mtcli.core.plan.gpu_time import dense_gemms
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.traffic import HOPS, Kind, PassTransfers, Transfer
from mtcli.core.plan.workload import Costs, Pass, Workload

Ways = tuple[Amounts, Amounts]  # of a forward pass, and of its backward pass

END = 0.5  # launches of an end of the model, in blocks
NORM = Transfer("all_reduce", 16.0, 2)  # of gradients
LINKS: dict[Kind, Exchange] = {
    "all_gather": "gather",
    "reduce_scatter": "scatter",
    "all_reduce": "reduce",
    "all_to_all": "exchange",
    "ring": "gather",  # everyone gives the next rank its own
    "fsdp": "hop",  # by gloo, as hops are
    "p2p": "hop",
}


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
    gemms = 3 if m.is_gated else 2
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
    known = calibration_of(device)
    attention = attention_seconds(work, known)
    compute = seconds_of(block_amounts(work), known) + attention
    tensor = _passes(traffic.tensor_parallel(work), device)
    context = _passes(traffic.context_parallel(work), device)
    expert = _passes(traffic.expert_parallel(work), device)
    expert += _sorted_rows(work, device)
    busy = compute + tensor + context + expert
    again = {"full": busy.forward, "selective": attention.forward, "none": 0.0}[work.recompute]
    # Activations enter the head, or leave the embedding, by one of the two collectives of a half.
    half = 0.5 * _seconds(traffic.half_block(work), device)
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
    """Costs of all of a step's parts: `parts`, hops, gradients and the update. Nothing of it is
    hidden, as ranks' collectives take the cores that compute."""
    layout, known = work.layout, calibration_of(device)
    gradients = max(_gradients(rank, work, device) for rank in work.large_ranks)
    gradients += _seconds(traffic.tied_embedding(work), device)
    sharded = _passes(traffic.sharded_block(block_elements(work), work), device)
    shards = layout.dp * layout.cp if work.zero else 1
    per_block, per_element = known.update
    update = max(
        per_block * work.layers_of_rank(rank)
        + per_element * rank_elements(work, rank).total / shards
        for rank in work.large_ranks
    )
    sums = 2 if work.optimizer == "lamb" else 1  # the gradient norm, and then LAMB's norms
    agreement = 0.0 if layout.world == 1 else sums * _seconds([NORM], device)
    costs = replace(
        parts,
        block=parts.block + sharded,
        sharded=sharded,
        hop=_seconds([traffic.pipeline_hop(work)], device),
        gradients=gradients,
        gradients_exposed=gradients,
        optimizer=update,
        overhead=known.overhead + agreement,
    )
    return costs.crowded(known.crowd(layout.world))


def calibration_of(device: Device) -> Calibration:
    """The calibration of a device that has one."""
    assert device.calibration is not None, f"{device.name} was not measured"
    return device.calibration


def _seconds(sent: Iterable[Transfer], device: Device) -> float:
    """Seconds of collectives; one whose ranks are on several machines takes as long as a ring over
    their network."""
    return sum(c.times * _once(c, device) for c in sent if c.size > 1)


def _once(sent: Transfer, device: Device) -> float:
    ways = 2 if sent.kind == "all_reduce" else 1
    is_hop = sent.kind in HOPS
    own = sent.moved if is_hop else sent.moved * (sent.size - 1) / sent.size
    if device.host_network is not None and sent.size * sent.stride > device.node_size:
        return _over_network(device, ways * own, 1 if is_hop else ways * (sent.size - 1))
    latency, per_byte = calibration_of(device).links[LINKS[sent.kind]]
    return latency + per_byte * own


def _passes(traffic: PassTransfers, device: Device) -> Pass:
    return Pass(*(_seconds(way, device) for way in traffic))


def _over_network(device: Device, sent: float, messages: int) -> float:
    """Seconds in which a rank sends so many bytes over the network, in messages one after another:
    as long as they cross, or as long as gloo's sockets take a core, as they do for hops.

    Costs are made longer where ranks share a core, in which time the network goes on by itself.
    """
    network, (latency, per_byte) = device.host_network, calibration_of(device).links["hop"]
    assert network is not None, f"the ranks of {device.name} have no network between them"
    crossing = sent / network.bandwidth + messages * network.latency
    return max(latency * messages + per_byte * sent, crossing / device.crowd)


def _sorted_rows(work: Workload, device: Device) -> Pass:
    """Seconds of sorting a block's rows that came from several ranks by expert, and back."""
    layout = work.layout
    if layout.ep * layout.etp == 1 or work.dispatcher != "all_to_all":
        return Pass()
    each = 2 * 2 * work.routed_bytes / calibration_of(device).memory_bandwidth
    return Pass(each, each)


def _gradients(pp_rank: int, work: Workload, device: Device) -> float:
    """Seconds of reducing gradients over the data ranks of a replica, with zero=1 of a scatter and
    a gather; and of what replicas exchange."""
    total = exchange_seconds(work, pp_rank, device)
    if work.zero == 3:
        return total
    both = _passes(traffic.gradient_reduction(rank_elements(work, pp_rank), work), device)
    return total + both.forward + both.backward


def exchange_seconds(work: Workload, pp_rank: int, device: Device) -> float:
    """Mean seconds per step of what a rank sends to other replicas, and of the arithmetic."""
    exchange = traffic.replica_exchange(work, pp_rank, tree=True)
    if not exchange:
        return 0.0
    arithmetic = exchange_of(work, pp_rank).arithmetic()
    return cpu_seconds(arithmetic, calibration_of(device)) + _seconds(exchange, device)
