"""The timeline of a schedule's ops: simulated by plan, measured by profile, drawn as text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mtcli.core.schedule.ops import READS, Op, OpKind, Schedule

Seconds = Mapping[OpKind, float] | Callable[[Op], float]

DRAWN_RANKS = 32  # a deeper pipeline is drawn by evenly chosen ranks


class Span(NamedTuple):
    """One op on one pipeline rank, in seconds since the step began."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of a step, each rank's in the order it ran them."""

    spans: tuple[Span, ...]
    num_ranks: int

    @property
    def end(self) -> float:
        """Seconds from the start of the step to the end of its last op."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank spends in its ops."""
        busy = [0.0] * self.num_ranks
        for span in self.spans:
            busy[span.rank] += span.end - span.start
        return tuple(busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle over busy time, summed over ranks: the paper's ratio to the ideal time.

        (p - 1) / m for equal stages under 1F1B (arXiv:2104.04473, section 2.2.1).
        """
        busy = sum(self.busy_seconds)
        return max(0.0, self.end * self.num_ranks / busy - 1) if busy else 0.0

    def scaled(self, factor: float) -> "Timeline":
        """The timeline with all times multiplied by `factor`."""
        spans = (
            span._replace(start=span.start * factor, end=span.end * factor) for span in self.spans
        )
        return Timeline(tuple(spans), self.num_ranks)


def simulate(schedule: Schedule, seconds: Seconds, p2p_seconds: float = 0.0) -> Timeline:
    """The timeline of ranks that run their ops in order, each as soon as its needs have arrived.

    `seconds` has the length of ops by kind, or of each op. A result of another rank's op takes
    `p2p_seconds` to arrive, during which neither rank is busy.
    """
    length = seconds if callable(seconds) else lambda op: seconds[op.kind]
    clock, places = [0.0] * schedule.num_ranks, [0] * schedule.num_ranks
    ends: dict[tuple[OpKind, int, int], float] = {}
    waiting: dict[tuple[OpKind, int, int], int] = {}  # an op to come, and the rank that needs it
    spans: list[list[Span]] = [[] for _ in schedule.ops]
    ranks = list(range(schedule.num_ranks))
    while ranks:
        rank = ranks.pop()
        for op in schedule.ops[rank][places[rank] :]:
            start, missing = _arrival(op, rank, schedule, ends, p2p_seconds)
            if missing is not None:
                waiting[missing] = rank
                break
            start = max(start, clock[rank])
            clock[rank] = ends[op] = start + length(op)
            spans[rank].append(Span(rank, op, start, clock[rank]))
            if op in waiting:
                ranks.append(waiting.pop(op))
        places[rank] = len(spans[rank])
    assert not waiting, f"the schedule deadlocks: {waiting}"
    return Timeline(tuple(span for row in spans for span in row), schedule.num_ranks)


def _arrival(
    op: Op,
    rank: int,
    schedule: Schedule,
    ends: dict[tuple[OpKind, int, int], float],
    p2p_seconds: float,
) -> tuple[float, tuple[OpKind, int, int] | None]:
    """The time when all of an op's needs have arrived on its rank, or the need that has not run
    yet.

    Repeats `ops.needs` inline, as this is the planner's innermost loop.
    """
    arrived, rank_of_stage = 0.0, schedule.rank_of_stage
    for kind, step in READS[op[0]]:
        stage = op[2] + step
        if not 0 <= stage < len(rank_of_stage):
            continue
        need = (kind, op[1], stage)
        if need not in ends:
            return 0.0, need
        transfer = p2p_seconds if rank_of_stage[stage] != rank else 0.0
        arrived = max(arrived, ends[need] + transfer)
    return arrived, None


def draw(timeline: Timeline, width: int = 100, end: float | None = None) -> str:
    """The timeline as text, a row per rank of at most `width` characters, up to `end` seconds.

    A cell shows the op that fills most of it, at least a quarter: the micro-batch's last digit for
    a forward, a letter a to j for a backward, w for a weight pass, a dot for idle time.
    """
    rows: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in timeline.spans:
        rows[span.rank].append(span)
    step = -(-timeline.num_ranks // DRAWN_RANKS)
    label = len(f"rank {timeline.num_ranks - 1} ")
    cells, end = width - label, end or timeline.end
    lines = [
        f"{f'rank {rank}':<{label}}{_row(rows[rank], end, cells)}"
        for rank in range(0, timeline.num_ranks, step)
    ]
    ruler = f"{'':<{label}}0{f'{end:.4g} s':>{cells - 1}}"
    legend = "forward 0-9, backward a-j, weight gradient w, idle ."
    return "\n".join([*lines, ruler, f"{'':<{label}}{legend}"[:width]])


def _row(spans: list[Span], end: float, cells: int) -> str:
    row, best = ["."] * cells, [0.25 * end / cells] * cells
    for span in spans:
        first = int(span.start / end * cells)
        last = min(cells - 1, int(span.end / end * cells))
        for cell in range(first, last + 1):
            low, high = cell * end / cells, (cell + 1) * end / cells
            covered = min(high, span.end) - max(low, span.start)
            if covered > best[cell]:
                row[cell], best[cell] = _letter(span.op), covered
    return "".join(row)


def _letter(op: Op) -> str:
    if op.kind == "W":
        return "w"
    digit = op.micro_batch % 10
    return str(digit) if op.kind == "F" else "abcdefghij"[digit]
