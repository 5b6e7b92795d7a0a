"""Seconds of the parts of a step, and of its pipeline, by simulating the schedule."""

from dataclasses import replace
from functools import cache
from math import prod

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.update_rules import RuleFacts
from mtcli.core.plan.communication import (
    collective_seconds,
    context_parallel,
    dispatch_seconds,
    exchange_seconds,
    expert_parallel,
    passes,
    starting_seconds,
    tensor_parallel,
    transfer_seconds,
)
from mtcli.core.plan.costs import Costs, Pass
from mtcli.core.plan.elements import block_elements, rank_elements
from mtcli.core.plan.gpu_time import (
    attention_seconds,
    beside_host,
    block_seconds,
    dense_gemms,
    embedding_seconds,
    gemm_seconds,
    gemms_seconds,
    head_seconds,
    host_seconds,
)
from mtcli.core.plan.hardware import Device
from mtcli.core.plan.orthogonalising import muon_seconds
from mtcli.core.plan.traffic import (
    gradient_reduction,
    half_block,
    of_block,
    pipeline_hop,
    sharded_block,
    tied_embedding,
)
from mtcli.core.plan.workload import Precision, Workload, schedule_of
from mtcli.core.schedule.timeline import Timeline, simulate
from mtcli.kernels.limits import exchange_chunks

STATE_PASSES = 2  # the optimizer reads and writes masters and moments
UPDATE_CALLS = 80  # operations of the update of a block's tensors


def step_costs(work: Workload, device: Device) -> Costs:
    elements = block_elements(work)
    gathers = sharded_block(elements, work)
    sharded = passes(gathers, device)
    hop = collective_seconds(pipeline_hop(work), device)
    parts = replace(block_costs(work, device), sharded=sharded, hop=hop)
    added = elements.total * work.accumulated_bytes / device.reached_bandwidth
    busy = Pass(
        _covered(parts.busy.forward, sharded.forward, device),
        _covered(parts.busy.backward + added, sharded.backward, device),
    )
    host = parts.host + starting_seconds(gathers, work, device)
    block = beside_host(busy, host, device)
    undisturbed = _undisturbed(work, block, parts, device)
    gradients, exposed = _gradients(work, undisturbed, device)
    return replace(
        parts,
        block=block,
        busy=busy,
        host=host,
        gradients=gradients,
        gradients_exposed=exposed,
        optimizer=_optimizer(work, device),
        overhead=device.physics.step_overhead,
        crowd=device.crowd,
    )


def block_costs(work: Workload, device: Device) -> Costs:
    """Costs of the parts of a step that do not depend on the pipeline or the data ranks."""
    p = work.layout
    axes = {"tp": p.tp, "cp": p.cp, "ep": p.ep, "etp": p.etp}
    alone = ParallelLayout(prod(axes.values()), **axes, tp_rows=p.tp_rows)
    block_work = replace(
        work, layout=alone, global_batch_size=0, schedule_name="", zero=0, stage_sizes=()
    )
    return _block_parts(block_work, device)


@cache
def _block_parts(work: Workload, device: Device) -> Costs:
    compute, host = block_seconds(work, device), host_seconds(work, device)
    host += starting_seconds(of_block(work), work, device)
    tensor = tensor_parallel(work, device)
    context = context_parallel(work, device)
    expert = expert_parallel(work, device)
    attention = attention_seconds(work, device)
    # a hop travels while a block of scores is computed
    hides = device.physics.ring_overlap * (work.cp_mode == "ring")
    tensor_shown = tensor.beyond(_beside_gemms(work, device))
    expert_shown = expert.beyond(_beside_shared_expert(work, device))
    busy = compute + tensor_shown + expert_shown + context.beyond(attention * hides)
    again = {"full": busy.forward, "selective": attention.forward, "none": 0.0}[work.recompute]
    busy += Pass(backward=again)
    host += Pass(backward=host.forward * (work.recompute == "full"))
    return Costs(
        block=beside_host(busy, host, device),
        busy=busy,
        host=host,
        compute=compute,
        tensor=tensor,
        context=context,
        expert=expert,
        first=embedding_seconds(work, device),
        last=head_seconds(work, device),
        recomputed=again,
    )


