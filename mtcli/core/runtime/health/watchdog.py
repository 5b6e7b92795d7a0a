"""The watchdog: ends a run in which a rank waits too long, and names the rank that it waits for.

Two threads per rank. One asks the store about once a second whether any rank reported a stall. It
reports one itself if this rank has waited for `timeout` seconds or a collective broke, and
publishes this rank's status when asked. The reporting rank makes one error of all statuses; if it
dies first, another rank takes over. The other thread uses no store, and ends the rank where the
store does not answer.
"""

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from mtcli.core.config.errors import MtcliError, failed
from mtcli.core.runtime.health.flight_recorder import (
    SAVING,
    Call,
    FlightRecorder,
    call_site,
    location,
)

NAMED = 4  # ranks that an error describes one by one; the others are counted
STALL, REPORTER, REPORTED, PROGRESS = "stall", "reporter", "reported", "progress"
PATIENCE = 20.0  # seconds for a rank to end by itself after a peer failed
LATER = 60.0  # seconds by which torch's own timeouts follow ours, which can say who is missing
LEAVING = 0.3  # seconds by which other ranks leave later: the launcher sees the first one's error

# Ends this process, with an error or without a word, given the processes of ranks that do not
# answer, and whether the error follows from another rank's.
End = Callable[[MtcliError | None, list[int], bool], None]


class BlockedCall(NamedTuple):
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


class RankStatus(NamedTuple):
    """The status of one rank: where it is, and the collective it waits in, if any."""

    rank: int
    step: int
    location: str  # where the main thread is, or where the collective was called
    counts: dict[str, int]  # collectives so far, by channel
    wait: BlockedCall | None = None
    broke: str = ""  # the error that `wait` ended in

    def dump(self) -> str:
        """The status as JSON."""
        return json.dumps(self)

    @staticmethod
    def load(text: str | bytes) -> "RankStatus":
        """Parses the JSON of `dump`."""
        rank, step, location, counts, wait, broke = json.loads(text)
        if wait is not None:
            op, channel, ranks, number, seconds = wait
            wait = BlockedCall(op, channel, tuple(ranks), number, seconds)
        return RankStatus(rank, step, location, counts, wait, broke)


