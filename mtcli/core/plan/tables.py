"""A prediction as data: the JSON contract of `mtcli plan --json`, and rows for its tables.

Who is where: the place of every rank on both grids, and every group of both.

As text, worlds of more than WHOLE ranks are told by ranges: pipeline stages are alike, so that the
first one says it all, and so do the first and the last group of an axis.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mtcli.core.mesh.layout import Grid, ParallelLayout
from mtcli.core.mesh.parameters import count_active, count_parameters
from mtcli.core.plan.elements import rank_elements
from mtcli.core.plan.memory import fullest_rank, in_flight_chunks, memory_by_stage
from mtcli.core.plan.predict import FLOP_CONVENTION, Prediction, predict_workload
from mtcli.core.plan.workload import Workload

Json = dict[str, Any]
GIB = 2**30
UNEVEN = 1.25  # of the mean, which the busiest rank's experts get in the row about uneven loads
SHOWN_STAGES = 16  # of a longer pipeline its ends, and the rank that holds most

NOT_RUN = "2D tensor parallelism is planned; mtcli train runs tp_mode='1d' alone"

KEYS = (
    "layout",
    "parameters",
    "memory_bytes",
    "fits",
    "step_seconds",
    "tokens_per_second_per_gpu",
    "model_tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu",
    "hfu",
    "bubble_fraction",
    "communication_seconds",
)
NOTHING: Json = dict.fromkeys((*KEYS, "fits_from")) | {
    "candidates": []
}  # what a plan that is refused tells


def as_json(prediction: Prediction, candidates: Sequence[Prediction] = ()) -> Json:
    """The JSON of a plan; `candidates` are the layouts a search found, best first."""
    found = [figures(candidate) for candidate in candidates]
    return {"ok": True, "problems": [], **figures(prediction), "candidates": found}


def layout_of(work: Workload) -> Json:
    """Every size that says how the step is cut."""
    layout = work.layout
    axes = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
    return {
        "world": layout.world,
        **{axis: layout.size(axis) for axis in axes},
        "vpp": layout.vpp,
        "tp_mode": work.tp_mode,
        "schedule": work.schedule_name,
        "zero": work.zero,
        "recompute": work.recompute,
        "sequence_parallel": work.sequence_parallel,
        "micro_batch_size": work.micro_batch_size,
        "num_micro_batches": work.num_micro_batches,
        "global_batch_size": work.global_batch_size,
        "seq_len": work.seq_len,
        "precision": work.precision,
        "stage_layers": list(work.layers_of_stage),
    }


def summary(prediction: Prediction) -> list[tuple[str, str]]:
    """Rows of the summary table: what, and how much."""
    work, m, p = prediction.work, prediction.work.model, prediction
    tokens = work.global_batch_size * work.seq_len
    exposed = {axis: s for axis, s in p.communication_seconds.items() if s > 0}
    margin = f"{gib(p.device.memory_bytes - p.device.usable_bytes)} left to fragmentation"
    memory = [(name, gib(value)) for name, value in p.memory.as_dict().items() if name != "total"]
    return [
        ("parameters", f"{count_parameters(m):,} ({count_active(m):,} active)"),
        ("layout", describe(p)),
        ("step", f"{tokens:,} tokens, {work.num_micro_batches} micro-batches per data rank"),
        ("bytes per rank", f"{gib(p.memory.total)} of {gib(p.device.memory_bytes)}, {margin}"),
        ("", ", ".join(f"{name} {value}" for name, value in memory)),
        *_host_row(p),
        ("fullest rank", _named(p)),
        *_uneven_row(p),
        *_slow_precision(p),
        *_roofline_row(p),
        *([("runs", NOT_RUN)] if work.tp_mode == "2d" else []),
        ("step time", f"{p.step_seconds:.4g} s, {p.tokens_per_second_per_gpu:,.0f} tokens/s/GPU"),
        ("model TFLOP/s", f"{p.model_flops_per_gpu / 1e12:.4g} per GPU ({FLOP_CONVENTION})"),
        ("MFU, HFU", f"{p.mfu:.1%}, {p.hfu:.1%} (HFU adds what is computed again)"),
        ("counted otherwise", _other_counts(p)),
        ("pipeline bubble", f"{p.bubble_fraction:.1%} of the ideal time"),
        (
            "communication",
            ", ".join(f"{axis} {seconds:.3g} s" for axis, seconds in exposed.items()) or "none",
        ),
    ]


def _host_row(p: Prediction) -> list[tuple[str, str]]:
    copy = f"{gib(p.memory.host)} per rank, for what is saved while training goes on"
    return [("host memory", copy)] if p.memory.host else []


def uneven(p: Prediction) -> Prediction | None:
    """The same step where the busiest rank's experts get UNEVEN times the mean of copies."""
    if not p.work.model.num_experts:
        return None
    return predict_workload(replace(p.work, imbalance=UNEVEN), p.device)


