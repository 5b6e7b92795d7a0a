"""The watch of a process: ends a run in which a rank waits longer than it may, and says for whom.

Two threads per rank. One asks the store about once a second whether an alarm was raised, raises it
where this rank has waited for `timeout`, and answers where this rank is. The rank that raised it
makes one error of all answers. The other thread needs no store: it speaks where that one cannot.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from mtcli.core.parallel.alarm import Answer, Wait, error_of
from mtcli.core.parallel.callsite import calling, place
from mtcli.core.parallel.ledger import Call, Ledger
from mtcli.core.spec.errors import MtcliError, failed

ALARM, REPORTED = "alarm", "reported"
LEAVING = 0.3  # seconds by which other ranks leave later: a launcher must see the first one's error

# Ends the process with an error, or without a word; and the processes of ranks that do not answer.
End = Callable[[MtcliError | None, list[int]], None]


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
        self.threads = [
            threading.Thread(target=work, name=f"mtcli-{work.__name__}", daemon=True)
            for work in (self._serve, self._fall_back)
        ]

    def start(self, pid: int) -> None:
        """Starts watching; `pid` is what `end` is given of a rank that does not answer."""
        self.store.set_timeout(timedelta(seconds=self.grace))
        self.store.set(f"pid/{self.rank}", str(pid))
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """Ends the watch: this rank has done all its work."""
        self.stopped.set()
        for thread in self.threads:
            thread.join(timeout=self.grace)

    def _serve(self) -> None:
        try:
            due = time.monotonic()
            while not self.stopped.wait(self.tick):
                call, now = self.ledger.oldest(), time.monotonic()
                late = call is not None and now - call.since > self.timeout
                if call is not None and late:
                    self.store.compare_set(ALARM, "", self._answer(call).dump())
                if late or now >= due:
                    due = now + self.poll
                    if self.store.check([ALARM]):
                        self._respond(Answer.load(self.store.get(ALARM)))
                        return
            self._tell(Answer(self.rank, self.ledger.step, "the end of its run", {}))
        except RuntimeError:  # the store is gone: with its rank, or with the whole run
            return

    def _respond(self, alarm: Answer) -> None:
        self._tell(self._answer(self.ledger.oldest()))
        if alarm.rank != self.rank:
            self._wait_for(lambda: self.store.check([REPORTED]))
            time.sleep(LEAVING)
            self.end(None, [])
            return
        others = set(range(self.world)) - {self.rank}
        answers: dict[int, Answer] = {}

        def all_answered() -> bool:
            for rank in others - set(answers):
                if self.store.check([f"answer/{rank}"]):
                    answers[rank] = Answer.load(self.store.get(f"answer/{rank}"))
            return len(answers) == len(others)

        self._wait_for(all_answered)
        error = error_of(alarm, answers, self.world, self.timeout)
        keys = [f"pid/{rank}" for rank in others - set(answers)]
        silent = [int(self.store.get(key)) for key in keys if self.store.check([key])]
        self.store.set(REPORTED, "")
        self.end(error, silent)

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds, or after the grace."""
        end = time.monotonic() + self.grace
        while not condition() and time.monotonic() < end:
            time.sleep(0.05)

    def _tell(self, answer: Answer) -> None:
        self.store.set(f"answer/{self.rank}", answer.dump())

    def _answer(self, call: Call | None) -> Answer:
        step, counts = self.ledger.step, dict(self.ledger.counts)
        if call is None:
            return Answer(self.rank, step, place(self.main), counts)
        waited = time.monotonic() - call.since
        wait = Wait(call.op, call.channel, call.peers(), call.number, waited)
        return Answer(self.rank, step, calling(call.thread), counts, wait)

    def _fall_back(self) -> None:
        """Ends a rank whose store does not answer: its host may be what has stopped."""
        while not self.stopped.wait(self.poll):
            call = self.ledger.oldest()
            if call is None or time.monotonic() - call.since < self.timeout + 2.0 * self.grace:
                continue
            alone = self._answer(call)
            waited = time.monotonic() - call.since
            message = f"{alone.wait} has waited for {waited:.0f} s on rank {self.rank}, at "
            message += f"{alone.place}; no rank could be asked why: rank 0's store does not answer"
            hint = "the last good checkpoint is kept: look at rank 0's machine, then use --resume"
            self.end(failed(message, hint), [])