class Watchdog:
    """Watches a rank's flight recorder from `start` to `stop`. `store` is a connection of its
    own."""

    def __init__(
        self,
        recorder: FlightRecorder,
        store: dist.Store,
        rank: int,
        world: int,
        timeout: float,
        end: End,
    ) -> None:
        self.recorder, self.store, self.rank, self.world = recorder, store, rank, world
        self.timeout, self.end = timeout, end
        self.tick = min(0.25, timeout / 8.0)  # between looks at this rank's recorder
        self.poll = 4.0 * self.tick  # between looks at the store: 70 us of it
        self.grace = self.poll + 1.5  # every live rank answers within it
        self.main, self.stopped = threading.get_ident(), threading.Event()
        self.answered = False  # a stall that another rank reports
        self.published, self.progress = 0, 0  # of this rank's saves, and of all ranks'
        self.threads = [
            threading.Thread(target=work, name=f"mtcli-{work.__name__}", daemon=True)
            for work in (self._serve, self._fall_back)
        ]

    def start(self, pid: int) -> None:
        """Starts watching. Other ranks pass `pid` to `end` where this rank does not answer."""
        self.store.set_timeout(timedelta(seconds=self.grace))
        self.store.set(f"pid/{self.rank}", str(pid))
        for thread in self.threads:
            thread.start()

    def explain(self) -> None:
        """Where a collective broke, waits until the watchdog ends this rank with the reason."""
        if self.recorder.broken is not None:
            self.threads[0].join(timeout=2.0 * self.grace)

    def give_up(self) -> None:
        """Stops watching a rank with an error of its own; the other ranks then end quietly."""
        self.stop()
        with suppress(RuntimeError):  # the store may have ended first
            answer = RankStatus(self.rank, self.recorder.step, "the end of its run", {})
            self.store.compare_set(STALL, "", answer.dump())
            self.store.set(REPORTED, "")

    def leave(self) -> None:
        """Stops watching a rank that is done; rank 0, which may host the store, leaves last."""
        self.stop()
        if self.rank == 0:
            everyone = [f"answer/{rank}" for rank in range(self.world)]
            self._await(lambda: self.store.check(everyone), self.grace)

    def stop(self) -> None:
        """Stops both threads."""
        self.stopped.set()
        for thread in self.threads:
            thread.join(timeout=self.grace)

    def _serve(self) -> None:
        try:
            due = time.monotonic()
            while not self.stopped.wait(self.tick):
                now = time.monotonic()
                if now < due and not self._has_cause():
                    continue
                due = now + self.poll
                self._follow_saves()
                if self._has_cause():
                    self.store.compare_set(STALL, "", self._answer().dump())
                if self.store.check([STALL]):
                    self._respond(RankStatus.load(self.store.get(STALL)))
                    return
            self._tell(RankStatus(self.rank, self.recorder.step, "the end of its run", {}))
        except RuntimeError:
            self._end_alone()

    def _has_cause(self) -> bool:
        """Whether this rank has waited too long, or a collective of its broke."""
        call = self.recorder.oldest()
        late = call is not None and time.monotonic() - call.since > self.timeout
        return late or self.recorder.broken is not None

    def _follow_saves(self) -> None:
        """Publishes this rank's progress with a save. Any rank's progress restarts the timeout of
        waits for saves, as a slow disk is no hang."""
        if self.published != self.recorder.progress:
            self.published = self.recorder.progress
            self.store.add(PROGRESS, 1)
        waits = [
            call for call in list(self.recorder.waits.values()) if call.axis.name.startswith(SAVING)
        ]
        if waits and (progress := self.store.add(PROGRESS, 0)) != self.progress:
            self.progress = progress
            for call in waits:
                call.since = time.monotonic()

    def _respond(self, stall: RankStatus) -> None:
        self._tell(self._answer())
        if stall.rank == self.rank:
            self._report(stall, self.rank)
            return
        self.answered = True
        if not self._is_reported() and stall.wait is not None:
            # The rank that was to report has stopped since: the first to say so reports instead.
            if int(self.store.compare_set(REPORTER, "", str(self.rank))) == self.rank:
                status = self._answer()
                self._report(stall if status.wait is None else status, stall.rank)
                return
            self._is_reported()
        if stall.wait is None:
            self._await(self._is_over, PATIENCE)
        time.sleep(LEAVING)
        if not self.stopped.is_set():
            self.end(None, [], True)

    def _is_reported(self) -> bool:
        """Waits for the reporting rank's error, at most twice `grace`; returns whether it came."""
        with suppress(dist.DistStoreError):  # one question, which the store answers when it can
            self.store.wait([REPORTED], timedelta(seconds=2.0 * self.grace))
            return True
        return False

    def _report(self, stall: RankStatus, noticed_by: int) -> None:
        """Ends this rank with an error about `stall`, from the statuses of all ranks that
        answer."""
        keys = [f"answer/{rank}" for rank in range(self.world) if rank != noticed_by]
        # A run that has broken down is not slow: its ranks look at their recorders every tick.
        self._await(lambda: self.store.check(keys), self.poll + 0.5 if stall.broke else self.grace)
        statuses = values_of(self.store, keys)
        answers = {status.rank: status for status in map(RankStatus.load, statuses)}
        error = error_of(stall, answers, self.world, self.timeout)
        left = [rank for rank in range(self.world) if rank != self.rank and rank not in answers]
        silent = [int(pid) for pid in values_of(self.store, [f"pid/{rank}" for rank in left])]
        self.store.set(REPORTED, "")
        time.sleep(0.1)  # the others look every 0.05 s; the store may end with this rank
        self.end(error, silent, bool(stall.broke))

    def _is_over(self) -> bool:
        """Whether this rank has stopped or waits for the failed rank: until then it may still
        report an error of its own or write a checkpoint."""
        call = self.recorder.oldest()
        waits = call is not None and time.monotonic() - call.since > LEAVING
        return waits or self.recorder.broken is not None or self.stopped.is_set()

    def _end_alone(self) -> None:
        """Ends a rank that lost the store, which the launcher or rank 0 hosts."""
        if self.answered:
            self.end(None, [], True)
            return
        self._await(lambda: self.stopped.is_set() or self.recorder.broken is not None, self.grace)
        if self.stopped.is_set():
            return
        mine = self._answer()
        if mine.broke:
            answers = dict.fromkeys(range(1, self.world), mine)
            self.end(error_of(mine, answers, self.world, self.timeout), [], True)
        else:
            message = (
                f"rank {self.rank}, at {mine.location}, has lost the run's store: its launcher"
            )
            self.end(failed(f"{message}, or rank 0, has ended"), [], True)

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        """Waits until the condition holds, at most `seconds`."""
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)

    def _tell(self, answer: RankStatus) -> None:
        self.store.set(f"answer/{self.rank}", answer.dump())

    def _answer(self) -> RankStatus:
        step, counts = self.recorder.step, dict(self.recorder.counts)
        if broken := self.recorder.broken:
            wait = self._wait(broken.call)
            return RankStatus(self.rank, step, broken.location, counts, wait, broken.error)
        call = self.recorder.oldest()
        if call is None:
            return RankStatus(self.rank, step, location(self.main), counts)
        return RankStatus(self.rank, step, call_site(call.thread), counts, self._wait(call))

    def _wait(self, call: Call) -> BlockedCall:
        waited = time.monotonic() - call.since
        return BlockedCall(call.op, call.channel, call.peers(), call.number, waited)

    def _fall_back(self) -> None:
        """Ends a rank whose store does not answer, as the store's host may be the one that
        stopped."""
        while not self.stopped.wait(self.poll):
            call = self.recorder.oldest()
            if call is None or time.monotonic() - call.since < self.timeout + 4.0 * self.grace:
                continue  # the rank that reports may still, or its successor
            wait, where = self._wait(call), call_site(call.thread)
            message = f"{wait} has waited for {wait.seconds:.0f} s on rank {self.rank}, at {where}"
            message += "; no rank could be asked why: rank 0's store does not answer"
            self.end(failed(message, "look at rank 0's machine"), [], False)


