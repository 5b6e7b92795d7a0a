"""A tree of small process groups: values go up to rank 0, merged on the way, and down to all.

Ranks that are consecutive form groups of at most FAN_OUT, the first of each group again, and so on.
A gloo group connects every two of its ranks: a rank of 16,384 keeps at most 2 * (FAN_OUT - 1) + 3
sockets, where one group of all would open 16,383 and pass the usual limit of open files.
"""

import json
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from mtcli.core.parallel.groups import Axis

FAN_OUT = 64  # ranks of a group
FASTEST = 1  # of zlib's levels

Merge = Callable[[list[Any]], Any]


class Ranks(Protocol):
    """Some ranks that exchange what JSON can say."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        ...

    def merge(self, value: Any, merged: Merge) -> Any:
        """The values of all ranks on rank 0, None elsewhere; `merged` makes one of several that
        follow each other, on any rank and of its own results too."""
        ...

    def tell(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        ...


class Tree(NamedTuple):
    """This rank's groups, from the leaves up: it is the first of all but the last of them."""

    rank: int
    levels: tuple[Axis, ...]

    def merge(self, value: Any, merged: Merge) -> Any:
        """See `Ranks`: each rank receives from at most FAN_OUT - 1 others at a level."""
        for axis in self.levels:
            with axis.recorder.call("gather_values", axis):
                if axis.rank:
                    _send(value, axis, 0)
                    return None
                value = merged([value, *(_receive(axis, n) for n in range(1, axis.size))])
        return value

    def tell(self, value: Any) -> Any:
        """See `Ranks`."""
        for axis in reversed(self.levels):
            with axis.recorder.call("broadcast", axis):
                if axis.rank:
                    value = _receive(axis, 0)
                else:
                    for n in range(1, axis.size):
                        _send(value, axis, n)
        return value


ALONE = Tree(0, ())


def make_tree(world: Axis, fan_out: int = FAN_OUT) -> Tree:
    """The tree of all ranks, through gloo groups that nothing else uses. Every rank calls it.

    gloo's own timeout would end what only takes long; the watchdog ends what hangs.
    """
    levels, ranks, step = list[Axis](), world.ranks, 1
    while len(ranks) > 1 and world.rank % step == 0:
        first = world.rank // step // fan_out * fan_out
        own = ranks[first : first + fan_out]
        if len(own) > 1:
            made = dist.new_group(
                list(own),
                timeout=timedelta(days=7),
                backend="gloo",
                use_local_synchronization=True,
            )
            name = world.name + f".{len(levels)}" * bool(levels)
            place = own.index(world.rank)
            axis = world._replace(name=name, ranks=own, rank=place, group=made, transport=None)
            levels.append(axis)
        ranks, step = ranks[::fan_out], step * fan_out
    return Tree(world.rank, tuple(levels))


def _send(value: Any, axis: Axis, to: int) -> None:
    data = bytearray(zlib.compress(json.dumps(value).encode(), FASTEST))
    dist.send(torch.tensor([len(data)]), group=axis.group, group_dst=to)
    dist.send(torch.frombuffer(data, dtype=torch.uint8), group=axis.group, group_dst=to)


def _receive(axis: Axis, source: int) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, group=axis.group, group_src=source)
    data = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(data, group=axis.group, group_src=source)
    return json.loads(zlib.decompress(data.numpy()))