def _beside_gemms(work: Workload, device: Device) -> Pass:
    """Seconds of a block's collectives over tp that its GEMMs hide (parallel/overlap.py).

    A gather travels beside the product of this rank's tokens, 1/tp of all; the sum of an output
    beside the products of all its chunks but the first; that of an input's gradient beside the
    product of its weight's.
    """
    tp = work.layout.tp
    if not work.tp_overlap or tp == 1 or work.layout.tp_rows > 1:
        return Pass()
    half = [collective_seconds(transfer, device) for transfer in half_block(work)]
    gathered, summed = half if work.sequence_parallel else (0.0, half[0])
    chunked = 1 - 1 / exchange_chunks(work.stream_bytes)
    hidden = Pass()
    for index, (m, n, k) in enumerate(dense_gemms(work)):
        if work.model.mla and index < 3:  # latents enter apart from their layers
            continue
        if index % 2 == 0:
            n //= tp
            ahead = gemm_seconds((m, n, k), work, device) / tp
            behind = gemm_seconds((n, k, m), work, device) * (work.gemms_back > 1)
            hidden += Pass(min(gathered, ahead), min(summed, behind))
        else:
            k //= tp
            ahead = gemm_seconds((m, k, n), work, device) / tp
            behind = gemm_seconds((m, n, k), work, device)
            hidden += Pass(min(summed, behind) * chunked, min(gathered, ahead))
    return hidden * device.physics.data_overlap


def _beside_shared_expert(work: Workload, device: Device) -> Pass:
    """Seconds of the exchanges over ep that the shared expert hides (model/moe.py): the dispatch
    travels beside its second GEMM; where the host waits for no numbers of rows, the dispatch beside
    the first, and the combine beside the second."""
    m, tp = work.model, work.layout.tp
    if not (m.num_experts and m.shared_expert_ffn_hidden_size and work.ep_overlap):
        return Pass()
    inner = m.shared_expert_ffn_hidden_size // tp
    shapes = [(work.tokens, m.hidden_size, inner)]
    if m.pad_to_capacity:
        shapes.append((work.tokens, m.up_factor * inner, m.hidden_size))
    sent, hidden = dispatch_seconds(work, device), Pass()
    for shape in shapes:
        gemms = gemms_seconds(work, device, [shape])
        hidden += Pass(min(sent, gemms.forward), min(sent, gemms.backward))
    return hidden * device.physics.data_overlap


def _undisturbed(work: Workload, block: Pass, parts: Costs, device: Device) -> Pass:
    """Seconds of a block's passes in which its own collectives leave the network between nodes free
    for the data ranks' exchange."""
    layout, busy = work.layout, Pass()
    ranks = (layout.tp, layout.tp * layout.cp, layout.ep * layout.etp)
    for size, seconds in zip(ranks, (parts.tensor, parts.context, parts.expert), strict=True):
        busy += seconds * (size > device.node_size)
    again = busy.forward * (work.recompute == "full")
    return block.beyond(busy).beyond(Pass(backward=again))


def _covered(compute: float, fetched: float, device: Device) -> float:
    """Seconds of a block whose weights are all-gathered while the previous block computes."""
    hidden = min(fetched, compute) * device.physics.shard_overlap
    return compute + fetched - hidden


def _gradients(work: Workload, undisturbed: Pass, device: Device) -> tuple[float, float]:
    across = max(exchange_seconds(work, rank, device) for rank in work.large_ranks)
    if device.name == "cpu":  # other devices' is not counted
        across += transfer_seconds(tied_embedding(work), device)
    if work.zero == 3:
        return across, across
    ranks = [
        passes(gradient_reduction(rank_elements(work, pp_rank), work), device)
        for pp_rank in work.large_ranks
    ]
    most = max(ranks, key=lambda rank: rank.total)
    behind = undisturbed * (
        max(work.layers_of_stage) * _chunk_passes(work) * device.physics.data_overlap
    )
    hides = work.hiding_passes
    hidden = Pass(behind.forward * hides.forward, behind.backward * hides.backward)
    return most.total + across, most.beyond(hidden).total + across


def _chunk_passes(work: Workload) -> int:
    """Chunk passes that data parallel communication overlaps: the backward that completes the
    gradients of a first chunk, and those after it. By symmetry as many forwards come before a
    last chunk needs its weights.

    Interleaved micro-batches run in groups of pp through one chunk after another: the last group is
    through with a chunk while the rank's other chunks are still to come (arXiv:2104.04473, figure
    4).
    """
    group = min(work.layout.pp, work.num_micro_batches)
    return (work.layout.vpp - 1) * group + 1


def _optimizer(work: Workload, device: Device) -> float:
    """Seconds of the update: gradients read twice (norm, update), optimizer state read and written.

    A rule with per-parameter norms (LAMB) reads masters and moments once more, as it needs the
    norms ahead of the update. Muon orthogonalises matrices.
    """
    layout, ranks = work.layout, (rank_elements(work, pp_rank) for pp_rank in work.large_ranks)
    shards = layout.dp * layout.cp if work.zero else 1
    fullest = max(ranks, key=lambda elements: elements.total)
    moved = sum(part.total / shards * _moved(part.rule, work.sizes) for part in fullest.rules)
    calls = Pass(UPDATE_CALLS * work.most_layers * device.physics.call * work.host_share)
    update = beside_host(Pass(moved / device.reached_bandwidth), calls, device).total
    return update + max(muon_seconds(work, pp_rank, device) for pp_rank in work.large_ranks)


