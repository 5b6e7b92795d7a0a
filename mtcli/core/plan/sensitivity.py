"""Compares the best layout with layouts that differ from it in one field."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mtcli.core.plan.hardware import gib
from mtcli.core.plan.memory import each_stage, memory, smallest
from mtcli.core.plan.predict import Prediction, predict_workload
from mtcli.core.plan.search import lower_bound
from mtcli.core.plan.step_time import stage_seconds, step_costs
from mtcli.core.plan.workload import Workload

FieldValue = int | str

# What a search varies.
FIELDS: dict[str, Callable[[Workload], FieldValue]] = {
    "tp": lambda work: work.layout.tp,
    "tp_mode": lambda work: work.tp_mode,
    "tp_rows": lambda work: work.layout.tp_rows,
    "cp": lambda work: work.layout.cp,
    "pp": lambda work: work.layout.pp,
    "vpp": lambda work: work.layout.vpp,
    "ep": lambda work: work.layout.ep,
    "etp": lambda work: work.layout.etp,
    "micro-batch": lambda work: work.micro_batch_size,
    "zero": lambda work: work.zero,
    "schedule": lambda work: work.schedule_name,
    "recompute": lambda work: work.recompute,
}
CONFIG_NAMES = {"micro-batch": "batch.micro_batch_size"}  # the others are of [parallel]
# What has to follow where a field changes: chunks of a pipeline, and the schedule that runs them.
FOLLOWS = {"pp": ("vpp", "schedule", "zero"), "vpp": ("schedule",), "schedule": ("vpp",)}
FOLLOWS |= {"tp": ("tp_rows", "zero"), "ep": ("etp",), "cp": ("zero",)}
FOLLOWS |= {"tp_mode": ("tp", "tp_rows", "micro-batch", "zero"), "tp_rows": ("micro-batch", "zero")}


class Neighbour(NamedTuple):
    """A layout that differs in one field, and in the fields that must change with it."""

    field: str
    value: FieldValue
    prediction: Prediction
    reason: str


def neighbours(predictions: Sequence[Prediction], works: Sequence[Workload]) -> list[Neighbour]:
    """The neighbours of the best layout, `predictions[0]`: for each field the next smaller and the
    next larger value that was tried.

    Each is the fastest layout with that value that fits, with the reason why it is slower than the
    best.
    """
    best, by_work = predictions[0], {prediction.work: prediction for prediction in predictions}
    same = [(name, read, read(best.work)) for name, read in FIELDS.items()]
    changes = [
        ({name for name, read, value in same if read(work) != value}, work) for work in works
    ]
    return [
        _quickest(field, value, near, by_work, best)
        for field in FIELDS
        for value, near in _nearest(field, best.work, changes)
    ]


def _nearest(
    field: str, best: Workload, changes: Sequence[tuple[set[str], Workload]]
) -> list[tuple[FieldValue, list[Workload]]]:
    """The values next to the best's, with the layouts that have them and are otherwise equal.
    `changes` has layouts, and the fields in which they differ from the best."""
    free = {field, *FOLLOWS.get(field, ())}
    best_value, read = FIELDS[field](best), FIELDS[field]
    near: dict[FieldValue, list[Workload]] = {}
    for changed, work in changes:
        if field in changed and changed <= free:
            near.setdefault(read(work), []).append(work)
    if isinstance(best_value, str):
        return sorted(near.items(), key=str)
    less = [value for value in near if isinstance(value, int) and value < best_value]
    more = [value for value in near if isinstance(value, int) and value > best_value]
    return [(value, near[value]) for value in (*sorted(less)[-1:], *sorted(more)[:1])]


def _quickest(
    field: str,
    value: FieldValue,
    works: Sequence[Workload],
    by_work: dict[Workload, Prediction],
    best: Prediction,
) -> Neighbour:
    """The fastest layout that fits, by scaled lower bounds: simulating the largest pipelines takes
    a second, and a bound's error is about the same for similar layouts."""
    device = best.device
    for work in sorted(works, key=lambda candidate: lower_bound(candidate, device)):
        if memory(work, device).total <= device.usable_bytes:
            p = by_work.get(work) or _estimate(work, best)
            if p.step_seconds < best.step_seconds:  # none is quicker than the best of a search
                p = predict_workload(work, device)
            return Neighbour(field, value, p, _reason(p, best))
    least = smallest(works, device)
    over = memory(least, device).total - device.usable_bytes
    return Neighbour(field, value, _estimate(least, best), f"does not fit, by {gib(over)}")


def _estimate(work: Workload, best: Prediction) -> Prediction:
    """Predicts a step as its lower bound, times the ratio of the best's step to its bound."""
    device, costs = best.device, step_costs(work, best.device)
    over = best.step_seconds / lower_bound(best.work, device)
    step = over * lower_bound(work, device)
    after = costs.gradients_exposed + costs.optimizer + costs.overhead
    stages, pp = stage_seconds(work, costs), work.layout.pp
    busy = work.num_micro_batches * sum(stage.total for stage in stages)
    bubble = max(0.0, (step - after) * pp / busy - 1)
    return Prediction(work, device, tuple(each_stage(work, device)), costs, step, bubble)


def _reason(prediction: Prediction, best: Prediction) -> str:
    """Text on how much slower a layout is, and the part of the step that grew most."""
    slower = prediction.step_seconds / best.step_seconds - 1
    parts, best_parts = _parts(prediction), _parts(best)
    grew = max(parts, key=lambda part: parts[part] - best_parts[part])
    more = parts[grew] - best_parts[grew]
    cause = f": {grew} +{more:.3g} s" if more > 0 else ""
    return f"{slower:+.1%}{cause}"


def _parts(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step by cause: bubble, communication by axis, recomputation, computing."""
    idle = prediction.step_seconds * prediction.bubble_fraction / (1 + prediction.bubble_fraction)
    sent = prediction.communication_seconds
    parts = {f"{axis} communication": seconds for axis, seconds in sent.items()}
    again = prediction.costs.recomputed * prediction.work.num_micro_batches
    parts["recomputation"] = again * prediction.work.most_layers
    waits = prediction.costs.block.total - prediction.costs.busy.total
    parts["waiting for the host"] = (
        waits * prediction.work.num_micro_batches * prediction.work.most_layers
    )
    computing = prediction.step_seconds - idle - sum(parts.values())
    return {"bubble": idle, "computing": computing, **parts}
