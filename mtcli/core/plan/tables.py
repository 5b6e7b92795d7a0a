"""Renders an answer as JSON, the contract of `mtcli plan --json`, and as rows of tables.

Worlds of more than ALL_RANKS ranks are shown as ranges: the ranks of the first pipeline stage,
which all stages repeat, and the first and last group of each axis.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from mtcli.core.mesh.layout import Grid, ParallelLayout
from mtcli.core.mesh.parameters import count_active, count_parameters
from mtcli.core.plan.answer import PlanAnswer
from mtcli.core.plan.budget import budget_of, budget_rows
from mtcli.core.plan.certainty import SHARE, kind_of, step_range
from mtcli.core.plan.elements import rank_elements
from mtcli.core.plan.exchange import exchange_of, sync_bytes_per_step
from mtcli.core.plan.grid import grid_bytes_per_step
from mtcli.core.plan.hardware import Device, gib
from mtcli.core.plan.memory import in_flight_chunks
from mtcli.core.plan.predict import FLOP_CONVENTION, Prediction, predict_workload
from mtcli.core.plan.sensitivity import Neighbour
from mtcli.core.plan.workload import Workload

Json = dict[str, Any]
Rows = list[list[str]]
RankGroups = dict[str, list[list[int]]]

UNEVEN = 1.25  # of the mean, which the busiest rank's experts get in the row about uneven loads
SHOWN_STAGES = 16  # of a longer pipeline its ends, and the rank that holds most
ALL_RANKS = 64  # ranks that are listed one by one
ROWS = 16  # of ranges, of which the middle is left out

CANDIDATES = ("", "layout", "step", "MFU", "memory", "bubble", "communication", "slower\nthan best")
NEIGHBOURS = ("changed", "slower than best", "step", "memory", "layout")

KEYS = "layout parameters memory_bytes fits step_seconds tokens_per_second_per_gpu "
KEYS += "model_tflops_per_gpu hardware_tflops_per_gpu mfu hfu bubble_fraction communication_seconds"
# what a plan that is refused tells
NOTHING: Json = dict.fromkeys((*KEYS.split(), "fits_from")) | {"candidates": []}


def as_json(answer: PlanAnswer) -> Json:
    """The JSON of `mtcli plan --json`; candidates are sorted, the best first."""
    return {
        "ok": True,
        "problems": [],
        **figures(answer.prediction),
        "candidates": [figures(candidate) for candidate in answer.candidates],
        "evaluation": evaluation(answer),
        "budget": budget_of(answer.prediction, answer.budget) if answer.budget else None,
        "neighbours": [
            {
                "field": near.field,
                "value": near.value,
                "step_seconds": near.prediction.step_seconds,
                "fits": near.prediction.fits,
                "reason": near.reason,
            }
            for near in answer.neighbours
        ],
        "fits_from": figures(answer.enough) if answer.enough else None,
        "data": list(answer.data),
        **({"phases": [one.as_json() for one in answer.phases]} if answer.phases else {}),
    }


def evaluation(answer: PlanAnswer) -> Json | None:
    """The cost of evaluations during training, if any: {every, batches, seconds of each,
    seconds_per_step, memory_bytes of the fullest rank}."""
    train, p = answer.config.train, answer.prediction
    if not train.eval_every:
        return None
    seconds = train.eval_batches * p.evaluation_seconds
    return {
        "every": train.eval_every,
        "batches": train.eval_batches,
        "seconds": seconds,
        "seconds_per_step": seconds / train.eval_every,
        "memory_bytes": round(p.memory.total),
    }


def figures(p: Prediction) -> Json:
    model, peak = p.work.model, p.device.peak(p.work.sizes.gemm)
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
        "fullest_rank": p.fullest_rank,
        "rehearsed": p.is_rehearsed,
        "memory_by_stage": _memory_by_stage(p),
        "fits": p.fits,
        "uneven_experts": {
            "imbalance": UNEVEN,
            "memory_bytes": other.memory.total,
            "fits": other.fits,
            "step_seconds": other.step_seconds,
        }
        if (other := uneven(p))
        else None,
        "step_seconds": p.step_seconds,
        "step_seconds_range": spread[:2] if (spread := step_range(p)) else None,
        "tokens_per_second_per_gpu": p.tokens_per_second_per_gpu,
        "model_tflops_per_gpu": p.model_flops_per_gpu / 1e12,
        "hardware_tflops_per_gpu": p.hardware_flops_per_gpu / 1e12,
        "mfu": p.mfu,
        "hfu": p.hfu,
        "waits_for_host": p.waits_for_host,
        "block_seconds": {"host": p.costs.host.total, "device": p.costs.busy.total},
        "bubble_fraction": p.bubble_fraction,
        "communication_seconds": p.communication_seconds,
        "grid_bytes_per_step": grid_bytes_per_step(p.work)._asdict()
        if p.work.tp_mode == "2d"
        else None,
        "sync_bytes_per_step": round(sync_bytes_per_step(p.work)),
        "sync": {
            "method": p.work.sync.method,
            "replicas": p.work.layout.replicas,
            **exchange_of(p.work, 0).graph(),
        },
        "device": p.device.name,
        "device_rates": p.device.rates,
        "flop_convention": FLOP_CONVENTION,
        "flop_conventions": {
            name: {"tflops_per_gpu": rate / 1e12, "share_of_peak": rate / peak}
            for name, rate in p.flops_by_convention.items()
        },
    }


def layout_of(work: Workload) -> Json:
    """The sizes of every axis, the micro-batch, and the options of sharding."""
    layout = work.layout
    axes = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
    return {
        "world": layout.world,
        **{axis: layout.size(axis) for axis in axes},
        "tp": layout.tp,
        "vpp": layout.vpp,
        "tp_mode": work.tp_mode,
        "tp_rows": layout.tp_rows,
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


def uneven(p: Prediction) -> Prediction | None:
    """The step if the busiest rank's experts get UNEVEN times the mean number of token copies; its
    extra memory is an estimate."""
    if not p.work.model.num_experts:
        return None
    other, even = (
        predict_workload(replace(p.work, imbalance=load), p.device)
        for load in (UNEVEN, p.work.imbalance)
    )
    stages = tuple(
        replace(stage, activations=stage.activations + more.total - less.total)
        for stage, more, less in zip(p.stages, other.stages, even.stages, strict=True)
    )
    return replace(other, stages=stages)


def _memory_by_stage(p: Prediction) -> list[Json]:
    """Bytes of the fullest rank of each pipeline rank; `in_flight` counts micro-batches."""
    return [
        {"pp_rank": pp_rank, "in_flight": chunks / p.work.layout.vpp, **memory.as_dict()}
        for pp_rank, (memory, chunks) in enumerate(
            zip(p.stages, in_flight_chunks(p.work), strict=True)
        )
    ]


def summary_rows(answer: PlanAnswer) -> Rows:
    """Rows of the summary table: name and value."""
    rows = [list(row) for row in summary(answer.prediction)]
    if cost := evaluation(answer):
        share = cost["seconds_per_step"] / answer.prediction.step_seconds
        interval = f"{cost['seconds']:.4g} s every {cost['every']:,} steps"
        text = f"{interval}, {share:.1%} more time; no more memory than a step's peak"
        rows.append(["evaluation", text])
    rows += [["data", text] for text in answer.data]
    if answer.length:
        rows.append(["the run", f"{answer.length}; train.steps sets it"])
    return rows + (budget_rows(answer.prediction, answer.budget) if answer.budget else [])


def summary(p: Prediction) -> list[tuple[str, str]]:
    """Rows on one prediction; rows without text are left out."""
    work, m, device = p.work, p.work.model, p.device
    tokens = work.tokens_per_step
    unit = _unit(device)
    margin = (
        f"of which {gib(device.memory_bytes - device.usable_bytes)} are spared for fragmentation"
    )
    memory = [f"{name} {gib(n)}" for name, n in p.memory.as_dict().items() if name != "total"]
    sent = [f"{axis} {s:.3g} s" for axis, s in p.communication_seconds.items() if s > 0]
    rates = {n: r for n, r in p.flops_by_convention.items() if n != FLOP_CONVENTION}
    copy = f"{gib(p.memory.host)} per rank, for what is saved while training goes on"
    rows = [
        ("parameters", f"{count_parameters(m):,} ({count_active(m):,} active)"),
        ("layout", work.layout_words),
        ("step", f"{tokens:,} tokens, {work.num_micro_batches} micro-batches per data rank"),
        ("bytes per rank", f"{gib(p.memory.total)} of {gib(device.memory_bytes)}, {margin}"),
        ("", ", ".join(memory)),
        ("host memory", copy if p.memory.host else ""),
        ("fullest rank", _fullest(p)),
        (f"experts at {UNEVEN}x", _uneven_cost(p)),
        ("precision", _slow_precision(p)),
        ("rates", _roofline(p)),
        ("step time", _rate(p)),
        ("how sure", _how_sure(p)),
        ("host", _host(p)),
        ("model TFLOP/s", f"{p.model_flops_per_gpu / 1e12:.4g} per {unit} ({FLOP_CONVENTION})"),
        ("MFU, HFU", f"{p.mfu:.1%}, {p.hfu:.1%} (HFU adds what is computed again)"),
        ("counted otherwise", ", ".join(f"{r / 1e12:.4g} ({n})" for n, r in rates.items())),
        ("pipeline bubble", f"{p.bubble_fraction:.1%} of the ideal time"),
        ("communication", ", ".join(sent) or "none"),
        ("grid of tp", _grid(p)),
        ("data parallelism", _sync(p)),
    ]
    return [row for row in rows if row[1]]


def _unit(device: Device) -> str:
    """Names what rates are divided by: GPUs, or ranks where these share a CPU."""
    return "rank" if device.name == "cpu" else "GPU"


def _rate(p: Prediction) -> str:
    """Text on the seconds of a step, and the tokens of a rank in a second."""
    per = f"{p.tokens_per_second_per_gpu:,.0f} tokens/s/{_unit(p.device)}"
    return f"{p.step_seconds:.4g} s, {per}"


def _how_sure(p: Prediction) -> str:
    """The range of seconds of most published runs of this kind."""
    if p.device.name == "cpu":
        return ""
    if (spread := step_range(p)) is None:
        return f"not known: there are no published runs of {kind_of(p.work, p.device)}"
    runs = f"{SHARE:.0%} of {spread.runs} published runs of {kind_of(p.work, p.device)}"
    return f"{spread.low:.4g} to {spread.high:.4g} s, by the errors of {runs}"


def _host(p: Prediction) -> str:
    """Text on a step whose GPU waits for its host, and on what helps."""
    if not p.waits_for_host:
        return ""
    work, (host, busy) = p.work, (p.costs.host.total * 1e3, p.costs.busy.total * 1e3)
    ways = ["larger micro-batches"] + ["less tp"] * (work.layout.tp > 1)
    ways += [] if work.compile else ["train.compile=true"]
    ways += [] if work.cuda_graphs else ["train.cuda_graphs=true"]
    return f"a block takes it {host:.2g} ms, and the GPU {busy:.2g} ms; help: {', '.join(ways)}"


def _grid(p: Prediction) -> str:
    """Bytes that a rank's blocks send on a grid."""
    if p.work.tp_mode == "1d":
        return ""
    along, down = grid_bytes_per_step(p.work)
    return f"{gib(along)} along rows and {gib(down)} down columns, sent per step by a rank"


