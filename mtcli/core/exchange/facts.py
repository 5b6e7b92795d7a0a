"""Defines what a sync method states of its exchanges, and what it knows of a rank for that."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.config.sync import SyncConfig
from mtcli.core.exchange.arithmetic import Arithmetic


class ReplicaShare(NamedTuple):
    """A rank's share of an exchange among `replicas`, over a run of `steps`."""

    sync: SyncConfig
    steps: int
    replicas: int
    sizes: Mapping[str, int]  # elements of each parameter that its optimizer updates
    weight: int  # bytes of an element
    optimizer: OptimizerConfig = OptimizerConfig(name="sgd", momentum=0.9)
    overlaps: bool = False  # neighbours exchange while the step is computed

    @property
    def elements(self) -> int:
        """Elements of all parameters that its optimizer updates."""
        return sum(self.sizes.values())

    @property
    def master(self) -> int:
        """Bytes of an element of master weights: float32, or as wide as wider weights."""
        return max(4, self.weight)

    @property
    def both_ways(self) -> float:
        """Bytes that a rank sends for each byte of a ring's all-reduce: 2 (n-1)/n."""
        return 2 * (self.replicas - 1) / self.replicas


class StateKind(NamedTuple):
    """A kind of state of every parameter besides the optimizer's, as wide as master weights."""

    kind: str
    differs: bool = False  # between replicas
    owners: int = 1  # replicas that each keep a part of it


class Turns(NamedTuple):
    """The updates after which an exchange begins."""

    first: int
    every: int  # updates from one turn to the next

    def is_due(self, update: int) -> bool:
        """Whether an exchange begins after an update."""
        return (update - self.first) % self.every == 0

    def count(self, steps: int) -> int:
        """The exchanges that begin in so many steps."""
        return max(0, 1 + (steps - self.first) // self.every)


class ExchangeFacts:
    """States the exchange of a single replica, which is none; a method is a subclass.

    Bytes and arithmetic are a rank's means per step of the run.
    """

    weights_differ = True
    """whether replicas have other weights than each other after a step"""
    kept: tuple[StateKind, ...] = ()
    """the state of a checkpoint"""
    turns: tuple[Turns, ...] = ()
    """when replicas meet that need no other between exchanges"""

    def __init__(self, share: ReplicaShare) -> None:
        self.share = share

    def sent_bytes(self) -> float:
        """Bytes that it sends to other replicas, as the mean over them."""
        return 0.0

    def busiest_bytes(self, tree: bool) -> float:
        """Bytes that leave the replica that sends most: a step takes as long as those.

        The source of a broadcast sends all of it: to the next rank of a ring (NCCL), or, as the
        root of a `tree`, to log2 of them (gloo). Where there is none, all replicas send as much.
        """
        return self.sent_bytes()

    def arithmetic(self) -> Iterable[Arithmetic]:
        """Lists the arithmetic beyond the optimizer's update."""
        return ()

    def state_bytes(self) -> float:
        """Bytes that it keeps besides the optimizer's state."""
        copies = sum(1 / state.owners for state in self.kept)
        return self.share.master * copies * self.share.elements

    def graph(self) -> dict[str, float]:
        """Figures of the graph of replicas, by name; empty where all exchange with all."""
        return {}
