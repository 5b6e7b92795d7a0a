"""Computes the time breakdown of a step: each second of each pipeline rank under one name.

A gap before an op that reads another rank's output is bubble until that rank has made the output,
and communication after. Time after a rank's last op is bubble until the slowest pipeline rank is
done.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import mean, median

import numpy as np

from mtcli.core.parallel.pipeline import OpSpan
from mtcli.core.profile.records import RankRecord, StepRecord
from mtcli.core.schedule.ops import Schedule, needs
from mtcli.core.schedule.timeline import Span, Timeline

KINDS = ("forward", "backward", "communication", "bubble", "optimizer", "data", "other")

Spent = dict[str, float]  # by KINDS


def speakers(records: Sequence[RankRecord]) -> list[RankRecord]:
    """Selects one record per pipeline rank, in pipeline order."""
    return sorted((r for r in records if r.speaks), key=lambda r: r.pp_rank)


def spent_by_rank(records: Sequence[RankRecord], schedule: Schedule) -> list[Spent]:
    """Seconds of a step by kind, per pipeline rank: means over the timed steps."""
    means = []
    for record, steps in _steps_of(records):
        step_spent = [attribute(record, pipeline, i, schedule) for i, pipeline in enumerate(steps)]
        means.append({kind: mean(spent[kind] for spent in step_spent) for kind in KINDS})
    return means


def p2p_seconds(records: Sequence[RankRecord], schedule: Schedule) -> list[float]:
    """Seconds of a step that each pipeline rank waits for p2p inputs after their sender made them.

    Means over the timed steps.
    """
    return [
        mean(
            sum(transfer for *_, transfer in _waits(record, pipeline, i, schedule))
            for i, pipeline in enumerate(steps)
        )
        for record, steps in _steps_of(records)
    ]


def _steps_of(
    records: Sequence[RankRecord],
) -> list[tuple[RankRecord, list[tuple[StepRecord, ...]]]]:
    """Pairs each pipeline rank's speaker with every timed step on all of the speakers."""
    pipeline = speakers(records)
    steps = list(zip(*(record.steps for record in pipeline), strict=True))
    return [(record, steps) for record in pipeline]


def attribute(
    record: RankRecord, pipeline: Sequence[StepRecord], index: int, schedule: Schedule
) -> Spent:
    """Seconds of one step of one rank by kind; `pipeline` is that step on every pipeline rank."""
    step, spent = record.steps[index], dict.fromkeys(KINDS, 0.0)
    phases = step.phases
    spent["data"] = phases.data - phases.begin
    for (op, start, end), bubble, transfer in _waits(record, pipeline, index, schedule):
        exchanging = record.exchanging(step, op.kind) * (end - start)
        spent["bubble"] += bubble
        spent["communication"] += transfer
        spent["communication"] += exchanging
        spent["forward" if op.kind == "F" else "backward"] += end - start - exchanging
    done = max(span.end for other in pipeline for span in other.spans)
    last = step.spans[-1].end if step.spans else phases.data
    for start, end in (
        (last, phases.pipeline),
        (phases.pipeline, phases.reduce),
        (phases.norm, phases.agree),
    ):
        arrived = min(max(start, done), end)
        spent["bubble"] += arrived - start
        spent["communication"] += end - arrived
    spent["optimizer"] = phases.norm - phases.reduce + phases.end - phases.agree
    spent["other"] = step.seconds - sum(spent.values())
    return spent


def _waits(
    record: RankRecord, pipeline: Sequence[StepRecord], index: int, schedule: Schedule
) -> Iterator[tuple[OpSpan, float, float]]:
    """Yields (span of an op, bubble, transfer): the seconds before the op until another rank has
    made its input, and from then until the op begins; 0 and 0 without input of another rank."""
    ends = {span.op: span.end for other in pipeline for span in other.spans}
    clock = record.steps[index].phases.data
    for span in record.steps[index].spans:
        input_ready = max(
            (
                ends[need]
                for need in needs(span.op, schedule.num_stages)
                if schedule.rank_of_stage[need.stage] != record.pp_rank
            ),
            default=None,
        )
        if input_ready is None:
            yield span, 0.0, 0.0
        else:
            arrived = min(max(clock, input_ready), span.start)
            yield span, arrived - clock, span.start - arrived
        clock = span.end


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
    steps = [record.steps[index] for record in speakers(records)]
    first = min(span.start for step in steps for span in step.spans)
    spans = tuple(
        Span(rank, op, start - first, end - first)
        for rank, step in enumerate(steps)
        for op, start, end in step.spans
    )
    return Timeline(spans, len(steps))


def on_timeline(
    records: Sequence[RankRecord], record: RankRecord, moments: Sequence[float]
) -> list[float]:
    """Maps moments of a rank's profiled step, in seconds since it began, to the clock of the
    timeline of the step of median length: a profiler stretches some ops more than others.

    Between two ends of ops time goes evenly.
    """
    index = middle_step(records)
    first = min(s.start for r in speakers(records) for s in r.steps[index].spans)
    profiled, timed = _ends_of_ops(record.profiled.step), _ends_of_ops(record.steps[index])
    since_begin = [moment - profiled[0] for moment in profiled]
    found = np.interp(moments, since_begin, [moment - first for moment in timed])
    return [float(moment) for moment in found]


def _ends_of_ops(step: StepRecord) -> list[float]:
    """The moments at which a step begins, its ops begin and end, and it ends."""
    inner = [moment for _, *span in step.spans for moment in span]
    return [step.phases.begin, *inner, step.phases.end]


def measured_bubble(records: Sequence[RankRecord]) -> float:
    """Idle over busy time of the pipeline: the median of the timed steps."""
    steps = range(len(speakers(records)[0].steps))
    return median(measured_timeline(records, i).bubble_fraction for i in steps)


def busy_seconds(record: RankRecord) -> float:
    """Seconds of a step in which a rank computes: the median of its timed steps."""
    return median(
        sum((b - a) * (1.0 - record.exchanging(step, op.kind)) for op, a, b in step.spans)
        for step in record.steps
    )


def stragglers(records: Sequence[RankRecord]) -> list[dict[str, float]]:
    """Every rank's busy seconds over the median of its pipeline rank's replicas, worst first."""
    busy = [(record, busy_seconds(record)) for record in records]
    replicas = defaultdict[int, list[float]](list)
    for record, seconds in busy:
        replicas[record.pp_rank].append(seconds)
    middle = {pp_rank: median(seconds) for pp_rank, seconds in replicas.items()}
    rows = [
        dict(rank=r.rank, busy_seconds=seconds, times_median=seconds / middle[r.pp_rank])
        for r, seconds in busy
    ]
    return sorted(rows, key=lambda row: -row["times_median"])