def _sync(p: Prediction) -> str:
    """The strategy, and the bytes that ranks send for it in a step."""
    sent, replicas = sync_bytes_per_step(p.work), p.work.layout.replicas
    if not sent:
        return ""
    several = f", {replicas} replicas" if replicas > 1 else ""
    groups = p.work.sync.groups(replicas)
    several += groups and f" in {groups}"
    graph = exchange_of(p.work, 0).graph()
    several += "".join(f", {name.replace('_', ' ')} {fact:.3g}" for name, fact in graph.items())
    return f"{p.work.sync.method}{several}, {gib(sent)} sent per step by all ranks"


def _fullest(p: Prediction) -> str:
    """The rank with most bytes, and its coordinates on both grids."""
    rank = p.fullest_rank
    coordinates = p.work.layout.coordinates(rank)
    sizes = [f"{axis}={i}" for axis, i in coordinates.items() if p.work.layout.size(axis) > 1]
    return f"{rank} ({', '.join(sizes)})" if sizes else str(rank)


def _uneven_cost(p: Prediction) -> str:
    if (other := uneven(p)) is None:
        return ""
    more = f"{gib(other.memory.total - p.memory.total)} more (estimated)"
    return f"{more} and {other.step_seconds:.4g} s, if the busiest rank gets that much of the mean"


