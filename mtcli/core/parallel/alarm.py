"""What the ranks say of themselves once one has waited too long, and the one error made of it.

Whoever raised the alarm is followed from rank to rank: those it waits for, those that they wait
for, to the ranks that wait for nobody or do not answer.
"""

import json
from typing import NamedTuple

from mtcli.core.spec.errors import MtcliError, failed

NAMED = 4  # ranks that an error describes one by one; the others are counted


class Wait(NamedTuple):
    """A collective that a rank waits in."""

    op: str
    channel: str  # the axis, or the axis and "sender>receiver"
    ranks: tuple[int, ...]
    number: int
    seconds: float

    def __str__(self) -> str:
        axis, _, pair = self.channel.partition(" ")
        if pair:
            sender, _, receiver = pair.partition(">")
            return f"{self.op} number {self.number} on {axis} (rank {sender} to rank {receiver})"
        return f"{self.op} number {self.number} on {axis} ({ranks_in_words(self.ranks)})"


class Answer(NamedTuple):
    """Where one rank is: `wait` is None where it waits for no other rank."""

    rank: int
    step: int
    place: str  # where the main thread is, or where the collective was called
    counts: dict[str, int]  # collectives so far, by channel
    wait: Wait | None = None

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(self)

    @staticmethod
    def load(text: str | bytes) -> "Answer":
        """What `dump` has written."""
        rank, step, place, counts, wait = json.loads(text)
        if wait is not None:
            op, channel, ranks, number, seconds = wait
            wait = Wait(op, channel, tuple(ranks), number, seconds)
        return Answer(rank, step, place, counts, wait)


def error_of(alarm: Answer, answers: dict[int, Answer], world: int, timeout: float) -> MtcliError:
    """The error of a run in which `alarm` waited too long; `answers` are those of living ranks."""
    wait = alarm.wait
    assert wait is not None, "an alarm is raised by a rank that waits"
    answers = answers | {alarm.rank: alarm}
    met = _follow(alarm, answers)
    silent = [rank for rank in range(world) if rank not in answers]
    roots = [rank for rank in met if rank not in answers or answers[rank].wait is None]
    roots = roots or silent
    head = f"{wait} has waited for {wait.seconds:.0f} s on rank {alarm.rank}, at {alarm.place}"
    head += f" (step {alarm.step})" if alarm.step else ""
    if roots:
        words = [_absence(rank, answers.get(rank), wait) for rank in roots]
    else:
        head += ": no rank is absent, they wait for each other"
        words = [_standing(answers[rank]) for rank in sorted({*met, *wait.ranks})]
    if len(words) > NAMED:
        words[NAMED:] = [f"and {len(words) - NAMED} more ranks"]
    return failed(f"{head}: {'; '.join(words)}", _hint(roots, timeout))


def ranks_in_words(ranks: tuple[int, ...]) -> str:
    """`ranks 2, 3`, or the first eight of many and their number."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _follow(alarm: Answer, answers: dict[int, Answer]) -> list[int]:
    """The ranks met from the alarm on, each waited for by one before it, in that order."""
    met, waiting = [alarm.rank], [alarm]
    while waiting:
        one = waiting.pop(0)
        assert one.wait is not None, "only those who wait are asked for whom"
        for rank in one.wait.ranks:
            if rank in met or _has_come(answers.get(rank), one.wait):
                continue
            met.append(rank)
            if rank in answers and answers[rank].wait is not None:
                waiting.append(answers[rank])
    return met


def _has_come(answer: Answer | None, wait: Wait) -> bool:
    """Whether a rank has reached a collective, whatever it does now."""
    return answer is not None and answer.counts.get(wait.channel, 0) >= wait.number


def _absence(rank: int, answer: Answer | None, wait: Wait) -> str:
    if answer is None:
        return f"rank {rank} is absent: it does not answer (stopped, dead, or its machine lost)"
    said = f"rank {rank} is absent: it is at {answer.place}"
    axis = wait.channel.partition(" ")[0]
    if rank not in wait.ranks:
        return said
    last = answer.counts.get(wait.channel, 0)
    return said + (f", and its last collective on {axis} was number {last}" if last else "")


def _standing(answer: Answer) -> str:
    return f"rank {answer.rank} is in {answer.wait or 'no collective'}, at {answer.place}"


def _hint(roots: list[int], timeout: float) -> str:
    kept = "the last good checkpoint is kept: run the same command with --resume; "
    if roots:
        return kept + f"raise train.timeout ({timeout:g} s) if the rank was only slow"
    return kept + "train.debug_collectives = true names the first call that differs"
