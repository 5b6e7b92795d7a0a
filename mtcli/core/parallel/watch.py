"""The watch of a process: ends a run in which a rank waits longer than it may, and says for whom.

Two threads per rank. One asks the store about once a second whether an alarm was raised, raises it
where this rank has waited for `timeout` or a collective broke, and answers where this rank is. The
rank that raised it makes one error of all answers. The other thread needs no store: it speaks where
that one cannot.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from mtcli.core.parallel.alarm import KEPT, Answer, Wait, error_of
from mtcli.core.parallel.callsite import calling, place
from mtcli.core.parallel.ledger import SAVING, Call, Ledger
from mtcli.core.spec.errors import MtcliError, failed

ALARM, REPORTED, PROGRESS = "alarm", "reported", "progress"
PATIENCE = 20.0  # seconds for a rank whose peer has failed to end by itself
LEAVING = 0.3  # seconds by which other ranks leave later: the launcher sees the first one's error

# Ends this process, with an error or without a word, given the processes of ranks that do not
# answer, and whether the error follows from another rank's.
End = Callable[[MtcliError | None, list[int], bool], None]


class Watch:
    """Watches over a rank's ledger from its start to `stop`. `store` is its own connection."""

    def __init__(
        self, ledger: Ledger, store: dist.Store, rank: int, world: int, timeout: float, end: End
    ) -> None:
        self.ledger, self.store, self.rank, self.world = ledger, store, rank, world
        self.timeout, self.end = timeout, end
        self.tick = min(0.25, timeout / 8.0)  # between looks at this rank's ledger
        self.poll = 4.0 * self.tick  # between looks at the store: 70 us of it
        self.grace = self.poll + 1.5  # by then every rank that lives has answered
        self.main, self.stopped = threading.get_ident(), threading.Event()
        self.answered = False  # an alarm: another rank reports
        self.published, self.progress = 0, 0  # of this rank's saves, and of all ranks'
        self.threads = [
            threading.Thread(target=work, name=f"mtcli-{work.__name__}", daemon=True)
            for work in (self._serve, self._fall_back)
        ]

    def start(self, pid: int) -> None:
        """Starts watching; `pid` is what others give to `end` where this rank does not answer."""
        self.store.set_timeout(timedelta(seconds=self.grace))
        self.store.set(f"pid/{self.rank}", str(pid))
        for thread in self.threads:
            thread.start()

    def explain(self) -> None:
        """Where a collective broke, waits until the watch has ended this rank with the reason."""
        if self.ledger.broken is not None:
            self.threads[0].join(timeout=2.0 * self.grace)

    def give_up(self) -> None:
        """Ends the watch of a rank that failed by itself: the others leave, without a word."""
        self.stop()
        with suppress(RuntimeError):  # the store may have ended first
            answer = Answer(self.rank, self.ledger.step, "the end of its run", {})
            self.store.compare_set(ALARM, "", answer.dump())
            self.store.set(REPORTED, "")

    def leave(self) -> None:
        """Ends the watch of a rank that is done; rank 0, which may hold the store, leaves last."""
        self.stop()
        if self.rank == 0:
            everyone = [f"answer/{rank}" for rank in range(self.world)]
            self._await(lambda: self.store.check(everyone), self.grace)

    def stop(self) -> None:
        """Ends the watch."""
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
                    self.store.compare_set(ALARM, "", self._answer().dump())
                if self.store.check([ALARM]):
                    self._respond(Answer.load(self.store.get(ALARM)))
                    return
            self._tell(Answer(self.rank, self.ledger.step, "the end of its run", {}))
        except RuntimeError:
            self._end_alone()

    def _has_cause(self) -> bool:
        """Whether this rank has waited too long, or a collective of it broke."""
        call = self.ledger.oldest()
        late = call is not None and time.monotonic() - call.since > self.timeout
        return late or self.ledger.broken is not None

    def _follow_saves(self) -> None:
        """Publishes that this rank's save goes on; where any rank's does, the wait for it begins
        anew: a slow disk is no hang."""
        if self.published != self.ledger.progress:
            self.published = self.ledger.progress
            self.store.add(PROGRESS, 1)
        waits = [call for call in list(self.ledger.waits.values()) if call.axis.name == SAVING]
        if waits and (progress := self.store.add(PROGRESS, 0)) != self.progress:
            self.progress = progress
            for call in waits:
                call.since = time.monotonic()

    def _respond(self, alarm: Answer) -> None:
        self._tell(self._answer())
        if alarm.rank != self.rank:
            self.answered = True
            self._await(lambda: self.store.check([REPORTED]), self.grace)
            if alarm.wait is None:
                self._await(self._is_over, PATIENCE)
            time.sleep(LEAVING)
            if not self.stopped.is_set():
                self.end(None, [], True)
            return
        others = set(range(self.world)) - {self.rank}
        answers: dict[int, Answer] = {}

        def all_answered() -> bool:
            for rank in others - set(answers):
                if self.store.check([f"answer/{rank}"]):
                    answers[rank] = Answer.load(self.store.get(f"answer/{rank}"))
            return len(answers) == len(others)

        # A run that has broken down is not slow: its ranks look at their ledgers every tick.
        self._await(all_answered, self.poll + 0.5 if alarm.broke else self.grace)
        error = error_of(alarm, answers, self.world, self.timeout)
        keys = [f"pid/{rank}" for rank in others - set(answers)]
        silent = [int(self.store.get(key)) for key in keys if self.store.check([key])]
        self.store.set(REPORTED, "")
        time.sleep(0.1)  # the others look every 0.05 s; the store may end with this rank
        self.end(error, silent, bool(alarm.broke))

    def _is_over(self) -> bool:
        """Whether this rank ends by itself, or waits for the one that has failed: until then it may
        have an error of its own to tell, or a checkpoint to write."""
        call = self.ledger.oldest()
        waits = call is not None and time.monotonic() - call.since > LEAVING
        return waits or self.ledger.broken is not None or self.stopped.is_set()

    def _end_alone(self) -> None:
        """Ends a rank that has lost the store, which the launcher holds, or rank 0."""
        if self.answered:
            self.end(None, [], True)
            return
        self._await(lambda: self.stopped.is_set() or self.ledger.broken is not None, self.grace)
        if self.stopped.is_set():
            return
        own = self._answer()
        if own.broke:
            answers = dict.fromkeys(range(1, self.world), own)
            self.end(error_of(own, answers, self.world, self.timeout), [], True)
        else:
            message = f"rank {self.rank}, at {own.place}, has lost the run's store: its launcher"
            self.end(failed(f"{message}, or rank 0, has ended", KEPT), [], True)

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        """Returns when the condition holds, or after so many seconds."""
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)

    def _tell(self, answer: Answer) -> None:
        self.store.set(f"answer/{self.rank}", answer.dump())

    def _answer(self) -> Answer:
        step, counts = self.ledger.step, dict(self.ledger.counts)
        if broken := self.ledger.broken:
            wait = self._wait(broken.call)
            return Answer(self.rank, step, broken.place, counts, wait, broken.error)
        call = self.ledger.oldest()
        if call is None:
            return Answer(self.rank, step, place(self.main), counts)
        return Answer(self.rank, step, calling(call.thread), counts, self._wait(call))

    def _wait(self, call: Call) -> Wait:
        waited = time.monotonic() - call.since
        return Wait(call.op, call.channel, call.peers(), call.number, waited)

    def _fall_back(self) -> None:
        """Ends a rank whose store does not answer: its host may be what has stopped."""
        while not self.stopped.wait(self.poll):
            call = self.ledger.oldest()
            if call is None or time.monotonic() - call.since < self.timeout + 2.0 * self.grace:
                continue
            wait, where = self._wait(call), calling(call.thread)
            message = f"{wait} has waited for {wait.seconds:.0f} s on rank {self.rank}, at {where}"
            message += "; no rank could be asked why: rank 0's store does not answer"
            hint = "the last good checkpoint is kept: look at rank 0's machine, then use --resume"
            self.end(failed(message, hint), [], False)