def _slow_precision(p: Prediction) -> str:
    """Text on a device that lacks arithmetic in narrow dtypes and computes GEMMs in fp32."""
    asked, used = p.work.sizes.gemm, p.device.computes_in(p.work.sizes.gemm)
    if asked == used or used != "fp32":
        return ""
    return f"{asked}, taken at the rate of fp32: {p.device.name} has {', '.join(p.device.flops)}"


def _roofline(p: Prediction) -> str:
    """Text on the three quick rates of a device without a calibration."""
    if p.device.rates != "roofline":
        return ""
    flops, memory, link = p.device.peak("fp32"), p.device.memory_bandwidth, p.device.link.bandwidth
    rates = f"{flops / 1e12:.3g} TFLOP/s, {memory / 1e9:.3g} GB/s of memory and {link / 1e9:.3g}"
    return f"a roofline, not calibrated: {rates} GB/s between ranks"


def stage_table(prediction: Prediction) -> tuple[list[str], Rows]:
    """(headings, a row per pipeline rank): micro-batches in flight and bytes by kind.

    A star marks the fullest rank. The table fits 80 columns.
    """
    stages = _memory_by_stage(prediction)
    fullest = max(stages, key=lambda stage: stage["total"])
    kinds = [name for name in stages[0] if name not in ("pp_rank", "in_flight")]
    rows = []
    for stage in stages:
        pp_rank, end = stage["pp_rank"], min(stage["pp_rank"], len(stages) - 1 - stage["pp_rank"])
        if len(stages) > SHOWN_STAGES and end >= SHOWN_STAGES // 4 and stage is not fullest:
            continue
        most = "*" if stage is fullest else ""
        sizes = [gib(stage[kind]) for kind in kinds]
        rows.append([f"{pp_rank}{most}", f"{stage['in_flight']:.4g}", *sizes])
    return ["pp\nrank", "in\nflight", *kinds], rows


