"""Defines the costs that every sync method plans, and what it knows of a rank for that."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mtcli.core.config.schema import OptimizerName
from mtcli.core.config.sync import SyncConfig
from mtcli.core.plan.exchange.arithmetic import Arithmetic


class ReplicaShare(NamedTuple):
    """A rank's share of an exchange among `replicas`, over a run of `steps`."""

    sync: SyncConfig
    steps: int
    replicas: int
    sizes: Mapping[str, int]  # elements of each parameter that its optimizer updates
    weight: int  # bytes of an element
    master: int  # the same of master weights, or of weights without
    optimizer: OptimizerName = "sgd"
    num_moments: int = 1
    overlaps: bool = False  # neighbours exchange while the step is computed

    @property
    def elements(self) -> int:
        """Elements of all parameters that its optimizer updates."""
        return sum(self.sizes.values())

    @property
    def both_ways(self) -> float:
        """Bytes that a rank sends for each byte of a ring's all-reduce: 2 (n-1)/n."""
        return 2 * (self.replicas - 1) / self.replicas


class ExchangeCosts:
    """A method's costs for a rank: means per step of the run, and memory; here a single replica's,
    which are none."""

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
        return 0.0
