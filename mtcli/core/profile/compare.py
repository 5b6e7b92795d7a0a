"""What was measured beside what plan says: figure by figure, op by op, axis by axis.

Figures are those of `mtcli plan` for this config at the peak that MFU divides by; None where plan
does not know the device.
"""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from mtcli.core.plan.memory import memory_by_stage
from mtcli.core.plan.predict import Prediction
from mtcli.core.plan.step_time import simulated
from mtcli.core.profile.breakdown import hop_seconds
from mtcli.core.profile.records import RankRecord
from mtcli.core.schedule.ops import Schedule
from mtcli.core.schedule.timeline import Timeline

Json = dict[str, Any]

# Plan's axes of communication, and the groups of ranks that carry each.
CARRIERS = {
    "tp": ("tp", "sequence"),
    "cp": ("cp",),
    "ep": ("ep", "etp", "experts"),
    "pp": ("pp_forward", "pp_backward"),
    "dp": ("data", "edp", "tokens", "ends"),
    "world": ("world",),
}
UNITS = {"step_seconds": "s", "tokens_per_second": "tokens/s"}


def figures(data: Mapping[str, Any], plan: Prediction | None) -> Json:
    """{figure: {measured, planned, unit}} of the figures that both have."""
    said = planned(plan, data["world"], fullest_stage(data)) if plan else {}
    found = {"step_seconds": data["step_seconds"]["median"]}
    found |= {name: data[name] for name in ("tokens_per_second", "mfu", "hfu")}
    found["bubble_fraction"] = data["bubble_fraction"]["measured"]
    found |= {f"share.{name}": share for name, share in data["shares"].items()}
    found |= {f"memory.{kind}": held for kind, held in data["memory_bytes"].items()}
    by_axis = data["communication"]["by_axis"]
    found |= {f"communication.{axis}": row["measured"] for axis, row in by_axis.items()}
    return {
        name: {"measured": value, "planned": said.get(name), "unit": unit_of(name)}
        for name, value in found.items()
    }


def unit_of(figure: str) -> str:
    """The unit of a figure by its name."""
    part = figure.partition(".")[0]
    return {"memory": "bytes", "communication": "s", **UNITS}.get(part, "share")


def fullest_stage(data: Mapping[str, Any]) -> int:
    """The pipeline rank whose memory the figures tell, measured and planned."""
    return int(data["rank_map"][data["fullest_rank"]]["attention"]["pp"])


def planned_memory(figures: Mapping[str, Any]) -> dict[str, int]:
    """Plan's bytes by the kinds of `memory_bytes`, which are measured; empty where it has none."""
    rows = {name: row["planned"] for name, row in figures.items() if name.startswith("memory.")}
    return {name.partition(".")[2]: held for name, held in rows.items() if held is not None}


def planned(plan: Prediction, world: int, pp_rank: int) -> Json:
    """Plan's figures, by the names of the measured ones; memory is that of a pipeline rank.

    As measured, `activations` is all that a step allocates: what plan says that forwards keep, and
    what it counts under `other` for a moment.
    """
    memory = memory_by_stage(plan.work, plan.device)[pp_rank]
    held = {kind: getattr(memory, kind) for kind in ("weights", "gradients", "optimizer")}
    peak = sum(held.values()) + memory.besides_state
    held |= {"activations": memory.besides_state, "peak": peak, "process": memory.total}
    return {
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second_per_gpu * world,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "bubble_fraction": plan.bubble_fraction,
        **{f"share.{name}": share for name, share in planned_shares(plan).items()},
        **{f"memory.{kind}": round(size) for kind, size in held.items()},
        **{f"communication.{axis}": s for axis, s in plan.communication_seconds.items()},
    }


def planned_shares(plan: Prediction) -> dict[str, float]:
    """Shares of the planned step by the kinds of breakdown.py: means over pipeline ranks."""
    costs, work = plan.costs, plan.work
    timeline = simulated(work, costs, work.num_micro_batches)
    ranks, blocks = work.layout.pp, work.num_micro_batches * work.model.num_layers
    seconds = {
        "forward": sum(s.end - s.start for s in timeline.spans if s.op.kind == "F") / ranks,
        "backward": sum(s.end - s.start for s in timeline.spans if s.op.kind != "F") / ranks,
    }
    busy = sum(seconds.values())
    shown = costs.block.forward - costs.compute.forward
    shown_back = costs.block.backward - costs.recomputed - costs.compute.backward
    seconds["forward"] -= blocks / ranks * shown
    seconds["backward"] -= blocks / ranks * shown_back
    seconds["communication"] = blocks / ranks * (shown + shown_back) + costs.gradients_exposed
    seconds["bubble"] = busy * plan.bubble_fraction
    seconds["optimizer"] = costs.optimizer
    seconds["data"] = 0.0
    seconds["other"] = plan.step_seconds - sum(seconds.values())
    return {kind: spent / plan.step_seconds for kind, spent in seconds.items()}


def joined(measured: Timeline, planned: Timeline | None) -> list[Json]:
    """Every op once: when it ran and when it was planned to (None without a plan), in seconds since
    the first op."""
    when = {(span.rank, span.op): span for span in planned.spans} if planned else {}
    rows = []
    for span in measured.spans:
        plan = when.get((span.rank, span.op))
        rows.append(
            {
                "rank": span.rank,
                "op": str(span.op),
                "planned_start": plan and plan.start,
                "planned_end": plan and plan.end,
                "start": span.start,
                "end": span.end,
            }
        )
    return rows


def seconds_by_axis(records: Sequence[RankRecord], schedule: Schedule) -> Json:
    """{axis: {measured}}: seconds of a step that a rank communicates on each axis.

    The mean over ranks (and timed steps) of the seconds the host waits on CPU, of NCCL's kernels on
    GPU; on pp the seconds between an input's being made and its arrival.
    """
    found = {}
    for axis, groups in CARRIERS.items():
        spent = [mean(_seconds(record, group) for record in records) for group in groups]
        hops = mean(hop_seconds(records, schedule)) if axis == "pp" else None
        found[axis] = {"measured": sum(spent) if hops is None else hops}
    return found


def traffic(records: Sequence[RankRecord]) -> list[Json]:
    """Who gave whom how much in the profiled step: {axis, from, to, bytes, calls}."""
    rows = [
        {
            "axis": sent.axis,
            "from": record.rank,
            "to": sent.receiver,
            "bytes": sent.bytes,
            "calls": sent.calls,
        }
        for record in records
        for sent in record.profiled.sent
    ]
    return sorted(rows, key=lambda row: (row["axis"], row["from"], row["to"]))


def matrix(rows: Sequence[Mapping[str, Any]], world: int) -> list[list[int]]:
    """Bytes of all axes: row r holds what rank r gave each rank."""
    found = [[0] * world for _ in range(world)]
    for row in rows:
        found[row["from"]][row["to"]] += row["bytes"]
    return found


def _seconds(record: RankRecord, group: str) -> float:
    waiting = [step.waiting.by_axis.get(group, 0.0) for step in record.steps if step.waiting]
    return mean(waiting) if waiting else record.profiled.by_axis.get(group, 0.0)
