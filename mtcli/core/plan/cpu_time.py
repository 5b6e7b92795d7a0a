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

from mtcli.core.plan.calibration import Amounts, AttentionRow, Calibration, Exchange
from mtcli.core.plan.communication import data_groups
from mtcli.core.plan.elements import block_elements, rank_elements
from mtcli.core.plan.exchange.arithmetic import cpu_seconds
from mtcli.core.plan.exchange.methods import exchange_of
from mtcli.core.plan.gpu_time import dense_gemms
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.workload import Costs, Pass, Workload

Ways = tuple[Amounts, Amounts]  # of a forward pass, and of its backward pass

END = 0.5  # launches of an end of the model, in blocks


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
    tensor, context, expert = _tensor(work, device), _context(work, device), _expert(work, device)
    busy = compute + tensor + context + expert
    again = {"full": busy.forward, "selective": attention.forward, "none": 0.0}[work.recompute]
    entry = _pair(work, device) * 0.5  # activations enter the head, or leave the embedding
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
    gradients += _tied(work, device)
    sharded = _sharded(work, device)
    shards = layout.dp * layout.cp if work.zero else 1
    per_block, per_element = known.update
    update = max(
        per_block * work.layers_of_rank(rank)
        + per_element * rank_elements(work, rank).total / shards
        for rank in work.large_ranks
    )
    moved = work.stream_bytes / layout.tp
    sums = 2 if work.optimizer == "lamb" else 1  # the gradient norm, and then LAMB's norms
    agreement = 0.0 if layout.world == 1 else sums * _link(device, "reduce", 16.0, 2)
    costs = replace(
        parts,
        block=parts.block + sharded,
        sharded=sharded,
        hop=0.0
        if layout.pp == 1
        else _link(device, "hop", 2 * moved, 2, layout.world // layout.pp),
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


def _link(device: Device, kind: Exchange, moved: float, size: int, stride: int = 1) -> float:
    """Seconds of a collective of `size` ranks, `stride` apart, whose global tensor has `moved`
    bytes; where they are on several machines it takes as long as a ring over their network."""
    if size == 1:
        return 0.0
    sent = moved * (size - 1) / size
    if device.host_network is not None and size * stride > device.node_size:
        ways = 2 if kind == "reduce" else 1
        return _over_network(device, ways * sent, ways * (size - 1))
    latency, per_byte = calibration_of(device).links[kind]
    return latency + per_byte * sent


def _over_network(device: Device, sent: float, messages: int) -> float:
    """Seconds in which a rank sends so many bytes over the network, in messages one after another:
    as long as they cross, or as long as gloo's sockets take a core, as they do for hops.

    Costs are made longer where ranks share a core, in which time the network goes on by itself.
    """
    network, (latency, per_byte) = device.host_network, calibration_of(device).links["hop"]
    assert network is not None, f"the ranks of {device.name} have no network between them"
    crossing = sent / network.bandwidth + messages * network.latency
    return max(latency * messages + per_byte * sent, crossing / device.crowd)


def _tensor(work: Workload, device: Device) -> Pass:
    """Seconds of a gather and a scatter, or an all-reduce, for each half of a block with sharded
    GEMMs; and of exchanging the heads that ranks share."""
    once = _link(device, "exchange", work.head_bytes, work.kv_sharers)
    return _pair(work, device) * work.sharded_halves + Pass(once, once)


def _pair(work: Workload, device: Device) -> Pass:
    kinds: tuple[Exchange, ...] = ("gather", "scatter") if work.sequence_parallel else ("reduce",)
    once = sum(_link(device, kind, work.stream_bytes, work.layout.tp) for kind in kinds)
    return Pass(once, once)


def _context(work: Workload, device: Device) -> Pass:
    """Seconds of sending keys and values round the ring, and in the backward pass their gradients,
    in float32, too. With cp_mode a2a heads are exchanged both ways."""
    m, layout = work.model, work.layout
    if work.cp_mode == "a2a":
        local = 2.0 * work.tokens * (m.num_heads + work.kv_heads) * m.head_dim / layout.tp
        both = _link(device, "exchange", local * work.sizes.weight, layout.cp, layout.tp)
        return Pass(both, both)
    if layout.cp == 1:
        return Pass()
    elements = 2.0 * work.tokens * work.kv_heads * m.head_dim / layout.tp
    latency, per_byte = calibration_of(device).links[
        "gather"
    ]  # of a hop: everyone gives the next rank its own
    once = (layout.cp - 1) * (latency + per_byte * (elements * work.sizes.weight))
    home = latency + per_byte * (elements * max(4, work.sizes.weight))
    return Pass(once, once + layout.cp * home)


def _expert(work: Workload, device: Device) -> Pass:
    """Seconds of dispatch and combine over ep, gather and scatter over etp, and of the counts that
    lead them; rows that came from several ranks are sorted by expert, and back."""
    m, layout = work.model, work.layout
    if not m.num_experts:
        return Pass()
    routed = work.routed_bytes
    both = _link(device, "gather", routed, layout.etp) + _link(
        device, "scatter", routed, layout.etp
    )
    both += 2 * _link(device, "exchange", routed / layout.etp, layout.ep, layout.etp)
    counts = _link(device, "gather", 8.0 * m.num_experts, layout.ep * layout.etp)
    if layout.ep * layout.etp > 1 and work.dispatcher == "all_to_all":
        both += 2 * 2 * routed / calibration_of(device).memory_bandwidth
    return Pass(both + counts, both)


def _gradients(pp_rank: int, work: Workload, device: Device) -> float:
    """Seconds of reducing gradients over the data ranks of a replica, with zero=1 of a scatter and
    a gather; and of what replicas exchange."""
    total, sizes = exchange_seconds(work, pp_rank, device), work.sizes
    if work.zero == 3:
        return total
    for count, ranks, stride in data_groups(rank_elements(work, pp_rank), work.layout):
        if work.zero:
            total += _link(device, "scatter", float(count * sizes.gradient), ranks, stride)
            total += _link(device, "gather", float(count * sizes.weight), ranks, stride)
        else:
            total += _link(device, "reduce", float(count * sizes.gradient), ranks, stride)
    return total


def exchange_seconds(work: Workload, pp_rank: int, device: Device) -> float:
    """Mean seconds per step of what a rank sends to other replicas, as a gather of as much, and of
    the arithmetic for it."""
    replicas = work.layout.replicas
    if replicas == 1:
        return 0.0
    exchange = exchange_of(work, pp_rank)
    sent = exchange.busiest_bytes(tree=True)
    stride = work.layout.tp * work.layout.cp * work.layout.dp
    computed = cpu_seconds(exchange.arithmetic(), calibration_of(device))
    return computed + _link(device, "gather", sent * replicas / (replicas - 1), replicas, stride)


def _tied(work: Workload, device: Device) -> float:
    """Seconds of summing a tied embedding's two gradients, at the ends of a pipeline."""
    m, layout = work.model, work.layout
    if layout.pp == 1 or not m.tie_embeddings:
        return 0.0
    elements = m.vocab_size * m.hidden_size / layout.tp
    apart = (layout.pp - 1) * layout.world // layout.pp
    return _link(device, "reduce", elements * work.sizes.gradient, 2, apart)


def _sharded(work: Workload, device: Device) -> Pass:
    """Seconds of a block's ZeRO-3: weights gathered for both passes, gradients reduce-scattered."""
    if work.zero != 3:
        return Pass()
    seconds = sum(  # torch's FSDP2 takes gloo's way, as hops do
        _link(device, "hop", float(count * work.sizes.weight), ranks, stride)
        for count, ranks, stride in data_groups(block_elements(work), work.layout)
    )
    return Pass(seconds, 2 * seconds)
