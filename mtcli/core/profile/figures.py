"""Computes the figures of a profiled run, measured vs planned: the JSON of `mtcli profile --json`.

Planned figures are those of `mtcli plan` for this config, at the peak FLOP/s that MFU divides by.
They are None where plan does not know the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, median
from typing import Any

from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import count_active, count_parameters, training_flops
from mtcli.core.plan.hardware import NAMES, device_named, for_run
from mtcli.core.plan.predict import FLOP_CONVENTION, Prediction, predict_workload, recomputed_share
from mtcli.core.plan.step_time import simulated
from mtcli.core.plan.tables import layout_of, rank_map
from mtcli.core.plan.workload import Workload
from mtcli.core.profile import breakdown
from mtcli.core.profile.records import RankRecord
from mtcli.core.rehearse.request import rehearsed
from mtcli.core.schedule.ops import Schedule
from mtcli.core.schedule.timeline import Timeline

Json = dict[str, Any]
TOP_KERNELS = 20
UNITS = {"step_seconds": "s", "tokens_per_second": "tokens/s"}
UNITS |= {"memory": "bytes", "communication": "s"}

# Plan's axes of communication, and the groups of ranks that carry each.
CARRIERS = {
    "tp": ("tp", "tp_row", "tp_grid", "sequence", "micro_batch"),
    "cp": ("cp",),
    "ep": ("ep", "etp", "experts"),
    "pp": ("pp_forward", "pp_backward"),
    "dp": ("data", "samples", "edp", "expert_copies", "tokens", "ends", "replicas", "matrices"),
    "world": ("world", "replica"),
}


@dataclass(frozen=True)
class Profile:
    """A measured run and its figures; `device` is a name that plan knows, or ""."""

    config: RunConfig
    world: int
    device: str
    records: Sequence[RankRecord]
    calibrates: bool = True  # whether planning may measure the rates of this CPU

    @cached_property
    def work(self) -> Workload:
        """The step as a workload, without saves."""
        return replace(Workload.of(self.config, self.world), async_save=False)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that the pipeline ranks ran."""
        return self.work.schedule(self.work.num_micro_batches)

    @cached_property
    def measured(self) -> Timeline:
        """The timed step of median length."""
        return breakdown.measured_timeline(self.records, breakdown.middle_step(self.records))

    @cached_property
    def planned(self) -> Timeline | None:
        """The simulated timeline of `prediction`."""
        return self.prediction.timeline() if self.prediction else None

    @cached_property
    def shares_by_rank(self) -> list[dict[str, float]]:
        """Share of the step by kind, per pipeline rank."""
        spent = breakdown.spent_by_rank(self.records, self.schedule)
        return [breakdown.shares(seconds) for seconds in spent]

    @cached_property
    def step_seconds(self) -> list[float]:
        """Seconds of each timed step, on the rank that took longest."""
        steps = range(len(self.records[0].steps))
        return [max(record.steps[i].seconds for record in self.records) for i in steps]

    @cached_property
    def prediction(self) -> Prediction | None:
        """The plan of this run at the peak that MFU divides by; None of an unknown device."""
        if self.device not in NAMES:
            return None
        named = device_named(self.device)
        device = for_run(named, self.config, self.world, self.calibrates)
        rate = self.peak_flops / device.peak(self.work.sizes.gemm)  # 1 but for a CPU
        flops = {precision: rate * flops for precision, flops in device.flops.items()}
        estimate = predict_workload(self.work, replace(device, flops=flops))
        (prediction,) = rehearsed([(self.config, estimate)])
        return prediction

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a timed step, without padding."""
        return mean(step.tokens for step in self.records[0].steps)

    @property
    def model_flops(self) -> float:
        """FLOPs of a step that the model needs, with full attention."""
        c = self.config
        return (
            training_flops(c.model, c.batch.seq_len, c.lora, freeze=c.train.freeze)
            * self.tokens_per_step
        )

    @property
    def hardware_flops(self) -> float:
        """FLOPs of a step, recomputation included."""
        return self.model_flops * (1.0 + recomputed_share(self.work))

    @property
    def peak_flops(self) -> float:
        """FLOP/s of one rank's device: the mean over ranks."""
        return mean(record.peak_flops for record in self.records)

    def utilisation(self, flops: float) -> float:
        """FLOPs of a step over those of all devices at their peak, in a step of median length."""
        return flops / median(self.step_seconds) / (self.peak_flops * self.world)

    def as_json(self) -> Json:
        """The JSON contract; planning for it may calibrate a CPU."""
        p, data = self.prediction, self.measured_json()
        for axis, row in data["communication"]["by_axis"].items():
            row["planned"] = p.communication_seconds.get(axis) if p else None
        data["bubble_fraction"]["planned"] = p.bubble_fraction if p else None
        return {
            "figures": figures(data, p),
            **data,
            "planned_timeline": rows_of(self.planned) if self.planned else None,
            "joined_timeline": joined(self.measured, self.planned),
            "device_bytes": p.device.usable_bytes if p else None,
            "predicted": p
            and {
                **_headline(p),
                "memory_bytes": p.memory.as_dict(),
                "device_rates": p.device.rates,
            },
        }

    def measured_json(self) -> Json:
        """The part of the JSON contract that takes no plan."""
        seconds, fullest, rows = self.step_seconds, self.fullest, traffic(self.records)
        profiled = self.records[0].profiled
        inside = profiled.exchanging
        return {
            "step_seconds": {"min": min(seconds), "median": median(seconds), "max": max(seconds)},
            "steps": seconds,
            "tokens_per_second": self.tokens_per_step / median(seconds),
            "mfu": self.utilisation(self.model_flops),
            "hfu": self.utilisation(self.hardware_flops),
            "flop_convention": FLOP_CONVENTION,
            "model_flops_per_step": self.model_flops,
            "hardware_flops_per_step": self.hardware_flops,
            "peak_flops": self.peak_flops,
            "parameters": count_parameters(self.config.model),
            "active_parameters": count_active(self.config.model),
            "memory_bytes": memory_of(fullest),
            "fullest_rank": fullest.rank,
            "memory_by_rank": [
                {"rank": r.rank, "pp_rank": r.pp_rank, **memory_of(r)}
                for r in breakdown.speakers(self.records)
            ],
            "memory_over_time": [(point.seconds, point.total) for point in fullest.profiled.memory],
            "memory_by_kind_over_time": self.memory_over_time,
            "timeline": rows_of(self.measured),
            "shares": {
                kind: mean(row[kind] for row in self.shares_by_rank) for kind in breakdown.KINDS
            },
            "shares_by_rank": [
                {"pp_rank": pp_rank, **row} for pp_rank, row in enumerate(self.shares_by_rank)
            ],
            "bubble_fraction": {"measured": breakdown.measured_bubble(self.records)},
            "communication": {
                "seconds": profiled.communication,
                "overlapped_seconds": profiled.overlapped,
                "share_of_forward": inside.get("F", 0.0),
                "share_of_backward": inside.get("B", inside.get("I", 0.0)),
                "by_axis": seconds_by_axis(self.records, self.schedule),
            },
            "communication_matrix_bytes": matrix(rows, self.world),
            "communication_by_axis": rows,
            "stragglers": breakdown.stragglers(self.records),
            "profiled_seconds": profiled.step.seconds,
            "kernels": [kernel._asdict() for kernel in profiled.kernels[:TOP_KERNELS]],
            "layout": layout_of(self.work),
            "rank_map": rank_map(self.work),
            "world": self.world,
            "device": self.device,
        }

    @property
    def memory_over_time(self) -> Json:
        """Bytes of the fullest rank by kind: its state, and what a step adds, in seconds since the
        first op of the measured timeline."""
        record = self.fullest
        curve = record.profiled.memory
        moments = breakdown.on_timeline(self.records, record, [point.seconds for point in curve])
        return {
            "rank": record.rank,
            "seconds": moments,
            **{kind: [size] * len(curve) for kind, size in record.state_bytes.items()},
            "activations": [point.activations for point in curve],
            "temporary": [point.temporary for point in curve],
        }

    @property
    def fullest(self) -> RankRecord:
        """The rank with the most bytes of state and activations."""
        return max(self.records, key=lambda record: sum(_bytes_by_kind(record).values()))


