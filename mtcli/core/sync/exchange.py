"""Defines what replicas of the model exchange, and when: the methods of [sync].

A replica reduces its own gradients by a Strategy, whatever its layout inside. A ReplicaExchange
then makes the step's update. With method = "all_reduce" there is one replica and nothing is
exchanged; every other method is a subclass in a file of its own. Ranks that hold the same shards
in different replicas exchange them along the axis `replicas`; every rank makes the same calls.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtcli.core.exchange.facts import ExchangeFacts
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.groups import Axis
from mtcli.core.sync.strategy import Strategy


class ReplicaExchange:
    """The update of a run with one replica; the base of those with several."""

    def __init__(self, inside: Strategy, optimizer: Optimizer, facts: ExchangeFacts) -> None:
        self.inside, self.optimizer, self.facts = inside, optimizer, facts
        self.kept = {state.kind: state for state in facts.kept}
        self.weights_differ = self.replicas.size > 1 and facts.weights_differ
        """whether replicas have other weights, and other optimizer state, than each other"""

    @property
    def replicas(self) -> Axis:
        """The ranks that hold the same shards in other replicas."""
        return self.inside.ownership.groups.replicas

    @property
    def measured_axis(self) -> Axis:
        """The replicas axis under another name, so that measuring does not count as the method's
        traffic."""
        return self.replicas._replace(name="replicas_measured")

    def before_step(self, lr: float) -> None:
        """Starts a step, before its first forward, whose update is to be at a learning rate."""

    def after_backward(self) -> None:
        """Exchanges gradients, where the method does, once this replica's are reduced."""

    def note_loss(self, loss: float) -> None:
        """Notes this replica's mean loss of a step, before its update."""

    def update(self, lr: float, factor: float) -> None:
        """Updates the weights by this replica's gradients times a factor, which clips them."""
        self.optimize(lr, factor)
        self.after_step()
        self.inside.after_update()

    def optimize(self, lr: float, factor: float) -> None:
        """Updates the rows that this rank owns."""
        if factor != 1.0 and not self.optimizer.by_kernels:
            self.inside.scale_gradients_(factor)
            factor = 1.0
        self.optimizer.step(self.inside.gradients, lr, factor)

    def after_step(self) -> None:
        """Exchanges master weights, once this replica's optimizer has updated them."""

    def meet(self, steps: int) -> None:
        """Exchanges what is due when asynchronous replicas have made so many steps on average."""

    def state(self) -> dict[str, Tensor]:
        """State for a checkpoint: owned rows of tensors, named `<kind>/<parameter>`."""
        pairs = ((kind, self.tensors(kind)) for kind in self.kept)
        return {f"{kind}/{name}": x for kind, tensors in pairs for name, x in tensors.items()}

    def tensors(self, kind: str) -> Mapping[str, Tensor]:
        """The owned rows of a kind of state that the method's facts name, by parameter."""
        raise NotImplementedError(kind)

    def differs(self, kind: str) -> bool:
        """Whether replicas have other state of a kind, the optimizer's or the exchange's."""
        if kind in self.kept:
            return self.replicas.size > 1 and self.kept[kind].differs
        return self.weights_differ

    def rows_here(self, kind: str, name: str) -> slice | None:
        """The stored rows of a kind of state that replicas share out; None where each has all."""
        return None

    def counters(self) -> dict[str, Any]:
        """State for a checkpoint that is no tensor, as JSON; the same on every rank."""
        return {}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Restores `counters`, once weights and state are restored."""

    def begin(self) -> None:
        """Starts from the weights, which are those of a seed, of another model, or of the average
        of another number of replicas."""

    def rejoin(self, counters: Mapping[str, Any]) -> str:
        """Starts from a checkpoint with another number of replicas, whose weights and state have
        been averaged, and whose counters are given; returns what the run starts from, in words for
        the user, where that is not this average."""
        self.begin()
        self.load_counters({})
        return ""

    def buffers(self) -> list[Tensor]:
        """Lists the memory that the exchange takes besides the optimizer's."""
        return list(self.state().values())