def candidate_rows(candidates: Sequence[Prediction]) -> Rows:
    """A row per candidate: its cost, where its time goes, and its distance from the best."""
    first, rows = candidates[0].step_seconds, []
    for number, p in enumerate(candidates, start=1):
        sent = sum(p.communication_seconds.values()) / p.step_seconds
        slower = f"{p.step_seconds / first - 1:.1%}" if number > 1 else ""
        figures = [f"{p.step_seconds:.4g} s", f"{p.mfu:.1%}", gib(p.memory.total)]
        shares = [f"{p.bubble_fraction:.1%}", f"{sent:.1%}", slower]
        rows.append([str(number), p.work.layout_words, *figures, *shares])
    return rows


def neighbour_rows(neighbours: Sequence[Neighbour]) -> Rows:
    """Rows of NEIGHBOURS, one for each changed field of the best layout: reason and cost."""
    rows = []
    for field, value, p, reason in neighbours:
        figures = [f"{p.step_seconds:.4g} s", gib(p.memory.total), p.work.layout_words]
        rows.append([f"{field}={value}", reason, *figures])
    return rows


def enough_table(p: Prediction) -> tuple[str, tuple[str, str], Rows]:
    """(title, headings, rows) of the fewest devices on which a layout fits."""
    used = f"{gib(p.memory.total)} of {gib(p.device.memory_bytes)}"
    rows = [["layout", p.work.layout_words], ["bytes per rank", used], ["step time", _rate(p)]]
    return f"It fits from {p.work.layout.world:,} x {p.device.name} on", ("", ""), rows


