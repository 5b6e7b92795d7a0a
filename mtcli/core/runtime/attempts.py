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
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from mtcli.core.config.errors import MtcliError, failed

if TYPE_CHECKING:
    import torch.distributed as dist

CALLED_OFF = "called off"
LONGEST = 0.25  # seconds between looks at the store
PARTING = 10.0  # seconds for ranks to read why they end
NAMED = 4  # ranks that an error describes one by one; the others are counted


class Attempt(NamedTuple):
    """The attempt of a launch that the ranks are."""

    launch: str  # random, as long as the launcher's store lives
    job: str  # the launcher's name for the run: torchrun's rendezvous id, or Slurm's job id
    number: int  # of attempts in that store, from 1
    restarted: bool  # whether ranks were started before this attempt

    def record(self) -> dict[str, str]:
        """The facts that a run folder keeps of it."""
        return {"launch": self.launch, "job": self.job}

    def continues(self, record: Mapping[str, Any]) -> bool:
        """Whether an earlier attempt of this launch wrote a run folder's record.

        Where the store is new, since its node was replaced or there is none, the job's name tells.
        """
        if not self.restarted:
            return False
        name = "launch" if self.number > 1 else "job"
        return record.get(name) == self.record()[name]


class Join(NamedTuple):
    """The facts that a rank tells when it joins."""

    token: str  # random
    restarts: int
    device: str  # its kind
    host: str


class Meeting(NamedTuple):
    """One rank's part in agreeing on an attempt. `device` is the kind it computes on."""

    store: "dist.Store"
    rank: int
    world: int
    timeout: float
    device: str

    def agree(self, environ: Mapping[str, str] = os.environ) -> tuple[str, Attempt]:
        """(a name for keys of this attempt alone, what it is), the same on every rank.

        Raises MtcliError where ranks are missing after `timeout` seconds, and on every rank where
        their devices are of several kinds.
        """
        token = secrets.token_hex(8)
        end = time.monotonic() + self.timeout
        join = Join(token, times_restarted(environ), self.device, socket.gethostname())
        self.store.set(f"join/{self.rank}", json.dumps(join))
        name, verdict = self._convene(token, end) if self.rank == 0 else self._follow(token, end)
        launch, number, restarted, differ = json.loads(verdict)
        if differ:
            self._part(name)
            hint = "nvidia-smi on that host says what its driver lacks; --set train.device=cuda has"
            raise failed(differ, f"{hint} a rank without a GPU say so itself")
        return name, Attempt(launch, job_name(environ), number, restarted)

    def _part(self, name: str) -> None:
        """Has rank 0, which may host the store, leave when the others have read the verdict."""
        if self.rank:
            self.store.set(f"{name}/told/{self.rank}", "")
            return
        keys = [f"{name}/{key}" for key in self._keys("told")[1:]]
        with suppress(MtcliError):
            self._await(lambda: self.store.check(keys), time.monotonic() + PARTING, keys)

    def _convene(self, own_token: str, end: float) -> tuple[str, str]:
        """Rank 0's part."""
        store, seats, joins = self.store, Counter[str](), self._keys("join")
        self._await(lambda: store.check(joins), end, joins)
        while True:
            members = [Join(*json.loads(message)) for message in store.multi_get(joins)]
            tokens = [join.token for join in members]
            if tokens[0] != own_token:
                raise failed("another process has joined as rank 0", "end the one that was left")
            name = secrets.token_hex(8)
            store.multi_set(  # type: ignore[attr-defined]  # not in torch's stub
                [f"seat/{token}/{seats[token]}" for token in tokens], [name] * self.world
            )
            seats.update(tokens)
            answers = [f"{name}/{key}" for key in joins[1:]]

            def changed(previous_tokens: list[str] = tokens) -> bool:
                return [
                    json.loads(message)[0] for message in store.multi_get(joins)
                ] != previous_tokens

            def settled(answers: list[str] = answers) -> bool:
                return not answers or store.check(answers) or changed()

            self._await(settled, end, answers)
            if answers and not store.check(answers):
                store.set(f"{name}/verdict", CALLED_OFF)
                continue
            launch, number = (
                store.compare_set("launch", "", own_token).decode(),
                store.add("attempts", 1),
            )
            restarted = number > 1 or any(join.restarts for join in members)
            verdict = json.dumps([launch, number, restarted, differing(members)])
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


def differing(joins: Sequence[Join]) -> str:
    """Names the ranks whose device is not that of most; empty where all have one kind.

    Of as many of each, those without a GPU: a node whose driver is broken computes on its CPU.
    """
    kinds = Counter(join.device for join in joins)
    usual = max(kinds, key=lambda kind: (kinds[kind], kind != "cpu"))
    odd = [(rank, join) for rank, join in enumerate(joins) if join.device != usual]
    words = [f"rank {rank} on {join.host} has {join.device}" for rank, join in odd[:NAMED]]
    words += [f"{len(odd) - NAMED} more ranks differ"] if len(odd) > NAMED else []
    usual_device = f"{kinds[usual]} of {len(joins)} ranks have {usual}"
    return f"ranks compute on different devices: {', '.join(words)}; {usual_device}" if odd else ""


def times_restarted(environ: Mapping[str, str] = os.environ) -> int:
    """Counts how often this rank's launcher has started ranks before: torch's elastic one on this
    node, or Slurm that has requeued the job."""
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
