"""Defines the costs of a step's parts in seconds, which the simulated schedule adds up."""

from dataclasses import dataclass

SHARP = 4  # of a norm: 1 would add two times, and infinity take the longer one


@dataclass(frozen=True)
class Pass:
    """Seconds of a forward pass and of its backward pass, without recomputation."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> "Pass":
        return Pass(self.forward * times, self.backward * times)

    def beside(self, other: "Pass") -> "Pass":
        """Each pass of two that wait for each other now and then: about the longer one."""
        pairs = (self.forward, other.forward), (self.backward, other.backward)
        return Pass(*(sum(x**SHARP for x in pair) ** (1 / SHARP) for pair in pairs))

    def beyond(self, hiding: "Pass") -> "Pass":
        """The seconds of each pass that exceed those of `hiding`, at least 0."""
        left = self.forward - hiding.forward, self.backward - hiding.backward
        return Pass(*(max(0.0, seconds) for seconds in left))


@dataclass(frozen=True)
class Costs:
    """Seconds of a step's parts on one rank; a `Pass` is of one block and one micro-batch."""

    block: Pass  # what a block takes on its rank, exposed communication included
    busy: Pass  # what it takes the device alone
    host: Pass  # what starting its work takes the host
    compute: Pass
    tensor: Pass
    context: Pass
    expert: Pass
    first: Pass  # the embedding, on stage 0
    last: Pass  # the head and the loss, on the last stage
    recomputed: float  # of `block.backward`, spent on recomputing the forward pass
    sharded: Pass = Pass()
    hop: float = 0.0
    gradients: float = 0.0
    gradients_exposed: float = 0.0
    optimizer: float = 0.0
    crowd: float = 1.0  # ranks on a core
    overhead: float = 0.0  # outside of the micro-batches: data, logging, the host's bookkeeping
