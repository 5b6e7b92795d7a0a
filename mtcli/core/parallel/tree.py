"""A tree of small process groups: values go up to rank 0, merged on the way, and down to all.

Ranks that are consecutive form groups of at most FAN_OUT, the first of each group again, and so on.
A gloo group connects every two of its ranks: a rank of 16,384 keeps at most 2 * (FAN_OUT - 1) + 3
sockets, where one group of all would open 16,383 and pass the usual limit of open files.
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
    """Some ranks that exchange what JSON can say."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    def merge(self, value: Any, merged: Merge) -> Any:
        """The values of all ranks on rank 0, None elsewhere; `merged` makes one of several that
        follow each other, on any rank and of its own results too."""

    def tell(self, value: Any) -> Any:
        """Rank 0's value on every rank."""


class Level(NamedTuple):
    """A group of this rank, of which the first belongs to the next level too."""

    axis: Axis
    group: dist.ProcessGroupGloo

    def send(self, value: Any, to: int) -> None:
        """Sends a value to a rank of the group."""
        data = bytearray(zlib.compress(json.dumps(value).encode(), FASTEST))
        self.group.send([torch.tensor([len(data)])], to, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub
        self.group.send([torch.frombuffer(data, dtype=torch.uint8)], to, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub

    def receive(self, source: int) -> Any:
        """The next value that a rank of the group has sent."""
        length = torch.empty(1, dtype=torch.int64)
        self.group.recv([length], source, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub
        data = torch.empty(int(length), dtype=torch.uint8)
        self.group.recv([data], source, 0).wait()  # type: ignore[attr-defined]  # not in torch's stub
        return from_json(zlib.decompress(data.numpy().data))


class Tree(NamedTuple):
    """This rank's groups, from the leaves up."""

    rank: int
    levels: tuple[Level, ...]

    def merge(self, value: Any, merged: Merge) -> Any:
        """See `Ranks`: a rank receives from at most FAN_OUT - 1 others at each level."""
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
    """The tree of all ranks, through gloo groups that nothing else uses. Collective.

    gloo's own timeout would end what only takes long; the watchdog ends what hangs. torch's
    `new_group` would have every rank make every group.
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
