"""Process groups by axis, created once at start-up from a ParallelLayout.

An `Axis` of size 1 has no process group and its collectives are the identity, so callers need not
check an axis's size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.transport.process_group import Transport, transport_between
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.runtime.health.watchdog import LATER
from mtcli.core.schedule.messages import channels

# Every set of axes along which something is exchanged. Those that hold the same ranks share a
# group, but for pipeline p2p, which has one per direction, and on NCCL one per sender and receiver;
# and for what replicas exchange, which may be under way while a step sums other things.
AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "tp_row": ("tp_row",),
    "tp_grid": ("tp", "tp_row"),
    "cp": ("cp",),
    "data": ("cp", "dp"),
    "samples": ("tp_row", "cp", "dp"),
    "tokens": ("tp", "tp_row", "cp", "dp"),
    "sequence": ("tp", "cp"),
    "micro_batch": ("tp", "tp_row", "cp"),
    "ep": ("ep",),
    "etp": ("etp",),
    "experts": ("etp", "ep"),
    "edp": ("edp",),
    "expert_copies": ("etp", "edp"),  # of what is replicated, or gathered to an owner
    "replica": ("tp", "tp_row", "cp", "dp", "pp"),
    "replicas": ("replica",),
    "pp_forward": ("pp",),
    "pp_backward": ("pp",),
}
P2P = ("pp_forward", "pp_backward")
OWN = (*P2P, "replicas")


class Axis(NamedTuple):
    """The ranks that this rank exchanges with along some axes, in grid order, itself included."""

    name: str
    ranks: tuple[int, ...]
    rank: int  # this rank's index in `ranks`
    group: dist.ProcessGroup | None  # None for a single rank
    recorder: FlightRecorder  # of this process
    transport: Transport | None = None  # of its collectives; None for a single rank
    # By sender and receiver, where messages from one rank to another have a group of their own.
    p2p: Mapping[tuple[int, int], dist.ProcessGroup] = MappingProxyType({})

    @property
    def connected(self) -> Transport:
        """The transport of an axis of several ranks; an axis of one rank has none."""
        assert self.transport is not None, f"{self.name} has a single rank"
        return self.transport

    def p2p_group(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        """The group on which rank `sender` of the axis sends to rank `receiver`."""
        return self.p2p.get((sender, receiver), self.group)

    @property
    def size(self) -> int:
        """The number of ranks along the axis."""
        return len(self.ranks)


@dataclass(frozen=True)
class Groups:
    """This rank's place in the layout, and its process groups by axis."""

    layout: ParallelLayout
    rank: int
    device: torch.device
    axes: dict[str, Axis]
    timeout: float = 600.0  # seconds that ranks wait for each other

    @property
    def tp(self) -> Axis:
        """Tensor parallel ranks: they have the same tokens, and different heads and columns."""
        return self.axes["tp"]

    @property
    def tp_row(self) -> Axis:
        """The rows of a grid of tp ranks: they have different sequences of a micro-batch. 1 without
        a grid."""
        return self.axes["tp_row"]

    @property
    def cp(self) -> Axis:
        """Context parallel ranks: they have different parts of the same sequences."""
        return self.axes["cp"]

    @property
    def world(self) -> Axis:
        """Every rank."""
        return self.axes["world"]

    @property
    def replica(self) -> Axis:
        """The ranks of this rank's replica of the model: all ranks, unless [sync] has several
        replicas."""
        return self.axes["replica"]

    @property
    def replicas(self) -> Axis:
        """The ranks that hold the same shards in other replicas of the model."""
        return self.axes["replicas"]

    @property
    def pp_rank(self) -> int:
        """This rank's place in the pipeline."""
        return self.layout.coordinates(self.rank)["pp"]

    @property
    def dp_rank(self) -> int:
        """The index of this rank's shard of each global batch, of `layout.batch_shards`."""
        at = self.layout.coordinates(self.rank)
        return at["dp"] + self.layout.dp * at["replica"]

    def over(self, axes: tuple[str, ...]) -> Axis:
        """The group along a set of axes; for no axes, this rank alone."""
        requested = set(axes)
        if not requested:
            return Axis("alone", (self.rank,), 0, None, self.world.recorder)
        present = {*self.layout.attention.axes, *self.layout.experts.axes}
        return next(
            self.axes[name] for name, names in AXES.items() if {*names} & present == requested
        )


def world_axis(rank: int, world: int, recorder: FlightRecorder) -> Axis:
    """All ranks, for exchanges of objects that precede the layout; it has no tensor transport."""
    group = dist.group.WORLD if world > 1 else None
    return Axis("world", tuple(range(world)), rank, group, recorder)


