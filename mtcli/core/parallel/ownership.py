"""Tells which rows of each parameter this rank owns, and over which axes its gradient is summed."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp

from mtcli.core.mesh import sharding
from mtcli.core.mesh.sharding import Box, Parameter
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.groups import Axis, Groups


class OwnedShard(NamedTuple):
    """A rank's tensor of a parameter, or of state that is sharded as the parameter is.

    `tensor` has the stored rows `rows`, and may have padding columns at the end.
    """

    parameter: Parameter
    tensor: Tensor
    rows: slice

    def blocks(self, groups: Groups) -> Iterator[tuple[Box, Tensor]]:
        """The boxes of the global tensor that are in this shard, and a view of each."""
        for rows, box in self.parameter.row_boxes(groups.layout, groups.rank, self.rows):
            yield box, self.tensor[rows][..., : box.size[-1]].view(box.size)


def unsharded(
    stages: Mapping[int, nn.Module], table: Mapping[str, Parameter]
) -> dict[str, OwnedShard]:
    """The parameters of some stages by name, each with all of its rows."""
    return {
        name: OwnedShard(table[name], parameter.data, slice(0, len(parameter)))
        for stage in stages.values()
        for name, parameter in stage.named_parameters()
    }


@dataclass(frozen=True)
class Ownership:
    """Tells over which axes a parameter's gradient is summed and its optimizer state sharded."""

    groups: Groups
    table: Mapping[str, Parameter]
    sequence_parallel: bool
    shard: bool
    shards_frozen: bool = False  # whether weights that are not trained are sharded too: zero = 3

    def trained(self, stage: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """The parameters of a stage that have a gradient, by name."""
        return [(n, p) for n, p in stage.named_parameters() if self.table[n].trained]

    def summed_over(self, name: str) -> tuple[str, ...]:
        """The axes over which this rank's gradient is a partial sum."""
        return self.table[name].gradient_axes(self.groups.layout, self.sequence_parallel)

    def owner_axes(self, name: str) -> tuple[str, ...]:
        """The axes over which a parameter's optimizer state is sharded."""
        parameter, parallel = self.table[name], self.sequence_parallel
        if not (self.shards_frozen if parameter.frozen else self.shard):
            return ()
        return sharding.owner_axes(parameter, self.groups.layout, parallel)

    def owners(self, name: str) -> Axis:
        """The ranks that divide a parameter's rows; this rank alone where they are not sharded."""
        return self.groups.over(self.owner_axes(name))

    def rest(self, name: str) -> Axis:
        """The axes of the gradient's sum that remain after the reduce-scatter to owners."""
        left = set(self.summed_over(name)) - set(self.owner_axes(name))
        return self.groups.over(tuple(left))

    def rows(self, name: str) -> slice:
        """The stored rows that this rank owns; maybe none."""
        rows = self.table[name].stored_shape(self.groups.layout)[0]
        return owned_rows(rows, self.owners(name))

    def answers_for(self, name: str) -> bool:
        """Whether this rank is the one that counts and saves its shard of a parameter's optimizer
        state."""
        where = self.groups.layout, self.groups.rank, self.owner_axes(name)
        return self.table[name].is_primary(*where) and not self.is_second_copy(name)

    def is_second_copy(self, name: str) -> bool:
        """Whether this is the last stage's copy of a tied embedding."""
        return name == self.tied and self.groups.axes["ends"].rank > 0

    @property
    def tied(self) -> str | None:
        """The parameter of which the first and the last stage have a copy (a tied embedding), or
        None."""
        return next((name for name, parameter in self.table.items() if parameter.tied), None)


def owned_rows(rows: int, owners: Axis) -> slice:
    """The rows [first, last) that this rank owns among the owners."""
    return sharding.owned_rows(rows, owners.rank, owners.size)


class GlobalSums:
    """Sums per-parameter numbers of shards over all ranks of a replica.

    A replicated shard counts on the one rank that answers for it, as in the gradient norm; a tied
    embedding's second copy gets the sums of the first. It is one all-reduce, with a row for every
    trained parameter of the model.
    """

    def __init__(self, names: Iterable[str], ownership: Ownership) -> None:
        """Prepares for `names`, the parameters of which this rank has shards."""
        trained = (name for name, parameter in ownership.table.items() if parameter.trained)
        row_of, local = {name: row for row, name in enumerate(trained)}, list(names)
        self.replica, device = ownership.groups.replica, ownership.groups.device
        self.rows = torch.tensor([row_of[name] for name in local], dtype=torch.int64, device=device)
        counts = [[float(ownership.answers_for(name))] for name in local]
        self.counts = torch.tensor(counts, dtype=torch.float64, device=device).view(-1, 1)
        self.num_rows = len(row_of)

    def __call__(self, sums: Tensor) -> Tensor:
        """[len(names), k] of this rank's shards -> float64 sums of the whole parameters.
        Collective."""
        return self.of_model(sums)[self.rows]

    def of_model(self, sums: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """The sums of all trained parameters of the model, in the table's order: [parameters, k].

        `op` may be the maximum, of numbers that are not negative.
        """
        model_sums = self.counts.new_zeros(self.num_rows, sums.shape[1])
        model_sums[self.rows] = sums.to(self.counts) * self.counts
        return all_reduce(model_sums, self.replica, op)
