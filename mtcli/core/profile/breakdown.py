"""Where a step's time went: each second of each pipeline rank under one name.

A gap before an op whose input comes from another rank is bubble until that rank has made it, and
communication after. What follows the last op is bubble until the slowest pipeline rank is done.
"""

from collections.abc import Mapping, Sequence
from statistics import mean, median

from mtcli.core.profile.records import RankRecord, StepRecord
from mtcli.core.schedule.ops import Op, Schedule, needs
from mtcli.core.schedule.timeline import Span, Timeline

KINDS = ("forward", "backward", "communication", "bubble", "optimizer", "data", "other")

Spent = dict[str, float]  # by KINDS


def speakers(records: Sequence[RankRecord]) -> list[RankRecord]:
    """One record per pipeline rank, in pipeline order."""
    return sorted((r for r in records if r.speaks), key=lambda r: r.pp_rank)


def spent_by_rank(records: Sequence[RankRecord], schedule: Schedule) -> list[Spent]:
    """Seconds of a step by kind, per pipeline rank: means over the timed steps."""
    pipeline = speakers(records)
    steps = range(len(pipeline[0].steps))
    found = []
    for record in pipeline:
        each = [
            attribute(record, [other.steps[i] for other in pipeline], i, schedule) for i in steps
        ]
        found.append({kind: mean(spent[kind] for spent in each) for kind in KINDS})
    return found


def attribute(
    record: RankRecord, pipeline: Sequence[StepRecord], index: int, schedule: Schedule
) -> Spent:
    """Seconds of one step of one rank by kind; `pipeline` is that step on every pipeline rank."""
    step, spent = record.steps[index], dict.fromkeys(KINDS, 0.0)
    ends = {span.op: span.end for other in pipeline for span in other.spans}
    phases, clock = step.phases, step.phases.data
    spent["data"] = phases.data - phases.begin
    for op, start, end in step.spans:
        made = _made_elsewhere(op, record.pp_rank, schedule, ends)
        if made is not None:
            arrived = min(max(clock, made), start)
            spent["bubble"] += arrived - clock
            spent["communication"] += start - arrived
        exchanging = record.exchanging(step, op.kind) * (end - start)
        spent["forward" if op.kind == "F" else "backward"] += end - start - exchanging
        spent["communication"] += exchanging
        clock = end
    done = max(ends.values())
    waits = (
        (clock, phases.pipeline),
        (phases.pipeline, phases.reduce),
        (phases.norm, phases.agree),
    )
    for start, end in waits:
        arrived = min(max(start, done), end)
        spent["bubble"] += arrived - start
        spent["communication"] += end - arrived
    spent["optimizer"] = phases.norm - phases.reduce + phases.end - phases.agree
    spent["other"] = step.seconds - sum(spent.values())
    return spent


def hop_seconds(records: Sequence[RankRecord], schedule: Schedule) -> list[float]:
    """Seconds of a step in which each pipeline rank waits for inputs that are made already.

    Means over the timed steps.
    """
    pipeline = speakers(records)
    steps = range(len(pipeline[0].steps))
    return [
        mean(_hops(record, [other.steps[i] for other in pipeline], i, schedule) for i in steps)
        for record in pipeline
    ]


def _hops(
    record: RankRecord, pipeline: Sequence[StepRecord], index: int, schedule: Schedule
) -> float:
    ends = {span.op: span.end for other in pipeline for span in other.spans}
    total, clock = 0.0, record.steps[index].phases.data
    for op, start, end in record.steps[index].spans:
        made = _made_elsewhere(op, record.pp_rank, schedule, ends)
        if made is not None:
            total += start - min(max(clock, made), start)
        clock = end
    return total


def shares(spent: Spent) -> dict[str, float]:
    """Each kind's share of the step; they sum to 1."""
    total = sum(spent.values())
    return {kind: seconds / total for kind, seconds in spent.items()}


def middle_step(records: Sequence[RankRecord]) -> int:
    """The timed step of median length."""
    steps = speakers(records)[0].steps
    order = sorted(range(len(steps)), key=lambda i: steps[i].seconds)
    return order[len(order) // 2]


def measured_timeline(records: Sequence[RankRecord], index: int) -> Timeline:
    """The ops of a timed step on every pipeline rank, in seconds since the first of them began."""
    return timeline_of([record.steps[index] for record in speakers(records)])


def timeline_of(steps: Sequence[StepRecord]) -> Timeline:
    """The timeline of one step; `steps` is that step on every pipeline rank."""
    first = min(span.start for step in steps for span in step.spans)
    spans = tuple(
        Span(rank, op, start - first, end - first)
        for rank, step in enumerate(steps)
        for op, start, end in step.spans
    )
    return Timeline(spans, len(steps))


def measured_bubble(records: Sequence[RankRecord]) -> float:
    """Idle over busy time of the pipeline: the median of the timed steps."""
    steps = range(len(speakers(records)[0].steps))
    return median(measured_timeline(records, i).bubble_fraction for i in steps)


def busy_seconds(record: RankRecord) -> float:
    """Seconds of a step in which a rank itself works: the median of its timed steps."""
    return median(
        sum((b - a) * (1.0 - record.exchanging(step, op.kind)) for op, a, b in step.spans)
        for step in record.steps
    )


def stragglers(records: Sequence[RankRecord]) -> list[dict[str, float]]:
    """Every rank's working seconds over the median of its pipeline rank's replicas, worst first."""
    busy = {record.rank: busy_seconds(record) for record in records}
    replicas: dict[int, list[float]] = {}
    for record in records:
        replicas.setdefault(record.pp_rank, []).append(busy[record.rank])
    found = [
        {
            "rank": record.rank,
            "busy_seconds": busy[record.rank],
            "times_median": busy[record.rank] / median(replicas[record.pp_rank]),
        }
        for record in records
    ]
    return sorted(found, key=lambda row: -row["times_median"])


def _made_elsewhere(
    op: Op, rank: int, schedule: Schedule, ends: Mapping[Op, float]
) -> float | None:
    """When the other rank that an op waits for had made its input; None where there is none."""
    remote = [
        ends[need]
        for need in needs(op, schedule.num_stages)
        if schedule.rank_of_stage[need.stage] != rank
    ]
    return max(remote, default=None)
