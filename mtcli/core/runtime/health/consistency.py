"""The consistency check: ahead of each collective, ranks compare the calls that they make.

Every rank publishes a fingerprint under the collective's number and reads its peers'. A receiver of
a message reads its sender's; the sender does not wait. Calls that differ are an error before they
hang or give wrong numbers, and so are two ranks that wait for each other in different calls.
"""

import json
import sys
import time
from typing import NamedTuple, NoReturn

import torch.distributed as dist
from torch import Tensor

from mtcli.core.config.errors import failed
from mtcli.core.runtime.health.flight_recorder import Call, caller

HINT = "the ranks of an axis must make the same calls in the same order; later ones follow from it"
Splits = tuple[list[int], list[int]]  # rows sent to, and received from, each rank


class Fingerprint(NamedTuple):
    """A rank's call; the `splits` of two ranks need not be equal but must match."""

    op: str
    shape: list[int]  # without the rows, where `splits` has them
    dtype: str
    detail: str
    location: str
    splits: Splits | None

    def __str__(self) -> str:
        words = [self.op]
        if self.dtype:
            words.append(f"of {self.shape} {self.dtype}")
        if self.detail:
            words.append(f"({self.detail})")
        if self.splits:
            words.append(f"that sends {self.splits[0]} and receives {self.splits[1]} rows")
        return " ".join([*words, f"at {self.location}"])


class ConsistencyGuard:
    """Compares this rank's calls with its peers' through a separate store."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store, self.rank = store, rank

    def compare(self, call: Call, x: Tensor | None, detail: object) -> None:
        """Returns once all peers have published the same call; for a send at once.

        Raises MtcliError with both calls where they differ.
        """
        mine = _fingerprint(call, x, detail)
        if call.op != "recv":
            self.store.set(_key(call, self.rank), json.dumps(mine))
        if call.op == "send":
            return
        needed = [rank for rank in call.peers() if rank != self.rank]
        said = [call.channel, call.number, needed, mine]
        self.store.set(f"now/{self.rank}", json.dumps(said))
        for rank in needed:
            self._await(call, mine, rank)
        # Peers that published this number have read all fingerprints of the last one.
        if call.op == "recv":
            self.store.delete_key(_key(call, needed[0]))
        elif call.number > 1:
            self.store.delete_key(_key(call, self.rank, call.number - 1))

    def _await(self, call: Call, mine: Fingerprint, rank: int) -> None:
        """Compares with one rank, once it has published. The watchdog ends endless waits."""
        key = _key(call, rank)
        while not self.store.check([key]):
            if other := self._waits_for_me(call, rank):
                both = (
                    f"rank {self.rank} in {_numbered(call.channel, call.number)}, {mine}",
                    other,
                )
                self._fail(call, f"rank {self.rank} and rank {rank} wait for each other", both)
            time.sleep(0.001)
        theirs = Fingerprint(*json.loads(self.store.get(key)))
        if not _agree(call, mine, theirs, rank):
            both = (f"rank {self.rank} calls {mine}", f"rank {rank} calls {theirs}")
            where = _numbered(call.channel, call.number)
            self._fail(call, f"rank {self.rank} and rank {rank} differ at {where}", both)

    def _waits_for_me(self, call: Call, rank: int) -> str:
        """The call in which `rank` waits for this rank, if it does; else empty."""
        if not self.store.check([f"now/{rank}"]):
            return ""
        channel, number, needed, theirs = json.loads(self.store.get(f"now/{rank}"))
        come = call.recorder.counts.get(channel, 0) >= number
        if come or self.rank not in needed or self.store.check([_key(call, rank)]):
            return ""
        return f"rank {rank} in {_numbered(channel, number)}, {Fingerprint(*theirs)}"

    def _fail(self, call: Call, what: str, both: tuple[str, str]) -> NoReturn:
        step = f" (step {call.recorder.step})" if call.recorder.step else ""
        raise failed(f"{what}{step}: {both[0]}; {both[1]}", HINT)


def _fingerprint(call: Call, x: Tensor | None, detail: object) -> Fingerprint:
    shape = [] if x is None else list(x.shape)
    dtype = "" if x is None else str(x.dtype).removeprefix("torch.")
    location = caller(sys._getframe())
    if isinstance(detail, tuple):
        return Fingerprint(call.op, shape[1:], dtype, "", location, detail)
    words = "" if detail is None else str(detail).removeprefix("RedOpType.")
    return Fingerprint(call.op, shape, dtype, words, location, None)


def _agree(call: Call, mine: Fingerprint, theirs: Fingerprint, rank: int) -> bool:
    if call.op == "recv":
        return mine[1:4] == theirs[1:4]
    if mine[:5] != theirs[:5]:
        return False
    if mine.splits is None or theirs.splits is None:
        return True
    me, other = call.axis.rank, call.axis.ranks.index(rank)
    return (
        mine.splits[0][other] == theirs.splits[1][me]
        and mine.splits[1][other] == theirs.splits[0][me]
    )


def _key(call: Call, rank: int, number: int | None = None) -> str:
    """The store's key of one rank's fingerprint. Groups of one axis are disjoint, so a rank
    identifies its group."""
    return f"{call.channel}/{call.axis.ranks[0]}/{number or call.number}/{rank}"


def _numbered(channel: str, number: int) -> str:
    axis, _, pair = channel.partition(" ")
    return f"number {number} on {axis}" + (f" from {pair.replace('>', ' to ')}" if pair else "")
