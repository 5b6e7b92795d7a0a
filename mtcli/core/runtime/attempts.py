"""Attempts: a launcher that starts a run's ranks again, and how the ranks of one attempt meet.

A launcher on several nodes keeps one store over restarts, and counts restarts per node: a node that
joins begins at 0, and one whose ranks were only stopped does not count. So no count names an
attempt. Rank 0 agrees a fresh name for it with ranks that show they live:

1. Each rank joins with a token of its own. Tokens of ranks that have died stay in the store.
2. Rank 0 gives every token a seat: the attempt's name.
3. Ranks find the seat of their own token and answer under that name.
4. When all have answered rank 0 says that they go on. Where one does not and joins again meanwhile,
   its token was a dead rank's: rank 0 calls this roster off and gives out seats anew.

A rank reads and writes 4 keys of its own. Imports no torch.
"""

import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from mtcli.core.config.errors import MtcliError, failed

if TYPE_CHECKING:
    import torch.distributed as dist

CALLED_OFF = "called off"
LONGEST = 0.25  # seconds between looks at the store


class Attempt(NamedTuple):
    """Which attempt of which launch the ranks are."""

    launch: str  # random, as long as the launcher's store lives
    job: str  # the launcher's name for the run: torchrun's rendezvous id, or Slurm's job id
    number: int  # of attempts in that store, from 1
    restarted: bool  # whether ranks were started before this attempt

    def record(self) -> dict[str, str]:
        """What a run folder keeps of it."""
        return {"launch": self.launch, "job": self.job}

    def continues(self, record: Mapping[str, Any]) -> bool:
        """Whether an earlier attempt of this launch wrote a run folder's record.

        Where the store is new, since its node was replaced or there is none, the job's name tells.
        """
        if not self.restarted:
            return False
        name = "launch" if self.number > 1 else "job"
        return record.get(name) == self.record()[name]


class Meeting(NamedTuple):
    """One rank's part in agreeing on an attempt: Raises MtcliError after `timeout` seconds."""

    store: "dist.Store"
    rank: int
    world: int
    timeout: float

    def agree(self, environ: Mapping[str, str] = os.environ) -> tuple[str, Attempt]:
        """(a name for keys of this attempt alone, what it is), the same on every rank."""
        token = secrets.token_hex(8)
        end = time.monotonic() + self.timeout
        self.store.set(f"join/{self.rank}", json.dumps([token, times_restarted(environ)]))
        name, verdict = self._convene(token, end) if self.rank == 0 else self._follow(token, end)
        launch, number, restarted = json.loads(verdict)
        return name, Attempt(launch, job_name(environ), number, restarted)

    def _convene(self, own: str, end: float) -> tuple[str, str]:
        """Rank 0's part."""
        store, seats, joins = self.store, Counter[str](), self._keys("join")
        self._await(lambda: store.check(joins), end, joins)
        while True:
            tokens = [json.loads(one) for one in store.multi_get(joins)]
            if tokens[0][0] != own:
                raise failed("another process has joined as rank 0", "end the one that was left")
            name = secrets.token_hex(8)
            store.multi_set(
                [f"seat/{token}/{seats[token]}" for token, _ in tokens], [name] * self.world
            )
            seats.update(token for token, _ in tokens)
            answers = [f"{name}/{key}" for key in joins[1:]]

            def changed(known: list[Any] = tokens) -> bool:
                return [json.loads(one) for one in store.multi_get(joins)] != known

            def settled(answers: list[str] = answers) -> bool:
                return not answers or store.check(answers) or changed()

            self._await(settled, end, answers)
            if answers and not store.check(answers):
                store.set(f"{name}/verdict", CALLED_OFF)
                continue
            launch, number = store.compare_set("launch", "", own).decode(), store.add("attempts", 1)
            restarted = number > 1 or any(times for _, times in tokens)
            verdict = json.dumps([launch, number, restarted])
            store.set(f"{name}/verdict", verdict)
            return name, verdict

    def _follow(self, token: str, end: float) -> tuple[str, str]:
        """Every other rank's part."""
        joins = self._keys("join")
        for seat in count():
            name = self._value(f"seat/{token}/{seat}", end, joins)
            self.store.set(f"{name}/join/{self.rank}", "")
            verdict = self._value(f"{name}/verdict", end, [f"{name}/{key}" for key in joins])
            if verdict != CALLED_OFF:
                return name, verdict
        raise AssertionError("there is no last seat")

    def _keys(self, kind: str) -> list[str]:
        return [f"{kind}/{rank}" for rank in range(self.world)]

    def _value(self, key: str, end: float, signs: list[str]) -> str:
        self._await(lambda: self.store.check([key]), end, signs)
        return str(self.store.get(key).decode())

    def _await(self, condition: Callable[[], bool], end: float, signs: list[str]) -> None:
        """Returns when the condition holds. Raises MtcliError with the ranks whose sign is not in
        the store, or rank 0, which has not answered them all."""
        pause = 0.01
        while not condition():
            if time.monotonic() > end:
                raise self._missing(signs)
            time.sleep(pause)
            pause = min(2.0 * pause, LONGEST)

    def _missing(self, signs: list[str]) -> MtcliError:
        names = [sign.rpartition("/")[2] for sign in signs if not self.store.check([sign])]
        message = f"after {self.timeout:g} s, of {self.world} ranks these have not started: "
        message += ", ".join(names or ["0"])
        return failed(message, "raise train.timeout if they need longer")


def times_restarted(environ: Mapping[str, str] = os.environ) -> int:
    """How often this rank's launcher says that it has started ranks before: torch's elastic one on
    this node, or Slurm that has requeued the job."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return sum(int(environ.get(name) or 0) for name in names)


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """The launcher's name for the run, which it keeps over restarts; empty where it has none."""
    return environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID") or ""


def keeps_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher hosts the store, and keeps it over restarts."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def alone(environ: Mapping[str, str] = os.environ) -> Attempt:
    """The attempt of one rank whose launcher keeps no store."""
    return Attempt("", job_name(environ), 1, times_restarted(environ) > 0)
