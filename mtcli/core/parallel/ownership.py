"""Who sums, keeps and answers for each parameter on this rank, by the arithmetic of spec/owning."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from mtcli.core.parallel.groups import Axis, Groups
from mtcli.core.spec import owning
from mtcli.core.spec.sharding import Parameter, Rectangle

TIED = "embedding.weight"  # on the first stage, and again on the last where the head is tied
HEAD = "head.weight"  # in the table where it is not


class Held(NamedTuple):
    """The memory that a rank keeps of a parameter: `tensor` is some of the stored rows."""

    tensor: Tensor
    rows: slice

    def blocks(self, described: Parameter, groups: Groups) -> Iterator[tuple[Rectangle, Tensor]]:
        """The rectangles of the global tensor that are here, and a view of each."""
        for rows, box in described.blocks(groups.layout, groups.rank, self.rows):
            yield box, self.tensor[rows].view(box.size)


def whole(stages: Mapping[int, nn.Module]) -> dict[str, Held]:
    """Every parameter of some stages by name, each with all rows."""
    return {
        name: Held(parameter.data, slice(0, len(parameter)))
        for stage in stages.values()
        for name, parameter in stage.named_parameters()
    }


@dataclass(frozen=True)
class Ownership:
    """What a rank has to do with each parameter; `shard` cuts ownership over data ranks."""

    groups: Groups
    table: Mapping[str, Parameter]
    sequence_parallel: bool
    shard: bool

    def trained(self, stage: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """The parameters of a stage that have a gradient, by name."""
        return [(n, p) for n, p in stage.named_parameters() if self.table[n].trained]

    def summed_over(self, name: str) -> tuple[str, ...]:
        """The axes over which this rank's gradient is a partial sum."""
        return self.table[name].gradient_axes(self.groups.layout, self.sequence_parallel)

    def owner_axes(self, name: str) -> tuple[str, ...]:
        """The axes over which the optimizer state of a parameter is cut."""
        layout, parallel = self.groups.layout, self.sequence_parallel
        return owning.owner_axes(self.table[name], layout, parallel) if self.shard else ()

    def owners(self, name: str) -> Axis:
        """The ranks that share a parameter's rows; this rank alone where they are not cut."""
        return self.groups.over(self.owner_axes(name))

    def rest(self, name: str) -> Axis:
        """The ranks over which owners have to sum what they keep."""
        left = set(self.summed_over(name)) - set(self.owner_axes(name))
        return self.groups.over(tuple(left))

    def rows(self, name: str) -> slice:
        """The stored rows that this rank owns; maybe none."""
        rows = self.table[name].stored_shape(self.groups.layout)[0]
        return owned_rows(rows, self.owners(name))

    def answers_for(self, name: str) -> bool:
        """Whether this rank counts and saves its share of a parameter's optimizer state."""
        where, cut = (self.groups.layout, self.groups.rank), self.owner_axes(name)
        mine = owning.answers_for(self.table[name], *where, cut)
        return mine and not self.is_second_copy(name)

    def is_second_copy(self, name: str) -> bool:
        """Whether this is the last stage's copy of a tied embedding."""
        return name == self.tied and self.groups.axes["ends"].rank > 0

    @property
    def tied(self) -> str | None:
        """The parameter that the first and the last stage both hold, if any."""
        return TIED if HEAD not in self.table else None


def owned_rows(rows: int, owners: Axis) -> slice:
    """Rows [first, last) of this rank among the owners."""
    return owning.owned_rows(rows, owners.rank, owners.size)