def rank_coordinates(layout: ParallelLayout) -> list[dict[str, dict[str, int]]]:
    """The coordinates of each rank on the attention and the expert grid, outermost axis first."""
    grids = {"attention": layout.attention, "experts": layout.experts}

    def coordinates(grid: Grid, rank: int) -> dict[str, int]:
        sizes = grid.coordinates(rank)
        return {axis: sizes[axis] for axis in reversed(grid.axes)}

    return [
        {name: coordinates(grid, rank) for name, grid in grids.items()}
        for rank in range(layout.world)
    ]


def rank_map(work: Workload) -> list[dict[str, Any]]:
    """Coordinates of each rank on both grids, and the layers of its stages."""
    layers = list(accumulate(work.layers_of_stage, initial=0))
    return [
        {
            "rank": rank,
            **coordinates,
            "layers": [
                layer
                for stage in work.layout.stages(coordinates["attention"]["pp"])
                for layer in range(layers[stage], layers[stage + 1])
            ],
        }
        for rank, coordinates in enumerate(rank_coordinates(work.layout))
    ]


def rank_groups(layout: ParallelLayout) -> dict[str, RankGroups]:
    """Groups of ranks that communicate along one axis, per grid and axis."""
    grids = {"attention": layout.attention, "experts": layout.experts}
    return {
        name: {axis: grid.groups(axis) for axis in reversed(grid.axes)}
        for name, grid in grids.items()
    }


def rank_table(layout: ParallelLayout) -> tuple[str, list[str], list[list[str]]]:
    """(title, headings, rows): a row per rank, or per range of ranks of the first stage."""
    all_coordinates, groups = rank_coordinates(layout), rank_groups(layout)
    axes = [(grid, axis) for grid in groups for axis in groups[grid]]
    columns = ["ranks", *(axis for _, axis in axes)]
    title = "Ranks on the attention grid, and on the expert grid"
    size = 1
    if layout.world > ALL_RANKS:
        size, stage = layout.tp, layout.world // layout.pp
        all_coordinates = all_coordinates[:stage]
        title += f": stage 0 of {layout.pp}; stage p holds ranks p*{stage} to p*{stage}+{stage - 1}"
    rows = []
    for first in range(0, len(all_coordinates), size):
        those = all_coordinates[first : first + size]
        cells = [_range([coordinates[grid][axis] for coordinates in those]) for grid, axis in axes]
        rows.append([_range(list(range(first, first + size))), *cells])
    if layout.world > ALL_RANKS and len(rows) > ROWS:
        rows = [*rows[: ROWS - 2], ["..."] * len(columns), rows[-1]]
    return title, columns, rows


def group_lines(layout: ParallelLayout) -> list[str]:
    """One line per axis of either grid: all groups, or their number and the first and last."""
    lines = []
    for grid, axes in rank_groups(layout).items():
        for axis, members in axes.items():
            if layout.world <= ALL_RANKS:
                lines.append(f"{grid} {axis}: {' '.join(str(group) for group in members)}")
                continue
            ends = [members[0], members[-1]] if len(members) > 1 else members
            ranges = ", ".join(_range(group) for group in ends)
            lines.append(f"{grid} {axis}: {len(members):,} groups of {len(members[0]):,}: {ranges}")
    return lines


def _range(numbers: list[int]) -> str:
    """Numbers as text: `0-7`, `0-56 by 8`, or a list where the steps differ."""
    first, last = numbers[0], numbers[-1]
    steps = {b - a for a, b in zip(numbers, numbers[1:], strict=False)}
    if first == last and steps <= {0}:
        return str(first)
    if len(steps) > 1:
        return " ".join(map(str, numbers))
    step = steps.pop()
    return f"{first}-{last}" if step == 1 else f"{first}-{last} by {step}"