def memory_of(record: RankRecord) -> dict[str, int]:
    """Bytes of a rank by kind: state, the profiled step's peak of `activations`, the `peak` of all
    tensors, and `process`, the whole process with its libraries."""
    sizes = _bytes_by_kind(record)
    peak = record.allocated_bytes or sum(sizes.values())
    return {**sizes, "peak": peak, "process": record.process_bytes}


def _bytes_by_kind(record: RankRecord) -> dict[str, int]:
    activations = max((point.total for point in record.profiled.memory), default=0)
    return {**record.state_bytes, "activations": activations}


def rows_of(timeline: Timeline) -> list[Json]:
    """The spans of a timeline, in seconds since its first op began."""
    return [
        {"rank": span.rank, "op": str(span.op), "start": span.start, "end": span.end}
        for span in timeline.spans
    ]


def figures(data: Mapping[str, Any], plan: Prediction | None) -> Json:
    """{figure: {measured, planned, unit}}; planned is None where the plan has no such figure."""
    said = planned(plan, fullest_stage(data)) if plan else {}
    measured = {"step_seconds": data["step_seconds"]["median"]}
    measured |= {name: data[name] for name in ("tokens_per_second", "mfu", "hfu")}
    measured["bubble_fraction"] = data["bubble_fraction"]["measured"]
    measured |= {f"share.{name}": share for name, share in data["shares"].items()}
    measured |= {f"memory.{kind}": size for kind, size in data["memory_bytes"].items()}
    by_axis = data["communication"]["by_axis"]
    measured |= {f"communication.{axis}": row["measured"] for axis, row in by_axis.items()}
    return {
        name: {
            "measured": value,
            "planned": said.get(name),
            "unit": UNITS.get(name.partition(".")[0], "share"),
        }
        for name, value in measured.items()
    }


