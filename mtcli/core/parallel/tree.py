"""A tree of small process groups: merges values up to rank 0, and broadcasts down to all ranks.

Consecutive ranks form groups of at most FAN_OUT; the first ranks of the groups form groups again,
and so on up to one. A gloo group connects every two of its ranks: a rank of 16,384 has at most 2 *
(FAN_OUT - 1) + 3 sockets, where one group of all ranks would open 16,383 and pass the usual limit
of open files.
"""

import json
import secrets
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from pydantic_core import from_json
from torch.distributed.distributed_c10d import _get_default_store

from mtcli.core.parallel.collectives import first_value
from mtcli.core.parallel.groups import Axis

FAN_OUT = 64  # ranks of a group
FASTEST = 1  # of zlib's levels

Merge = Callable[[list[Any]], Any]


class Ranks(Protocol):
    """Ranks that exchange JSON values."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    def merge(self, value: Any, merged: Merge) -> Any:
        """Returns the merged values of all ranks on rank 0, None elsewhere. `merged` combines
        values of consecutive ranks, on any rank, and its own results too."""

    def tell(self, value: Any) -> Any:
        """Returns rank 0's value on every rank."""


class Level(NamedTuple):
    """One of this rank's groups; the group's first rank belongs to the next level too."""

    axis: Axis
    group: dist.ProcessGroupGloo

    def send(self, value: Any, to: int) -> None:
        """Sends a value to a rank of the group."""
        data = bytearray(zlib.compress(json.dumps(value).encode(), FASTEST))
        self.group.send([torch.tensor([len(data)])], to, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub
        self.group.send([torch.frombuffer(data, dtype=torch.uint8)], to, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub

    def receive(self, source: int) -> Any:
        """Receives the next value sent by a rank of the group."""
        length = torch.empty(1, dtype=torch.int64)
        self.group.recv([length], source, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub
        data = torch.empty(int(length), dtype=torch.uint8)
        self.group.recv([data], source, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub
        return from_json(zlib.decompress(data.numpy().data))


class Tree(NamedTuple):
    """This rank's groups, from the leaves to the root."""

    rank: int
    levels: tuple[Level, ...]

    def merge(self, value: Any, merged: Merge) -> Any:
        """See `Ranks`. A rank receives from at most FAN_OUT - 1 others at each level."""
        for level in self.levels:
            axis = level.axis
            with axis.recorder.call("gather_values", axis):
                if axis.rank:
                    level.send(value, 0)
                    return None
                value = merged([value, *map(level.receive, range(1, axis.size))])
        return value

    def tell(self, value: Any) -> Any:
        """See `Ranks`."""
        for level in reversed(self.levels):
            axis = level.axis
            with axis.recorder.call("broadcast", axis):
                if axis.rank:
                    value = level.receive(0)
                for n in range(1, axis.size) if axis.rank == 0 else ():
                    level.send(value, n)
        return value


ALONE = Tree(0, ())


def make_tree(world: Axis, fan_out: int = FAN_OUT) -> Tree:
    """The tree of all ranks, on gloo groups of its own. Collective.

    The groups have no timeout, which would end slow exchanges too; the watchdog ends hung ones.
    torch's `new_group` would have every rank create every group.
    """
    name = first_value(secrets.token_hex(8) if world.rank == 0 else None, world)
    levels, ranks, step, named = list[Level](), world.ranks, 1, world.name
    while len(ranks) > 1 and world.rank % step == 0:
        first = world.rank // step // fan_out * fan_out
        members = ranks[first : first + fan_out]
        if len(members) > 1:
            rank = members.index(world.rank)
            store = dist.PrefixStore(f"{name}/{step}/{first}", _get_default_store())
            group = dist.ProcessGroupGloo(store, rank, len(members), timeout=timedelta(days=7))
            axis = world._replace(name=named, ranks=members, rank=rank, group=None)
            axis = axis._replace(transport=None)  # its messages are the level's
            levels.append(Level(axis, group))
        ranks, step = ranks[::fan_out], step * fan_out
        named = f"{world.name}.{step}"
    return Tree(world.rank, tuple(levels))
