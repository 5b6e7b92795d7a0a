"""The figures of a profiled run as data: the JSON contract of `mtcli profile --json`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, median
from typing import Any

from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.parameters import count_active, count_parameters, forward_flops
from mtcli.core.plan.hardware import NAMES, device_named, for_run
from mtcli.core.plan.predict import FLOP_CONVENTION, Prediction, predict_workload, recomputed_share
from mtcli.core.plan.tables import layout_of
from mtcli.core.plan.workload import Workload
from mtcli.core.profile import breakdown, compare
from mtcli.core.profile.finished_run import rank_map
from mtcli.core.profile.records import RankRecord
from mtcli.core.schedule.generators import schedule_for
from mtcli.core.schedule.ops import Schedule
from mtcli.core.schedule.timeline import Timeline

Json = dict[str, Any]
TOP_KERNELS = 20


@dataclass(frozen=True)
class Profile:
    """A measured run and everything derived from it; `device` is a name that plan knows, or ""."""

    config: RunConfig
    world: int
    device: str
    records: Sequence[RankRecord]
    calibrates: bool = True  # this machine, where it is a CPU and what is planned is asked for

    @cached_property
    def work(self) -> Workload:
        """The step as plan sees it, without saves."""
        return replace(Workload.of(self.config, self.world), async_save=False)

    @cached_property
    def schedule(self) -> Schedule:
        """The ops that each pipeline rank ran."""
        w = self.work
        return schedule_for(w.schedule_name, w.layout.pp, w.layout.vpp, w.num_micro_batches)

    @cached_property
    def measured(self) -> Timeline:
        """The timed step of median length."""
        return breakdown.measured_timeline(self.records, breakdown.middle_step(self.records))

    @cached_property
    def planned(self) -> Timeline | None:
        """The pipeline of `prediction`."""
        return self.prediction.timeline() if self.prediction else None

    @cached_property
    def shares_by_rank(self) -> list[dict[str, float]]:
        """Share of the step by kind, per pipeline rank."""
        spent = breakdown.spent_by_rank(self.records, self.schedule)
        return [breakdown.shares(one) for one in spent]

    @cached_property
    def step_seconds(self) -> list[float]:
        """Length of each timed step: of the rank that took longest."""
        steps = range(len(self.records[0].steps))
        return [max(record.steps[i].seconds for record in self.records) for i in steps]

    @cached_property
    def prediction(self) -> Prediction | None:
        """What plan says of this run at the rate that MFU divides by, where it knows the device."""
        if self.device not in NAMES:
            return None
        named = device_named(self.device)
        device = for_run(named, self.config, self.world, self.calibrates)
        rate = self.peak_flops / device.peak(self.work.sizes.gemm)  # 1 but for a CPU
        flops = {precision: rate * flops for precision, flops in device.flops.items()}
        return predict_workload(self.work, replace(device, flops=flops))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a global batch."""
        return self.config.batch.global_batch_size * self.config.batch.seq_len

    @property
    def model_flops(self) -> float:
        """FLOPs of a step that the model needs: 3 times the forward pass, full attention."""
        forward = forward_flops(self.config.model, self.config.batch.seq_len)
        return 3.0 * forward * self.tokens_per_step

    @property
    def hardware_flops(self) -> float:
        """`model_flops` and what the backward pass computes again."""
        return self.model_flops * (1.0 + recomputed_share(self.work) / 3.0)

    @property
    def peak_flops(self) -> float:
        """FLOP/s of one rank's device: the mean over ranks."""
        return mean(record.peak_flops for record in self.records)

    def utilisation(self, flops: float) -> float:
        """FLOPs of a step over what all devices could do in a step of median length."""
        return flops / median(self.step_seconds) / (self.peak_flops * self.world)

    def as_json(self) -> Json:
        """The JSON contract; to plan, it may have a CPU calibrated."""
        p, data = self.prediction, self.measured_json()
        for axis, row in data["communication"]["by_axis"].items():
            row["planned"] = p.communication_seconds.get(axis) if p else None
        data["bubble_fraction"]["planned"] = p.bubble_fraction if p else None
        return {
            "figures": compare.figures(data, p),
            **data,
            "planned_timeline": rows_of(self.planned) if self.planned else None,
            "joined_timeline": compare.joined(self.measured, self.planned),
            "device_bytes": p.device.usable_bytes if p else None,
            "predicted": self._predicted(),
        }

    def measured_json(self) -> Json:
        """The part of the JSON contract that takes no plan."""
        seconds, fullest, rows = self.step_seconds, self.fullest, compare.traffic(self.records)
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
                {"rank": r.rank, "pp_rank": r.pp_rank, **memory_of(r)} for r in self._speakers
            ],
            "memory_over_time": [(held.seconds, held.total) for held in fullest.profiled.memory],
            "memory_by_kind_over_time": memory_over_time(fullest),
            "timeline": rows_of(self.measured),
            "shares": {
                kind: mean(one[kind] for one in self.shares_by_rank) for kind in breakdown.KINDS
            },
            "shares_by_rank": [
                {"pp_rank": place, **one} for place, one in enumerate(self.shares_by_rank)
            ],
            "bubble_fraction": {"measured": breakdown.measured_bubble(self.records)},
            "communication": self._communication(),
            "communication_matrix_bytes": compare.matrix(rows, self.world),
            "communication_by_axis": rows,
            "stragglers": breakdown.stragglers(self.records),
            "kernels": [k._asdict() for k in self.records[0].profiled.kernels[:TOP_KERNELS]],
            "layout": layout_of(self.work),
            "rank_map": rank_map(self.work),
            "world": self.world,
            "device": self.device,
        }

    @property
    def _speakers(self) -> list[RankRecord]:
        return breakdown.speakers(self.records)

    @property
    def fullest(self) -> RankRecord:
        """The rank whose state and activations take most."""
        return max(self.records, key=lambda record: sum(_told(record).values()))

    def _communication(self) -> Json:
        """Collectives of the profiled step on rank 0: seconds by name, and what is hidden."""
        profiled = self.records[0].profiled
        return {
            "seconds": profiled.communication,
            "overlapped_seconds": profiled.overlapped,
            "share_of_forward": profiled.exchanging.get("F", 0.0),
            "share_of_backward": profiled.exchanging.get("B", profiled.exchanging.get("I", 0.0)),
            "by_axis": compare.seconds_by_axis(self.records, self.schedule),
        }

    def _predicted(self) -> Json | None:
        p = self.prediction
        return p and {
            "step_seconds": p.step_seconds,
            "tokens_per_second": p.tokens_per_second_per_gpu * self.world,
            "mfu": p.mfu,
            "hfu": p.hfu,
            "bubble_fraction": p.bubble_fraction,
            "memory_bytes": p.memory.as_dict(),
            "device_rates": p.device.rates,
        }


def memory_of(record: RankRecord) -> dict[str, int]:
    """A rank's bytes by kind; `activations` is the most that the profiled step added, `peak` the
    most that its tensors took, and `process` all that it took, with its libraries."""
    told = _told(record)
    peak = record.allocated_bytes or sum(told.values())
    return {**told, "peak": peak, "process": record.process_bytes}


def _told(record: RankRecord) -> dict[str, int]:
    held = max((held.total for held in record.profiled.memory), default=0)
    return {**record.state_bytes, "activations": held}


def memory_over_time(record: RankRecord) -> Json:
    """A rank's bytes by kind over the profiled step: what the step adds, on top of its state."""
    curve = record.profiled.memory
    state = {kind: [held] * len(curve) for kind, held in record.state_bytes.items()}
    return {
        "rank": record.rank,
        "seconds": [held.seconds for held in curve],
        **state,
        "activations": [held.activations for held in curve],
        "temporary": [held.temporary for held in curve],
    }


def rows_of(timeline: Timeline) -> list[Json]:
    """The spans of a timeline, in seconds since its first op began."""
    return [
        {"rank": span.rank, "op": str(span.op), "start": span.start, "end": span.end}
        for span in timeline.spans
    ]
