"""Attempts: restarts of a run's ranks by its launcher, and how the ranks of one attempt meet.

A launcher on several nodes keeps one store over restarts, and counts restarts per node. A node that
joins later counts from 0, and one whose ranks were only stopped does not count. So no such count
identifies an attempt. Rank 0 instead agrees on a new name with ranks that answer:

1. Each rank joins with a random token. Tokens of dead ranks may still be in the store.
2. Rank 0 assigns the attempt's name to every token.
3. Each rank looks up its own token, and answers under the name that it finds.
4. Once all have answered, rank 0 confirms. If one does not answer and another token joins for it,
   the first was a dead rank's: rank 0 discards the name and assigns a new one.

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
    """The attempt of a launch that this process belongs to."""

    launch: str  # random, as long as the launcher's store lives
    job: str  # the launcher's name for the run: torchrun's rendezvous id, or Slurm's job id
    number: int  # of attempts in that store, from 1
    restarted: bool  # whether ranks were started before this attempt

    def record(self) -> dict[str, str]:
        """The facts of the attempt that a run folder records."""
        return {"launch": self.launch, "job": self.job}

    def continues(self, record: Mapping[str, Any]) -> bool:
        """Whether an earlier attempt of this launch wrote a run folder's record.

        Without a common store (its node was replaced, or there is none) the job's name decides.
        """
        if not self.restarted:
            return False
        name = "launch" if self.number > 1 else "job"
        return record.get(name) == self.record()[name]


class Join(NamedTuple):
    """The record that a rank publishes when it joins."""

    token: str  # random
    restarts: int
    device: str  # its kind
    host: str


class Meeting(NamedTuple):
    """One rank's side of agreeing on an attempt. `device` is the kind that it computes on."""

    store: "dist.Store"
    rank: int
    world: int
    timeout: float
    device: str

    def agree(self, environ: Mapping[str, str] = os.environ) -> tuple[str, Attempt]:
        """(a prefix for keys of this attempt alone, the attempt), equal on every rank.

        Raises MtcliError where ranks are missing after `timeout` seconds, and on every rank where
        devices are of several kinds.
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
        """Has rank 0, which may host the store, leave once the others have read the verdict."""
        if self.rank:
            self.store.set(f"{name}/told/{self.rank}", "")
            return
        keys = [f"{name}/{key}" for key in self._keys("told")[1:]]
        with suppress(MtcliError):
            self._await(lambda: self.store.check(keys), time.monotonic() + PARTING, keys)

    def _convene(self, mine: str, end: float) -> tuple[str, str]:
        store, seats, joins = self.store, Counter[str](), self._keys("join")
        self._await(lambda: store.check(joins), end, joins)
        while True:
            members = [Join(*json.loads(message)) for message in store.multi_get(joins)]
            tokens = [join.token for join in members]
            if tokens[0] != mine:
                raise failed("another process has joined as rank 0", "end the one that was left")
            name = secrets.token_hex(8)
            store.multi_set(  # type: ignore[attr-defined]  # not in torch's stub
                [f"seat/{token}/{seats[token]}" for token in tokens], [name] * self.world
            )
            seats.update(tokens)
            answers = [f"{name}/{key}" for key in joins[1:]]

            def changed(previous: list[str] = tokens) -> bool:
                return [json.loads(message)[0] for message in store.multi_get(joins)] != previous

            def settled(answers: list[str] = answers) -> bool:
                return not answers or store.check(answers) or changed()

            self._await(settled, end, answers)
            if answers and not store.check(answers):
                store.set(f"{name}/verdict", CALLED_OFF)
                continue
            launch = store.compare_set("launch", "", mine).decode()
            number = store.add("attempts", 1)
            restarted = number > 1 or any(join.restarts for join in members)
            verdict = json.dumps([launch, number, restarted, differing(members)])
            store.set(f"{name}/verdict", verdict)
            return name, verdict

    def _follow(self, token: str, end: float) -> tuple[str, str]:
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
        """Waits until the condition holds. Raises MtcliError with the ranks whose key in `signs` is
        missing, or for rank 0, if it has not answered all."""
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
    """Names the ranks whose device differs from most ranks'; empty where all have one kind.

    Of equally many, names those without a GPU: a node with a broken driver computes on its CPU.
    """
    kinds = Counter(join.device for join in joins)
    usual = max(kinds, key=lambda kind: (kinds[kind], kind != "cpu"))
    odd = [(rank, join) for rank, join in enumerate(joins) if join.device != usual]
    words = [f"rank {rank} on {join.host} has {join.device}" for rank, join in odd[:NAMED]]
    words += [f"{len(odd) - NAMED} more ranks differ"] if len(odd) > NAMED else []
    usual_device = f"{kinds[usual]} of {len(joins)} ranks have {usual}"
    return f"ranks compute on different devices: {', '.join(words)}; {usual_device}" if odd else ""


def times_restarted(environ: Mapping[str, str] = os.environ) -> int:
    """Counts this rank's earlier starts by its launcher: torch's elastic agent on this node, or
    Slurm that requeued the job."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return sum(int(environ.get(name) or 0) for name in names)


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """The launcher's name for the run, stable over restarts; empty where it has none."""
    return environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID") or ""


def keeps_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher hosts a store that outlives restarts."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def alone(environ: Mapping[str, str] = os.environ) -> Attempt:
    """The attempt of a single rank whose launcher keeps no store."""
    return Attempt("", job_name(environ), 1, times_restarted(environ) > 0)
