"""The base class of replica exchanges, which make a step's update: the methods of [sync].

A Strategy reduces gradients inside a replica; a ReplicaExchange then updates the weights. With
method = "all_reduce" there is one replica and nothing is exchanged; each other method is a subclass
in a file of its own. The ranks with the same shards in different replicas exchange them along the
axis `replicas`. All methods are collective: every rank makes the same calls.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mtcli.core.exchange.facts import ExchangeFacts
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.matrix_exchange import MatrixUpdate
from mtcli.core.sync.strategy import Strategy


class ReplicaExchange:
    """The update of a run with one replica; the base of those with several."""

    def __init__(self, inside: Strategy, optimizer: Optimizer, facts: ExchangeFacts) -> None:
        self.inside, self.optimizer, self.facts = inside, optimizer, facts
        self.kept = {state.kind: state for state in facts.kept}
        self.weights_differ = self.replicas.size > 1 and facts.weights_differ
        """whether weights and optimizer state differ between replicas"""

    @property
    def replicas(self) -> Axis:
        """The ranks that hold the same shards in other replicas."""
        return self.inside.ownership.groups.replicas

    @property
    def measured_axis(self) -> Axis:
        """The replicas axis under a name that the traffic counter of the method leaves out."""
        return self.replicas._replace(name="replicas_measured")

    def before_step(self, lr: float) -> None:
        """Starts a step ahead of its first forward; `lr` is that of its update."""

    def after_backward(self) -> None:
        """Exchanges gradients, where the method does, once this replica's are reduced."""

    def note_loss(self, loss: float) -> None:
        """Notes this replica's mean loss of a step, before its update."""

    def update(self, lr: float, factor: float) -> None:
        """Updates the weights by the gradients times `factor`, which clips them."""
        self.optimize(lr, factor)
        self.after_step()
        self.inside.after_update()

    @property
    def updates_ahead(self) -> bool:
        """Whether `update_ahead` makes the update of a step."""
        return type(self) is ReplicaExchange and self.optimizer.reads_factor

    def update_ahead(self, lr: float, factor: Tensor) -> None:
        """Updates by a factor that the host has not read, so that a GPU has work while the host
        reads loss and norm. Changes no weight or moment where the factor is NaN."""
        self.optimizer.step(self.inside.gradients, lr, factor)
        self.inside.after_update()

    def optimize(self, lr: float, factor: float) -> None:
        """Updates the rows that this rank owns."""
        self.optimizer.step(self.inside.gradients, lr, self._factor_left(factor))

    def start(self, lr: float, factor: float) -> list[MatrixUpdate]:
        """Updates as `optimize` but for matrices that are to be orthogonalised, whose updates it
        returns."""
        return self.optimizer.start(self.inside.gradients, lr, self._factor_left(factor))

    def _factor_left(self, factor: float) -> float:
        """Multiplies the gradients by the factor, unless the optimizer does; returns what is left
        to multiply by."""
        if factor == 1.0 or self.optimizer.multiplies(self.inside.gradients):
            return factor
        self.inside.scale_gradients_(factor)
        return 1.0

    def after_step(self) -> None:
        """Exchanges master weights, once this replica's optimizer has updated them."""

    def meet(self, steps: int) -> None:
        """Makes the exchanges due at a mean of `steps` steps per asynchronous replica."""

    def state(self) -> dict[str, Tensor]:
        """State for a checkpoint: owned rows of tensors, named `<kind>/<parameter>`."""
        pairs = ((kind, self.tensors(kind)) for kind in self.kept)
        return {f"{kind}/{name}": x for kind, tensors in pairs for name, x in tensors.items()}

    def tensors(self, kind: str) -> Mapping[str, Tensor]:
        """The owned rows of one kind of the exchange's state, by parameter."""
        raise NotImplementedError(kind)

    def differs(self, kind: str) -> bool:
        """Whether a kind of state, the optimizer's or the exchange's, differs between replicas."""
        if kind in self.kept:
            return self.replicas.size > 1 and self.kept[kind].differs
        return self.weights_differ

    def rows_here(self, kind: str, name: str) -> slice | None:
        """This replica's rows of state sharded over replicas; None for replicated state."""
        return None

    def counters(self) -> dict[str, Any]:
        """The JSON part of a checkpoint's state; the same on every rank."""
        return {}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        """Restores `counters`, once weights and state are restored."""

    def begin(self) -> None:
        """Initialises the exchange's state from the weights, where there is none to resume."""

    def rejoin(self, counters: Mapping[str, Any]) -> str:
        """Resumes a checkpoint of another number of replicas, whose weights and state were
        averaged.

        Returns what the run starts from, in words for the user, if not from that average.
        """
        self.begin()
        self.load_counters({})
        return ""

    def buffers(self) -> list[Tensor]:
        """The tensors of the exchange's state and buffers, without the optimizer's."""
        return list(self.state().values())
