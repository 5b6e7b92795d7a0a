"""Ops, the units of pipeline work, and schedules, which order them on each pipeline rank.

A schedule is data with three readers: plan simulates it, training runs it and profile draws it. It
has no sends and receives: they follow where an op needs the result of another rank's op.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

OpKind = Literal["F", "B", "I", "W"]


class Op(NamedTuple):
    """The forward F or backward B of one micro-batch through one stage.

    A split backward is I, the gradient of the stage's input, for which the previous stage waits,
    and W, the gradient of its weights (arXiv:2401.10241, section 2).
    """

    kind: OpKind
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}.{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """The ops of each pipeline rank in the order it runs them, and the rank of each stage."""

    ops: tuple[tuple[Op, ...], ...]
    rank_of_stage: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ops)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks: pp * vpp."""
        return len(self.rank_of_stage)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that pass through every stage."""
        return sum(op.kind == "F" and op.stage == 0 for op in self.ops[self.rank_of_stage[0]])


# The ops that an op reads, of the same micro-batch, as (kind, distance in stages).
READS: dict[OpKind, tuple[tuple[OpKind, int], ...]] = {
    "F": (("F", -1),),
    "B": (("F", 0), ("B", 1)),
    "I": (("F", 0), ("I", 1)),
    "W": (("I", 0),),
}


def needs(op: Op, num_stages: int) -> tuple[Op, ...]:
    """The ops whose results `op` reads.

    F reads the F of the previous stage. B and I read their own F, and the gradient from the next
    stage's op of the same kind: a schedule splits every backward or none. W reads its own I.
    """
    return tuple(
        Op(kind, op.micro_batch, op.stage + step)
        for kind, step in READS[op.kind]
        if 0 <= op.stage + step < num_stages
    )