def make_groups(
    layout: ParallelLayout,
    rank: int,
    device: torch.device,
    timeout: float = 600.0,
    recorder: FlightRecorder | None = None,
) -> Groups:
    """The process groups of a rank, whose collectives are written to `recorder`.

    Collective: every rank calls it with the same layout.
    """
    recorder = recorder or FlightRecorder()
    world = world_axis(rank, layout.world, recorder)
    lists = {name: _groups(layout, names) for name, names in AXES.items()}
    lists["ends"] = _pipeline_ends(layout)
    with recorder.call("make_groups", world):
        axes = {"world": _connected(world, timeout + LATER)}
        axis_of_groups: dict[tuple[tuple[int, ...], ...], Axis] = {}
        # What all ranks agree on would wait behind weights that a GPU gathers ahead of a forward.
        if torch.device(device).type != "cuda":
            axis_of_groups[(world.ranks,)] = axes["world"]
        for name, groups in lists.items():
            same = tuple(tuple(ranks) for ranks in groups)
            axis = None if name in OWN else axis_of_groups.get(same)
            if axis is None:
                axis = _connected(_axis(name, groups, world, timeout), timeout + LATER)
                axis_of_groups.setdefault(same, axis)
            if name in P2P and axis.group and dist.get_backend(axis.group) == "nccl":
                axis = axis._replace(p2p=_p2p_groups(name, layout, rank, timeout))
                _warm_up(axis, device)
            axes[name] = axis._replace(name=name)
    return Groups(layout, rank, device, axes, timeout)


def consecutive(axis: Axis, size: int, name: str, timeout: float) -> Axis:
    """The `size` consecutive ranks of an axis to which this rank belongs.

    Collective: every rank of the axis calls it.
    """
    first = axis.rank // size * size
    ranks = axis.ranks[first : first + size]
    subaxis = axis._replace(name=name, ranks=ranks, rank=axis.rank - first)
    if size == 1:
        return subaxis._replace(group=None, transport=None)
    if size == axis.size:
        return subaxis
    limit = timedelta(seconds=timeout + LATER)
    group = dist.new_group(list(ranks), limit, use_local_synchronization=True, group_desc=name)
    return _connected(subaxis._replace(group=group), timeout + LATER)


def _groups(layout: ParallelLayout, axes: tuple[str, ...]) -> list[list[int]]:
    grid = layout.experts if {"etp", "ep", "edp"} & {*axes} else layout.attention
    return grid.groups(*axes)


def _axis(name: str, groups: list[list[int]], world: Axis, timeout: float) -> Axis:
    members: tuple[int, ...] = (world.rank,)
    handle, limit = None, timedelta(seconds=timeout + LATER)
    for ranks in groups:  # every rank takes part in making every group, in the same order
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks, timeout=limit, group_desc=name)
        if world.rank in ranks:
            members, handle = tuple(ranks), group
    return Axis(name, members, members.index(world.rank), handle, world.recorder)


def _p2p_groups(
    name: str, layout: ParallelLayout, rank: int, timeout: float
) -> dict[tuple[int, int], dist.ProcessGroup]:
    """A group for each (sender, receiver) of this rank's pipeline, by their pipeline ranks.

    An NCCL communicator runs sends and receives in one stream, in the order of the calls. If
    several pairs, or both directions of a pair, shared one, every rank could have a send at its
    head: interleaved stages would stall (`schedule.validate.stalls`).
    """
    groups, limit = {}, timedelta(seconds=timeout + LATER)
    for pipe in layout.attention.groups("pp"):
        for direction, *ends in channels(layout.pp, layout.vpp):
            if direction != name:
                continue
            ranks = [pipe[end] for end in ends]
            group = dist.new_group(sorted(ranks), timeout=limit, group_desc=name)
            if rank in ranks:
                groups[ends[0], ends[1]] = group
    return groups


def _warm_up(axis: Axis, device: torch.device) -> None:
    """Sends one element from each sender to its receiver.

    NCCL connects two ranks within their first message, for which both hosts wait. In the middle of
    a schedule another call of one host may come first and deadlock them; here all follow one order.
    """
    for (sender, receiver), group in sorted(axis.p2p.items()):
        x = torch.zeros(1, device=device)
        if axis.rank == sender:
            dist.send(x, axis.ranks[receiver], group=group)
        elif axis.rank == receiver:
            dist.recv(x, axis.ranks[sender], group=group)


def _connected(axis: Axis, timeout: float) -> Axis:
    if axis.group is None:
        return axis
    return axis._replace(transport=transport_between(axis.group, axis.ranks, axis.rank, timeout))


def _pipeline_ends(layout: ParallelLayout) -> list[list[int]]:
    """The first and last rank of each pipeline: they hold the two copies of a tied embedding."""
    return [[pipe[0], pipe[-1]] for pipe in layout.attention.groups("pp") if len(pipe) > 1]
