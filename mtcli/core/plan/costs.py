"""Seconds of a step's parts, whichever way they were found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """Seconds of a forward pass and of its backward pass, nothing computed again."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> "Pass":
        return Pass(self.forward * times, self.backward * times)


@dataclass(frozen=True)
class Costs:
    """Seconds of a step's parts on one rank; a `Pass` is of one block and one micro-batch."""

    block: Pass  # what a block takes on its rank, exposed communication included
    compute: Pass
    tensor: Pass
    context: Pass
    expert: Pass
    first: Pass  # the embedding, on stage 0
    last: Pass  # the head and the loss, on the last stage
    recomputed: float  # of `block.backward`, spent on computing the forward pass again
    sharded: Pass = Pass()
    hop: float = 0.0
    gradients: float = 0.0
    gradients_exposed: float = 0.0
    optimizer: float = 0.0
    crowd: float = 1.0  # ranks on a core
    overhead: float = 0.0  # outside of the micro-batches: data, logging, the host's bookkeeping

    def crowded(self, crowd: float) -> "Costs":
        """The same where so many ranks share what one had to itself: all take so much longer."""
        longer = {name: value * crowd for name, value in vars(self).items()}
        return Costs(**longer | {"crowd": crowd})
