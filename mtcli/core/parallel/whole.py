"""Sums over whole parameters, of which each rank holds some parts."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.ownership import Ownership


class WholeSums:
    """Adds up what ranks have summed over their parts of each parameter.

    A part that several ranks hold counts on the one that answers for it, as it does in the gradient
    norm, so a tied embedding's second copy gets the sums of the first. One all-reduce of the world
    does, of a row for every trained parameter of the model.
    """

    def __init__(self, names: Iterable[str], ownership: Ownership) -> None:
        """`names` are the parameters that this rank has parts of."""
        trained = (name for name, parameter in ownership.table.items() if parameter.trained)
        row_of, here = {name: row for row, name in enumerate(trained)}, list(names)
        self.world, device = ownership.groups.world, ownership.groups.device
        self.rows = torch.tensor([row_of[name] for name in here], dtype=torch.int64, device=device)
        counts = [[float(ownership.answers_for(name))] for name in here]
        self.counts = torch.tensor(counts, dtype=torch.float64, device=device).view(-1, 1)
        self.num_rows = len(row_of)

    def __call__(self, sums: Tensor) -> Tensor:
        """[this rank's names, k] of its parts -> float64 of the whole parameters. Collective."""
        every = self.counts.new_zeros(self.num_rows, sums.shape[1])
        every[self.rows] = sums.to(self.counts) * self.counts
        return all_reduce(every, self.world)[self.rows]
