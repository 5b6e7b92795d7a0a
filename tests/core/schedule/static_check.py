"""A static proof that a schedule runs: every op once, no deadlock, and what it keeps in flight."""

from collections import Counter

from mtcli.core.schedule.ops import Op, Schedule, needs


def problems(schedule: Schedule) -> list[str]:
    """Everything that stops ranks that run their ops in order from ending; empty when none does.

    Sends do not wait for their receiver here, as in the executor.
    """
    found = [*_misplaced(schedule), *_miscounted(schedule)]
    return found or _stuck(schedule)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most (micro-batch, stage) activations it holds at once.

    F takes one; B, or the W of a split backward, frees it.
    """
    peaks = []
    for ops in schedule.ops:
        held = peak = 0
        for op in ops:
            held += {"F": 1, "B": -1, "I": 0, "W": -1}[op.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _misplaced(schedule: Schedule) -> list[str]:
    return [
        f"{op} is on rank {rank} and its stage on rank {schedule.rank_of_stage[op.stage]}"
        for rank, ops in enumerate(schedule.ops)
        for op in ops
        if schedule.rank_of_stage[op.stage] != rank
    ]


def _miscounted(schedule: Schedule) -> list[str]:
    counts = Counter(op for ops in schedule.ops for op in ops)
    kinds = sorted({op.kind for op in counts})
    every = {
        Op(kind, m, stage)
        for kind in kinds
        for m in range(schedule.num_micro_batches)
        for stage in range(schedule.num_stages)
    }
    found = [f"{op} runs {counts[op]} times" for op in sorted(every) if counts[op] != 1]
    found += [f"{op} is of no micro-batch" for op in sorted(counts.keys() - every)]
    if kinds not in (["F"], ["B", "F"], ["F", "I", "W"]):
        found.append(f"ops of kinds {', '.join(kinds)} are not a whole forward and backward")
    return found


def _stuck(schedule: Schedule) -> list[str]:
    """Runs every rank as far as it goes, in turn, until nobody moves."""
    done: set[Op] = set()
    places = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            while places[rank] < len(ops) and _is_ready(ops[places[rank]], schedule, done):
                done.add(ops[places[rank]])
                places[rank] += 1
                moved = True
    return [
        f"rank {rank} waits at {ops[place]} for {_missing(ops[place], schedule, done)} forever"
        for rank, (ops, place) in enumerate(zip(schedule.ops, places, strict=True))
        if place < len(ops)
    ]


def _is_ready(op: Op, schedule: Schedule, done: set[Op]) -> bool:
    return all(need in done for need in needs(op, schedule.num_stages))


def _missing(op: Op, schedule: Schedule, done: set[Op]) -> str:
    return " and ".join(str(n) for n in needs(op, schedule.num_stages) if n not in done)
