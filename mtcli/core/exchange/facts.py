"""Defines the facts that a sync method states of its exchanges, and the inputs they depend on."""

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
        """Elements of all parameters that the rank's optimizer updates."""
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
    """A kind of state per parameter besides the optimizer's, in the dtype of master weights."""

    kind: str
    differs: bool = False  # between replicas
    owners: int = 1  # replicas over which it is sharded


class Turns(NamedTuple):
    """The updates after which an exchange begins: `first`, first + every, and so on."""

    first: int
    every: int  # updates from one turn to the next

    def is_due(self, update: int) -> bool:
        """Whether an exchange begins after an update."""
        return (update - self.first) % self.every == 0

    def count(self, steps: int) -> int:
        """The number of exchanges that begin in `steps` steps."""
        return max(0, 1 + (steps - self.first) // self.every)


class ExchangeFacts:
    """The facts of a single replica, which exchanges nothing; the base of each method's.

    Bytes and arithmetic are means per step of the run, for one rank.
    """

    weights_differ = True
    """whether weights differ between replicas after a step"""
    on_graph = False
    """whether a replica exchanges with its neighbours in `sync.topology` alone"""
    kept: tuple[StateKind, ...] = ()
    """the kinds of state that a checkpoint has besides the optimizer's"""
    turns: tuple[Turns, ...] = ()
    """when exchanges are due, of methods whose replicas may run asynchronously in between"""

    def __init__(self, share: ReplicaShare) -> None:
        self.share = share

    def sent_bytes(self) -> float:
        """Bytes that a rank sends to other replicas, as the mean over replicas."""
        return 0.0

    def busiest_bytes(self, tree: bool) -> float:
        """Bytes that the replica which sends most sends: they set the time of the exchange.

        The root of a broadcast sends its tensor once in a ring (NCCL), and log2(n) times in a
        `tree` (gloo). Without broadcasts all replicas send equally much.
        """
        return self.sent_bytes()

    def arithmetic(self) -> Iterable[Arithmetic]:
        """Lists the arithmetic beyond the optimizer's update."""
        return ()

    def state_bytes(self) -> float:
        """Bytes of the exchange's state, without the optimizer's."""
        copies = sum(1 / state.owners for state in self.kept)
        return self.share.master * copies * self.share.elements

    def graph(self) -> dict[str, float]:
        """Figures of the replicas' graph, by name; empty where all replicas exchange with all."""
        return {}
