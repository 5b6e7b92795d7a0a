"""Lists the collectives and p2p transfers of a step, for every kind of device.

`communication.py` computes their seconds.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Literal, NamedTuple

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.plan.elements import RankElements
from mtcli.core.plan.exchange import exchange_of
from mtcli.core.plan.gpu_time import dense_gemms
from mtcli.core.plan.grid import grid_traffic
from mtcli.core.plan.workload import Workload

Kind = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "fsdp",  # a gather or scatter of torch's FSDP2, which has a transport of its own on CPUs
    "ring",  # a hop of ring attention
    "p2p",  # a hop of the pipeline
]
HOPS = ("ring", "p2p")


class Transfer(NamedTuple):
    """`times` collectives, or hops, in groups of `size` ranks that are `stride` apart."""

    kind: Kind
    moved: float  # bytes of the global tensor; of a hop, the bytes that a rank sends
    size: int
    stride: int = 1
    times: int = 1


class PassTransfers(NamedTuple):
    """The transfers of a forward pass, and of its backward pass."""

    forward: list[Transfer]
    backward: list[Transfer]


def tensor_parallel(work: Workload) -> PassTransfers:
    """A block's collectives over tp, for its tensor parallel halves. Ranks that share a key-value
    head also exchange columns of it and of its query heads."""
    exchange = Transfer("all_to_all", work.head_bytes, work.kv_sharers)
    if work.layout.tp_rows > 1:
        return _grid(work, exchange)
    both = [*half_block(work) * work.sharded_halves, exchange]
    return PassTransfers(both, both)


def half_block(work: Workload) -> list[Transfer]:
    """An all-gather and a reduce-scatter with sequence parallelism, else an all-reduce, which moves
    as many bytes (arXiv:2205.05198, section 4.2.2)."""
    kinds: tuple[Kind, ...] = (
        ("all_gather", "reduce_scatter") if work.sequence_parallel else ("all_reduce",)
    )
    return [Transfer(kind, work.stream_bytes, work.layout.tp) for kind in kinds]


def _grid(work: Workload, exchange: Transfer) -> PassTransfers:
    """The panels of a block's GEMMs on a grid of tp ranks, whose rows are consecutive ranks. None
    counts as hidden, although panels overlap GEMMs."""
    rows, columns = work.layout.tp_rows, work.layout.tp_columns
    panels, ways = work.panels * len(dense_gemms(work)), []
    for gemms, way in enumerate(grid_traffic(work), 1):  # of the forward one, of the backward two
        times = gemms * panels
        along = way.along * columns / max(1, columns - 1) / times
        down = way.down * rows / max(1, rows - 1) / times
        ways.append(
            [
                Transfer("all_gather", along, columns, 1, times),
                Transfer("all_gather", down, rows, columns, times),
                exchange,
            ]
        )
    return PassTransfers(*ways)


def context_parallel(work: Workload) -> PassTransfers:
    """The exchange of a block's keys and values, and of their gradients in the backward: around a
    ring, whose gradients travel on as float32 sums; all-gathered; or, with cp_mode a2a, an
    all-to-all of queries, keys, values and outputs."""
    m, cp, tp = work.model, work.layout.cp, work.layout.tp
    if cp == 1:
        return PassTransfers([], [])
    if work.cp_mode == "a2a":
        heads = 2.0 * work.tokens * (m.num_heads + work.kv_heads) * m.padded_head_dim / tp
        both = [Transfer("all_to_all", heads * work.sizes.weight, cp, tp)]
        return PassTransfers(both, both)
    elements = 2.0 * work.tokens * work.kv_heads * m.padded_head_dim / tp
    shard_bytes = elements * work.sizes.weight
    if work.cp_mode == "all_gather":
        kinds: tuple[Kind, Kind] = ("all_gather", "reduce_scatter")
        gather, scatter = (Transfer(kind, shard_bytes * cp, cp, tp) for kind in kinds)
        return PassTransfers([gather], [scatter])
    round_ring = Transfer("ring", shard_bytes, cp, tp, cp - 1)
    home = Transfer("ring", elements * max(4, work.sizes.weight), cp, tp, cp)
    return PassTransfers([round_ring], [round_ring, home])


def expert_parallel(work: Workload) -> PassTransfers:
    """A block's dispatch and combine over ep, their gather and scatter over etp, and the counts
    that precede them."""
    ep, etp, routed = work.layout.ep, work.layout.etp, work.routed_bytes
    if not work.model.num_experts:
        return PassTransfers([], [])
    both = [
        Transfer("all_gather", routed, etp),
        Transfer("reduce_scatter", routed, etp),
        Transfer("all_to_all", routed / etp, ep, etp, 2),
    ]
    counts = Transfer("all_gather", 8.0 * work.model.num_experts, ep * etp)
    return PassTransfers([counts, *both], both)


def of_block(work: Workload) -> PassTransfers:
    """All transfers of a block but those of its sharded weights."""
    axes = tensor_parallel(work), context_parallel(work), expert_parallel(work)
    forward, backward = zip(*axes, strict=True)
    return PassTransfers([*chain(*forward)], [*chain(*backward)])


def pipeline_hop(work: Workload) -> Transfer:
    """The p2p of a stage's output to the next rank: each tp rank sends its shard."""
    layout = work.layout
    ranks = min(2, layout.pp)
    return Transfer("p2p", work.stream_bytes / layout.tp, ranks, layout.world // layout.pp)


def gradient_reduction(elements: RankElements, work: Workload) -> PassTransfers:
    """The reduction of a rank's gradients over its data axes, after the backward: an all-reduce in
    the gradients' width; with zero=1 a reduce-scatter, and an all-gather of updated weights in the
    weights' width.

    ZeRO-3's traffic is per block: `sharded_block`.
    """
    gathers, reductions = [], []
    for count, ranks, stride in data_groups(elements, work.layout):
        gradient_bytes, back = float(count * work.gradient_width), float(count * work.sizes.weight)
        kind: Kind = "reduce_scatter" if work.zero else "all_reduce"
        reductions.append(Transfer(kind, gradient_bytes, ranks, stride))
        if work.zero:
            gathers.append(Transfer("all_gather", back, ranks, stride))
    return PassTransfers(gathers, reductions)


def sharded_block(elements: RankElements, work: Workload) -> PassTransfers:
    """A block's ZeRO-3 traffic: weights gathered for both passes, gradients reduce-scattered."""
    if work.zero != 3:
        return PassTransfers([], [])
    gather = [
        Transfer("fsdp", float(count * work.sizes.weight), ranks, stride)
        for count, ranks, stride in data_groups(elements, work.layout)
    ]
    return PassTransfers(gather, 2 * gather)


def replica_exchange(work: Workload, pp_rank: int, tree: bool) -> list[Transfer]:
    """The exchange of replicas after an update, as an all-gather of the mean bytes per step of the
    busiest rank; `tree` where all-reduces between replicas are trees."""
    layout = work.layout
    if layout.replicas == 1:
        return []
    sent = exchange_of(work, pp_rank).busiest_bytes(tree)
    moved = sent * layout.replicas / (layout.replicas - 1)
    return [Transfer("all_gather", moved, layout.replicas, layout.tp * layout.cp * layout.dp)]


def tied_embedding(work: Workload) -> list[Transfer]:
    """The sum of a tied embedding's two gradients, at the ends of a pipeline."""
    m, layout = work.model, work.layout
    if layout.pp == 1 or not m.tie_embeddings:
        return []
    elements = m.vocab_size * m.hidden_size / layout.tp
    apart = (layout.pp - 1) * layout.world // layout.pp
    return [Transfer("all_reduce", elements * work.sizes.gradient, 2, apart)]


def data_groups(elements: RankElements, layout: ParallelLayout) -> Iterator[tuple[int, int, int]]:
    """Yields (elements, number of ranks that reduce them, their stride) of attention, then
    experts."""
    if elements.attention:
        yield elements.attention, layout.dp * layout.cp, layout.tp
    if elements.experts:
        yield elements.experts, layout.edp, layout.ep * layout.etp