def _uneven_row(p: Prediction) -> list[tuple[str, str]]:
    """A row on what uneven experts cost, where there are any."""
    if (other := uneven(p)) is None:
        return []
    more = f"{gib(other.memory.total - p.memory.total)} more and {other.step_seconds:.4g} s"
    return [(f"experts at {UNEVEN}x", f"{more}, if the busiest rank gets that much of the mean")]


def _other_counts(p: Prediction) -> str:
    """TFLOP/s per GPU by the other conventions in use."""
    rates = {n: r for n, r in p.flops_by_convention.items() if n != FLOP_CONVENTION}
    return ", ".join(f"{rate / 1e12:.4g} ({name})" for name, rate in rates.items())


def _named(p: Prediction) -> str:
    """The rank that holds most, and its place on both grids."""
    rank = fullest_rank(p.work, p.device)
    place = p.work.layout.coordinates(rank)
    sizes = [f"{axis}={i}" for axis, i in place.items() if p.work.layout.size(axis) > 1]
    return " ".join([str(rank), *([f"({', '.join(sizes)})"] if sizes else [])])


def stage_table(prediction: Prediction) -> tuple[list[str], list[list[str]]]:
    """(headings, a row per pipeline rank): micro-batches in flight and bytes by kind.

    The fullest rank has a star. 80 columns hold the table.
    """
    stages = _memory_by_stage(prediction)
    fullest = max(stages, key=lambda stage: stage["total"])
    kinds = [name for name in stages[0] if name not in ("pp_rank", "in_flight")]
    rows = []
    for stage in stages:
        place, end = stage["pp_rank"], min(stage["pp_rank"], len(stages) - 1 - stage["pp_rank"])
        if len(stages) > SHOWN_STAGES and end >= SHOWN_STAGES // 4 and stage is not fullest:
            continue
        most = "*" if stage is fullest else ""
        sizes = [gib(stage[kind]) for kind in kinds]
        rows.append([f"{place}{most}", f"{stage['in_flight']:.4g}", *sizes])
    return ["pp\nrank", "in\nflight", *kinds], rows


def _memory_by_stage(p: Prediction) -> list[Json]:
    """What the fullest rank of each pipeline rank holds; `in_flight` counts micro-batches."""
    return [
        {"pp_rank": place, "in_flight": chunks / p.work.layout.vpp, **memory.as_dict()}
        for place, (memory, chunks) in enumerate(
            zip(memory_by_stage(p.work, p.device), in_flight_chunks(p.work), strict=True)
        )
    ]


def _slow_precision(p: Prediction) -> list[tuple[str, str]]:
    """A row where the device has no arithmetic for narrow products and makes them in fp32."""
    asked, found = p.work.sizes.gemm, p.device.computes_in(p.work.sizes.gemm)
    if asked == found or found != "fp32":
        return []
    has = ", ".join(p.device.flops)
    return [("precision", f"{asked}, taken at the rate of fp32: {p.device.name} has {has}")]


def _roofline_row(p: Prediction) -> list[tuple[str, str]]:
    """A row where a device was taken for what three quick rates say of it."""
    if p.device.rates != "roofline":
        return []
    flops, memory, link = p.device.peak("fp32"), p.device.memory_bandwidth, p.device.link.bandwidth
    rates = f"{flops / 1e12:.3g} TFLOP/s, {memory / 1e9:.3g} GB/s of memory and {link / 1e9:.3g}"
    return [("rates", f"a roofline, not calibrated: {rates} GB/s between ranks")]


def describe(prediction: Prediction) -> str:
    """The layout in one line, axes of size 1 left out."""
    layout = layout_of(prediction.work)
    axes = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp")
    sizes = [f"{axis}={layout[axis]}" for axis in axes if layout[axis] > 1] or ["one rank"]
    if layout["tp_mode"] == "2d":
        sizes.insert(1, "(2d)")
    sizes.append(f"micro-batch {layout['micro_batch_size']}")
    if layout["pp"] > 1:
        sizes.append(layout["schedule"])
    if layout["zero"]:
        sizes.append(f"zero={layout['zero']}")
    if layout["recompute"] != "none":
        sizes.append(f"recompute {layout['recompute']}")
    if layout["tp"] > 1 and not layout["sequence_parallel"]:
        sizes.append("whole sequences")
    return " ".join(sizes)