def _moved(rule: RuleFacts, sizes: Precision) -> int:
    """Bytes that an update reads and writes per element."""
    moments = len(rule.moments) * sizes.moment
    again = (sizes.master or sizes.weight) + moments if rule.norms else 0
    return STATE_PASSES * (sizes.master + moments) + 2 * sizes.gradient + sizes.weight + again


def pipeline_seconds(work: Workload, costs: Costs) -> tuple[float, float]:
    """(seconds, bubble fraction) of the pipeline, simulated until it repeats and extrapolated."""
    pp, m, few = work.layout.pp, work.num_micro_batches, work.representative
    timeline = simulated(work, costs, few)
    end = timeline.end
    if m > few:
        end += (m - few) / pp * _round_seconds(work, costs, timeline)
    busy = sum(timeline.busy_seconds) * m / few
    end = _shared(end, busy, work, costs)
    return end, max(0.0, end * pp / busy - 1)  # of no idle time sums differ by their rounding


def evaluation_seconds(work: Workload, costs: Costs) -> float:
    """Seconds of a global batch of validation data: the pipeline's forwards alone."""
    layout, few = work.layout, work.representative
    stages = [stage.forward for stage in stage_seconds(work, costs)]
    schedule = schedule_of("forward_only", layout.pp, layout.vpp, few)
    end = simulate(schedule, lambda op: stages[op[2]], costs.hop).end
    pace = max(sum(stages[pp_rank :: layout.pp]) for pp_rank in range(layout.pp))
    more = work.num_micro_batches - few
    busy = sum(stages) * work.num_micro_batches
    return _shared(end + more * pace, busy, work, costs) + costs.overhead


def pipeline_timeline(work: Workload, costs: Costs, num_micro_batches: int) -> Timeline:
    """The timeline of `num_micro_batches`, which ends when `pipeline_seconds` says."""
    timeline = simulated(work, costs, num_micro_batches)
    end = _shared(timeline.end, sum(timeline.busy_seconds), work, costs)
    return timeline.scaled(end / timeline.end)


def _shared(end: float, busy: float, work: Workload, costs: Costs) -> float:
    """Seconds of a pipeline whose ranks share cores: while one waits, another uses its core."""
    if costs.crowd <= 1:
        return end
    return max(end / costs.crowd, busy / work.layout.pp)


def _round_seconds(work: Workload, costs: Costs, timeline: Timeline) -> float:
    """Seconds that pp more micro-batches add once the pipeline is full.

    The last stage's forwards set the pace, unless all forwards come first (gpipe) or the last group
    of micro-batches is larger than pp.
    """
    pp, last = work.layout.pp, work.layout.num_stages - 1
    uneven = work.layout.vpp > 1 and work.num_micro_batches % pp > 0
    if uneven or work.schedule_name == "gpipe":
        return simulated(work, costs, work.representative + pp).end - timeline.end
    spans = timeline.spans[-len(timeline.spans) // pp :]  # of the last rank
    starts = [span.start for span in spans if span.op.kind == "F" and span.op.stage == last]
    return starts[-1] - starts[-1 - pp]


def stage_seconds(work: Workload, costs: Costs) -> list[Pass]:
    """Seconds of each stage's forward and backward, for one micro-batch."""
    counts = work.layers_of_stage
    blocks = {count: costs.block * count for count in set(counts)}
    stages = [blocks[count] for count in counts]
    stages[0] += costs.first
    stages[-1] += costs.last
    return stages


def weight_seconds(work: Workload, costs: Costs) -> list[float]:
    """Seconds of the W pass of each stage, about those of a forward's GEMMs."""
    stages = stage_seconds(work, costs)
    return [
        min(costs.compute.forward * layers, stage.backward / 2)
        for stage, layers in zip(stages, work.layers_of_stage, strict=True)
    ]


def simulated(work: Workload, costs: Costs, num_micro_batches: int) -> Timeline:
    """The simulated timeline of `num_micro_batches` micro-batches."""
    stages, weights = stage_seconds(work, costs), weight_seconds(work, costs)
    seconds = {
        "F": [stage.forward for stage in stages],
        "B": [stage.backward for stage in stages],
        "I": [stage.backward - half for stage, half in zip(stages, weights, strict=True)],
        "W": weights,
    }
    schedule = work.schedule(num_micro_batches)
    return simulate(schedule, lambda op: seconds[op[0]][op[2]], costs.hop)
