"""Defines the sync section: what data-parallel replicas exchange, and when.

A replica is a copy of the model that trains on its own part of each global batch. With `all_reduce`
all data ranks form one replica. Any other method has several.
"""

from typing import Annotated, Literal

from pydantic import Field

from mtcli.core.config.fields import Fraction, Positive, Real, Section, Whole, divisors

Method = Literal[
    "all_reduce",
    "onebit",
    "decentlam",
    "dsgd",
    "dmsgd",
    "awc_dmsgd",
    "da_dmsgd",
    "lsgd",
    "easgd",
    "local",
    "diloco",
]
Topology = Literal[
    "ring",
    "symmetric_exponential",
    "grid",
    "star",
    "full",
    "one_peer_exponential",
    "hierarchical",
]
DECENTRALIZED: tuple[Method, ...] = ("decentlam", "dsgd", "dmsgd", "awc_dmsgd", "da_dmsgd")
# Of more than 2 replicas, where one sends to another than it takes from: W is not symmetric.
ONE_SIDED: tuple[Topology, ...] = ("one_peer_exponential",)
LEADERS: tuple[Method, ...] = ("lsgd", "easgd")
PERIODIC: tuple[Method, ...] = ("local", "diloco")
Pull = Annotated[Real, Field(ge=0.0, le=1.0)]


def mixing_rule(method: Method, momentum: float) -> Method:
    """Returns the effective method: without momentum dmsgd, da_dmsgd and decentlam are dsgd."""
    return method if momentum or method not in ("dmsgd", "da_dmsgd", "decentlam") else "dsgd"


class SyncConfig(Section):
    """What data-parallel replicas exchange, and when."""

    method: Method = "all_reduce"
    """all_reduce sums gradients; the others keep a model per replica, or compress what is sent"""
    replicas: Whole = 0
    """copies of the model; 0: as many as possible. The data ranks of one sum gradients"""
    warmup_steps: Whole = 0
    """onebit: steps with uncompressed gradients, after which the variance is frozen; 0: a fifth"""
    topology: Topology = "ring"
    """decentralized: which replicas exchange with which"""
    machine_size: Whole = 0
    """hierarchical: replicas of a machine, which average first; 0: about the square root"""
    group_size: Whole = 0
    """lsgd: workers of a group, with a leader; 0: about the square root, all of a prime"""
    period: Whole = 0
    """steps between exchanges; 0: 4 with lsgd and easgd, 32 with local and diloco"""
    global_period: Whole = 0
    """lsgd: steps between pulls to the leader of all groups; 0: 4 * period"""
    pull: Pull = 0.1
    """lsgd, easgd: how far a worker moves to its group's leader, or to the centre"""
    global_pull: Pull = 0.1
    """lsgd: how far a worker moves to the leader of all groups"""
    asynchronous: bool = False
    """lsgd, easgd: faster workers make more steps between two exchanges"""
    outer_lr: Annotated[Real, Field(ge=0.0, le=100.0)] = 0.7
    """diloco: learning rate of the outer SGD"""
    outer_momentum: Fraction = 0.9
    """diloco: momentum of the outer SGD"""
    outer_nesterov: bool = True
    """diloco: Nesterov's momentum"""
    fragments: Positive = 1
    """local, diloco: parts of the model that are exchanged in turn, one every period / fragments"""
    overlap_steps: Whole = 0
    """local, diloco: steps of training during which an exchange is under way"""
    quantise: Literal[0, 2, 4, 8] = 0
    """local, diloco: bits of an exchanged value, with error feedback; 0: float32"""
    top_k: Annotated[Real, Field(ge=0.0, le=1.0)] = 0.0
    """local, diloco: share of the largest values that is exchanged, with error feedback; 0: all"""
    error_decay: Pull = 0.95
    """local, diloco: factor on the error that is fed back"""

    def warmup(self, steps: int) -> int:
        """Returns the updates with uncompressed gradients (onebit) in a run of some steps: at least
        1."""
        return self.warmup_steps or max(1, steps // 5)

    @property
    def steps_between(self) -> int:
        """The steps from one exchange to the next."""
        return self.period or (4 if self.method in LEADERS else 32)

    @property
    def steps_between_global(self) -> int:
        """The steps from one pull to the leader of all groups to the next."""
        return self.global_period or 4 * self.steps_between

    @property
    def compressed(self) -> bool:
        """True where an exchange sends less than all values in full, and feeds the error back."""
        return bool(self.quantise or self.top_k)

    @property
    def outer_rule(self) -> tuple[float, float]:
        """The outer SGD's learning rate and momentum.

        local averages; with top_k the error that is fed back replaces the momentum (SparseLoCo,
        arXiv:2508.15706, section 3).
        """
        if self.method == "local":
            return 1.0, 0.0
        return self.outer_lr, 0.0 if self.top_k else self.outer_momentum

    def workers_of_group(self, replicas: int) -> int:
        """Returns the workers of each group of lsgd: the given number, or the divisor of `replicas`
        nearest its square root. A group of 1 would pull no worker, so a prime number of replicas is
        one group."""
        sizes = [size for size in divisors(replicas) if size > 1] or [1]
        return self.group_size or min(sizes, key=lambda size: abs(size - replicas**0.5))

    def groups(self, replicas: int) -> str:
        """Words the groups of lsgd's workers; empty for other methods."""
        if self.method != "lsgd":
            return ""
        size = self.workers_of_group(replicas)
        number = replicas // size
        return f"{number} group{'s' * (number > 1)} x {size} worker{'s' * (size > 1)}"

    def num_replicas(self, most: int) -> int:
        """Returns the copies of the model that may differ, where the ranks can hold `most`."""
        if self.method == "all_reduce":
            return 1
        return self.replicas or most