def values_of(store: dist.Store, keys: list[str]) -> list[bytes]:
    """The values of those of `keys` that the store has.

    Checks all keys at once, then halves, to find the missing ones: few checks, as the keys of lost
    ranks are consecutive.
    """
    present, ranges = list[str](), [keys]
    while ranges:
        asked = ranges.pop()
        if not asked:
            continue
        if store.check(asked):
            present += asked
        elif len(asked) > 1:
            middle = len(asked) // 2
            ranges += [asked[middle:], asked[:middle]]
    return store.multi_get(present) if present else []


def error_of(
    stall: RankStatus, answers: dict[int, RankStatus], world: int, timeout: float
) -> MtcliError:
    """The error of a run in which `stall` waited too long; `answers` are the statuses of live
    ranks.

    Follows from the rank that noticed the stall to the ranks it waits for, and so on, up to ranks
    that wait for no other or do not answer.
    """
    wait = stall.wait
    assert wait is not None, "a stall is noticed by a rank that waits"
    answers = answers | {stall.rank: stall}
    silent = [rank for rank in range(world) if rank not in answers]
    if stall.broke:
        # The first sentence of gloo's or NCCL's words, without its source file.
        why = re.sub(r"^\[\S+\] ", "", stall.broke.splitlines()[0]).partition(". ")[0]
        head = f"{wait} broke on rank {stall.rank}, at {_location(stall)}: {why}"
        words = [_absence(rank, None, wait) for rank in silent]
        return failed("; ".join([head, *_at_most_named(words)]))
    met = _follow(stall, answers)
    roots = [rank for rank in met if rank not in answers or answers[rank].wait is None]
    roots = roots or silent
    if roots:
        # The rank that waits for the first of them tells more than the rank that noticed first.
        stall = met.get(roots[0], stall)
        words = [_absence(rank, answers.get(rank), met.get(rank, stall).wait) for rank in roots]
    else:
        stuck = [answers[rank] for rank in sorted({*met, *wait.ranks})]
        words = [f"rank {s.rank} is in {s.wait or 'no collective'}, at {s.location}" for s in stuck]
        words[0] = f"no rank is absent, they wait for each other: {words[0]}"
    assert stall.wait is not None, "only those who wait lead to others"
    head = f"{stall.wait} has waited for {stall.wait.seconds:.0f} s on rank {stall.rank}"
    hint = "train.debug_collectives = true names the first call that differs"
    if roots:
        hint = f"raise train.timeout ({timeout:g} s) if the rank was only slow"
    return failed(f"{head}, at {_location(stall)}: {'; '.join(_at_most_named(words))}", hint)


def _at_most_named(words: list[str]) -> list[str]:
    more = len(words) - NAMED
    return [*words[:NAMED], f"and {more} more ranks"] if more > 0 else words


def _location(answer: RankStatus) -> str:
    return answer.location + (f" (step {answer.step})" if answer.step else "")


def ranks_in_words(ranks: tuple[int, ...]) -> str:
    """`ranks 2, 3`, or the first eight of many and their number."""
    shown = ", ".join(str(rank) for rank in ranks[:8])
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _follow(stall: RankStatus, answers: dict[int, RankStatus]) -> dict[int, RankStatus]:
    """The ranks reached from the first by following waits, in that order, each with the status of
    one that waits for it."""
    met, waiting = {stall.rank: stall}, [stall]
    while waiting:
        status = waiting.pop(0)
        assert status.wait is not None, "only those who wait are asked for whom"
        for rank in status.wait.ranks:
            answer = answers.get(rank)
            # It has reached the collective, whatever it does now.
            has_come = answer and answer.counts.get(status.wait.channel, 0) >= status.wait.number
            if rank in met or has_come:
                continue
            met[rank] = status
            if answer and answer.wait is not None:
                waiting.append(answer)
    return met


def _absence(rank: int, answer: RankStatus | None, wait: BlockedCall | None) -> str:
    """Why a rank is not in the collective in which another waits for it."""
    if answer is None:
        return f"rank {rank} is absent: it does not answer (stopped, dead, or its machine lost)"
    said = f"rank {rank} is absent: it is at {answer.location}"
    last = answer.counts.get(wait.channel, 0) if wait is not None else 0
    if not last or wait is None:
        return said
    axis = wait.channel.partition(" ")[0]
    return f"{said}, and its last collective on {axis} was number {last}"
