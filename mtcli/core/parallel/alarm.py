"""What the ranks say of themselves once one has waited too long, and the one error made of it.

Whoever raised the alarm is followed from rank to rank: those it waits for, those that they wait
for, to the ranks that wait for nobody or do not answer.
"""

import json
import re
from typing import NamedTuple

from mtcli.core.spec.errors import MtcliError, failed

KEPT = "the last good checkpoint is kept: run the same command with --resume"
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
    broke: str = ""  # the error that `wait` ended in

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(self)

    @staticmethod
    def load(text: str | bytes) -> "Answer":
        """What `dump` has written."""
        rank, step, place, counts, wait, broke = json.loads(text)
        if wait is not None:
            op, channel, ranks, number, seconds = wait
            wait = Wait(op, channel, tuple(ranks), number, seconds)
        return Answer(rank, step, place, counts, wait, broke)


def error_of(alarm: Answer, answers: dict[int, Answer], world: int, timeout: float) -> MtcliError:
    """The error of a run in which `alarm` waited too long; `answers` are those of living ranks."""
    wait = alarm.wait
    assert wait is not None, "an alarm is raised by a rank that waits"
    answers = answers | {alarm.rank: alarm}
    silent = [rank for rank in range(world) if rank not in answers]
    if alarm.broke:
        head = f"{wait} broke on rank {alarm.rank}, at {_place(alarm)}: {_shortened(alarm.broke)}"
        return failed(
            "; ".join([head, *_few([_absence(rank, None, wait) for rank in silent])]), KEPT
        )
    met = _follow(alarm, answers)
    roots = [rank for rank in met if rank not in answers or answers[rank].wait is None]
    roots = roots or silent
    if roots:  # whoever waits for the first of them says more than who was the first to complain
        alarm = met.get(roots[0], alarm)
        words = [_absence(rank, answers.get(rank), met.get(rank, alarm).wait) for rank in roots]
    else:
        words = [_standing(answers[rank]) for rank in sorted({*met, *wait.ranks})]
        words[0] = f"no rank is absent, they wait for each other: {words[0]}"
    assert alarm.wait is not None, "only those who wait lead to others"
    head = f"{alarm.wait} has waited for {alarm.wait.seconds:.0f} s on rank {alarm.rank}"
    head += f", at {_place(alarm)}: "
    return failed(head + "; ".join(_few(words)), _hint(roots, timeout))


def _few(words: list[str]) -> list[str]:
    return (
        words if len(words) <= NAMED else [*words[:NAMED], f"and {len(words) - NAMED} more ranks"]
    )


def _place(answer: Answer) -> str:
    return answer.place + (f" (step {answer.step})" if answer.step else "")


def _shortened(error: str) -> str:
    """The first sentence of gloo's or NCCL's words, without its source file."""
    return re.sub(r"^\[\S+\] ", "", error.splitlines()[0]).partition(". ")[0]


def ranks_in_words(ranks: tuple[int, ...]) -> str:
    """`ranks 2, 3`, or the first eight of many and their number."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _follow(alarm: Answer, answers: dict[int, Answer]) -> dict[int, Answer]:
    """The ranks met from the alarm on, in that order, and for each who waits for it."""
    met, waiting = {alarm.rank: alarm}, [alarm]
    while waiting:
        one = waiting.pop(0)
        assert one.wait is not None, "only those who wait are asked for whom"
        for rank in one.wait.ranks:
            if rank in met or _has_come(answers.get(rank), one.wait):
                continue
            met[rank] = one
            if rank in answers and answers[rank].wait is not None:
                waiting.append(answers[rank])
    return met


def _has_come(answer: Answer | None, wait: Wait) -> bool:
    """Whether a rank has reached a collective, whatever it does now."""
    return answer is not None and answer.counts.get(wait.channel, 0) >= wait.number


def _absence(rank: int, answer: Answer | None, wait: Wait | None) -> str:
    """Why a rank is not where another one waits for it."""
    if answer is None:
        return f"rank {rank} is absent: it does not answer (stopped, dead, or its machine lost)"
    said = f"rank {rank} is absent: it is at {answer.place}"
    last = answer.counts.get(wait.channel, 0) if wait is not None else 0
    if not last or wait is None:
        return said
    axis = wait.channel.partition(" ")[0]
    return f"{said}, and its last collective on {axis} was number {last}"


def _standing(answer: Answer) -> str:
    return f"rank {answer.rank} is in {answer.wait or 'no collective'}, at {answer.place}"


def _hint(roots: list[int], timeout: float) -> str:
    if roots:
        return f"{KEPT}; raise train.timeout ({timeout:g} s) if the rank was only slow"
    return f"{KEPT}; train.debug_collectives = true names the first call that differs"