def gib(count: float) -> str:
    """Bytes in GiB, or in MiB where that is less than a tenth of one."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def _uneven_figures(p: Prediction) -> Json | None:
    if (other := uneven(p)) is None:
        return None
    return {
        "imbalance": UNEVEN,
        "memory_bytes": other.memory.total,
        "fits": other.fits,
        "step_seconds": other.step_seconds,
    }


def figures(p: Prediction) -> Json:
    """Everything that the JSON says of one layout."""
    model = p.work.model
    peak = p.device.peak(p.work.sizes.gemm)
    most = max(rank_elements(p.work, pp_rank).total for pp_rank in range(p.work.layout.pp))
    return {
        "layout": layout_of(p.work),
        "parameters": {
            "total": count_parameters(model),
            "active": count_active(model),
            "max_per_rank": most,
        },
        "memory_bytes": p.memory.as_dict(),
        "host_bytes": round(p.memory.host),
        "fullest_rank": fullest_rank(p.work, p.device),
        "memory_by_stage": _memory_by_stage(p),
        "fits": p.fits,
        "uneven_experts": _uneven_figures(p),
        "step_seconds": p.step_seconds,
        "tokens_per_second_per_gpu": p.tokens_per_second_per_gpu,
        "model_tflops_per_gpu": p.model_flops_per_gpu / 1e12,
        "hardware_tflops_per_gpu": p.hardware_flops_per_gpu / 1e12,
        "mfu": p.mfu,
        "hfu": p.hfu,
        "bubble_fraction": p.bubble_fraction,
        "communication_seconds": p.communication_seconds,
        "device": p.device.name,
        "device_rates": p.device.rates,
        "flop_convention": FLOP_CONVENTION,
        "flop_conventions": {
            name: {"tflops_per_gpu": rate / 1e12, "share_of_peak": rate / peak}
            for name, rate in p.flops_by_convention.items()
        },
    }


RankGroups = dict[str, list[list[int]]]
WHOLE = 64  # ranks that are listed one by one
ROWS = 16  # of ranges, of which the middle is left out


def rank_places(layout: ParallelLayout) -> list[dict[str, dict[str, int]]]:
    """Each rank's place on the attention grid and on the expert grid, outermost axis first."""
    grids = {"attention": layout.attention, "experts": layout.experts}
    return [
        {name: _outermost_first(grid, grid.coordinates(rank)) for name, grid in grids.items()}
        for rank in range(layout.world)
    ]


def rank_groups(layout: ParallelLayout) -> dict[str, RankGroups]:
    """Every group of ranks that talk to each other along one axis, per grid and axis."""
    grids = {"attention": layout.attention, "experts": layout.experts}
    return {
        name: {axis: grid.groups(axis) for axis in reversed(grid.axes)}
        for name, grid in grids.items()
    }


def rank_table(layout: ParallelLayout) -> tuple[str, list[str], list[list[str]]]:
    """(title, headings, rows): a row per rank, or per range of ranks of the first stage."""
    places, groups = rank_places(layout), rank_groups(layout)
    axes = [(grid, axis) for grid in groups for axis in groups[grid]]
    columns = ["ranks", *(axis for _, axis in axes)]
    title = "Ranks on the attention grid, and on the expert grid"
    size = 1
    if layout.world > WHOLE:
        size, stage = layout.tp, layout.world // layout.pp
        places = places[:stage]
        title += f": stage 0 of {layout.pp}; stage p holds ranks p*{stage} to p*{stage}+{stage - 1}"
    rows = []
    for first in range(0, len(places), size):
        those = places[first : first + size]
        cells = [_range([place[grid][axis] for place in those]) for grid, axis in axes]
        rows.append([_range(list(range(first, first + size))), *cells])
    if layout.world > WHOLE and len(rows) > ROWS:
        rows = [*rows[: ROWS - 2], ["..."] * len(columns), rows[-1]]
    return title, columns, rows


def group_lines(layout: ParallelLayout) -> list[str]:
    """A line per axis of either grid with its groups: all, or how many there are and the ends."""
    lines = []
    for grid, axes in rank_groups(layout).items():
        for axis, members in axes.items():
            if layout.world <= WHOLE:
                lines.append(f"{grid} {axis}: {' '.join(str(group) for group in members)}")
                continue
            ends = [members[0], members[-1]] if len(members) > 1 else members
            told = ", ".join(_range(group) for group in ends)
            lines.append(f"{grid} {axis}: {len(members):,} groups of {len(members[0]):,}: {told}")
    return lines


def _range(numbers: list[int]) -> str:
    """`0-7`, or `0-56 by 8`, or a list where steps differ."""
    first, last = numbers[0], numbers[-1]
    steps = {b - a for a, b in zip(numbers, numbers[1:], strict=False)}
    if first == last and steps <= {0}:
        return str(first)
    if len(steps) > 1:
        return " ".join(map(str, numbers))
    step = steps.pop()
    return f"{first}-{last}" if step == 1 else f"{first}-{last} by {step}"


def _outermost_first(grid: Grid, places: dict[str, int]) -> dict[str, int]:
    return {axis: places[axis] for axis in reversed(grid.axes)}