def fullest_stage(data: Mapping[str, Any]) -> int:
    """The pipeline rank of the rank with most memory."""
    return int(data["rank_map"][data["fullest_rank"]]["attention"]["pp"])


def planned_memory(figures: Mapping[str, Any]) -> dict[str, int]:
    """Bytes planned, by the kinds of `memory_bytes` (measured); empty where plan has none."""
    rows = {name: row["planned"] for name, row in figures.items() if name.startswith("memory.")}
    return {name.partition(".")[2]: size for name, size in rows.items() if size is not None}


def planned(plan: Prediction, pp_rank: int) -> Json:
    """Figures of the plan, by the names of the measured ones; memory is that of a pipeline rank.

    As in the measurement, `activations` are all bytes that a step allocates besides the state.
    """
    memory = plan.stages[pp_rank]
    sizes = {kind: getattr(memory, kind) for kind in ("weights", "gradients", "optimizer")}
    peak = sum(sizes.values()) + memory.besides_state
    sizes |= {"activations": memory.besides_state, "peak": peak, "process": memory.total}
    return {
        **_headline(plan),
        **{f"share.{name}": share for name, share in planned_shares(plan).items()},
        **{f"memory.{kind}": round(size) for kind, size in sizes.items()},
        **{f"communication.{axis}": s for axis, s in plan.communication_seconds.items()},
    }


def _headline(plan: Prediction) -> Json:
    return {
        "step_seconds": plan.step_seconds,
        "tokens_per_second": plan.tokens_per_second_per_gpu * plan.work.layout.world,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "bubble_fraction": plan.bubble_fraction,
    }


def planned_shares(plan: Prediction) -> dict[str, float]:
    """Shares of the planned step by `breakdown.KINDS`: means over pipeline ranks."""
    costs, work = plan.costs, plan.work
    timeline = simulated(work, costs, work.num_micro_batches)
    ranks, blocks = work.layout.pp, work.num_micro_batches * work.model.num_layers
    seconds = {
        "forward": sum(s.end - s.start for s in timeline.spans if s.op.kind == "F") / ranks,
        "backward": sum(s.end - s.start for s in timeline.spans if s.op.kind != "F") / ranks,
    }
    busy = sum(seconds.values())
    # Not costs.block: time in which the device waits for its host is no communication.
    shown = costs.busy.forward - costs.compute.forward
    shown_back = costs.busy.backward - costs.recomputed - costs.compute.backward
    seconds["forward"] -= blocks / ranks * shown
    seconds["backward"] -= blocks / ranks * shown_back
    seconds["communication"] = blocks / ranks * (shown + shown_back) + costs.gradients_exposed
    seconds["bubble"] = busy * plan.bubble_fraction
    seconds["optimizer"] = costs.optimizer
    seconds["data"] = 0.0
    seconds["other"] = plan.step_seconds - sum(seconds.values())
    return {kind: spent / plan.step_seconds for kind, spent in seconds.items()}


def joined(measured: Timeline, planned: Timeline | None) -> list[Json]:
    """Joins every op's measured and planned times (None without a plan), in seconds since the first
    op."""
    when = {(s.rank, s.op): (s.start, s.end) for s in planned.spans} if planned else {}
    rows = []
    for rank, op, start, end in measured.spans:
        begins, ends = when.get((rank, op), (None, None))
        plan = {"planned_start": begins, "planned_end": ends}
        rows.append({"rank": rank, "op": str(op), **plan, "start": start, "end": end})
    return rows


def seconds_by_axis(records: Sequence[RankRecord], schedule: Schedule) -> Json:
    """Seconds of a step that a rank communicates, as {axis: {measured}}.

    Means over ranks and timed steps: of the host's waits on CPU, of NCCL's kernels on GPU. For pp:
    the seconds between the sender's op and the receiver's.
    """
    seconds = {}
    for axis, groups in CARRIERS.items():
        spent = [mean(_seconds(record, group) for record in records) for group in groups]
        if axis == "pp":
            spent = [mean(breakdown.p2p_seconds(records, schedule))]
        seconds[axis] = {"measured": sum(spent)}
    return seconds


def traffic(records: Sequence[RankRecord]) -> list[Json]:
    """Counts the profiled step's traffic by sender and receiver: {axis, from, to, bytes, calls}."""
    rows = sorted(
        (sent.axis, record.rank, sent.receiver, sent.bytes, sent.calls)
        for record in records
        for sent in record.profiled.sent
    )
    return [dict(zip(("axis", "from", "to", "bytes", "calls"), row, strict=True)) for row in rows]


def matrix(rows: Sequence[Mapping[str, Any]], world: int) -> list[list[int]]:
    """Bytes over all axes; row r, column c: from rank r to rank c."""
    sent = [[0] * world for _ in range(world)]
    for row in rows:
        sent[row["from"]][row["to"]] += row["bytes"]
    return sent


def _seconds(record: RankRecord, group: str) -> float:
    waiting = [step.waiting.by_axis.get(group, 0.0) for step in record.steps if step.waiting]
    return mean(waiting) if waiting else record.profiled.by_axis.get(group, 0.0)
