"""Averages a vector over replicas in two phases: chunks go to servers, which send back the means.

Replica k is the server of chunk k: it receives chunk k from all replicas and sends them the mean.
Values are rounded to 16 bits, or compressed to signs with error feedback in both phases
(arXiv:2102.02888, section 4; arXiv:2104.06069, figure 1). A vector concatenates the owned rows of a
rank's tensors. Chunks begin at rows, so that a checkpoint can store a server's error on any layout;
they may differ in size, or be empty.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from mtcli.core.parallel.collectives import all_gather, all_gather_v, all_reduce, all_to_all_v
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.ownership import GlobalSums, Ownership
from mtcli.core.sync.flat import unflatten
from mtcli.kernels.onebit import add_, pack_, square_sum, unpack


class Chunks:
    """Divides a vector of tensors [rows, ...] into a chunk per replica, its server."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], replicas: Axis) -> None:
        self.shapes, self.replicas = dict(shapes), replicas
        self.sizes = [prod(shape) for shape in self.shapes.values()]
        total = sum(self.sizes)
        ends = [self._row_near(total * k / replicas.size) for k in range(replicas.size)]
        self.lengths = [b - a for a, b in zip(ends, [*ends[1:], total], strict=True)]
        self.owned = slice(ends[replicas.rank], ends[replicas.rank] + self.lengths[replicas.rank])

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.shapes, unflatten(vector, self.shapes.values()), strict=True))

    def own_rows(self) -> dict[str, slice]:
        """The rows of each tensor that are in this rank's chunk; maybe none."""
        rows, first = {}, 0
        for (name, shape), size in zip(self.shapes.items(), self.sizes, strict=True):
            row = max(1, prod(shape[1:]))
            rows[name] = slice(
                *(
                    min(max(at - first, 0), size) // row
                    for at in (self.owned.start, self.owned.stop)
                )
            )
            first += size
        return rows

    def mean_(self, vector: Tensor, sent: torch.dtype) -> None:
        """Overwrites a vector by the replicas' mean of its elements rounded to dtype `sent`.

        Where `sent` is the vector's dtype this is an all-reduce; a narrower one takes two phases.
        """
        if sent == vector.dtype:
            all_reduce(vector, self.replicas).div_(self.replicas.size)
            return
        chunks = list(vector.split(self.lengths))
        received = to_servers([chunk.to(sent) for chunk in chunks], self.replicas)
        mean = received[0].to(vector.dtype)
        for chunk in received[1:]:
            mean = mean + chunk
        mean = (mean / self.replicas.size).to(sent)
        vector.copy_(all_gather_v(mean, self.lengths, self.replicas))

    def _row_near(self, element: float) -> int:
        """The first element of the row that begins nearest to `element`."""
        first = 0
        for shape, size in zip(self.shapes.values(), self.sizes, strict=True):
            row = max(1, prod(shape[1:]))
            if element < first + size:
                return first + round((element - first) / row) * row
            first += size
        return first


def to_servers(chunks: Sequence[Tensor], replicas: Axis) -> list[Tensor]:
    """All-to-all: chunks by server -> this server's chunk of every replica, by replica."""
    sizes = [len(chunk) for chunk in chunks]
    length = sizes[replicas.rank]
    received = all_to_all_v(torch.cat(list(chunks)), sizes, [length] * replicas.size, replicas)
    return list(received.view(replicas.size, length).unbind())


class CompressedMean:
    """The replicas' mean of tensors, sent as signs with error feedback.

    Signs have one magnitude per replica in the first phase, and one for all servers in the second:
    the root mean square over the live elements of the whole model. So the values do not depend on a
    replica's layout, and replicated shards stay equal.
    """

    def __init__(
        self, like: Mapping[str, Tensor], ownership: Ownership, keeps_errors: bool = True
    ) -> None:
        """Allocates zero errors in the shapes and dtype of `like`, this rank's tensors."""
        groups = ownership.groups
        self.chunks = Chunks({name: x.shape for name, x in like.items()}, groups.replicas)
        self.global_sums, self.keeps_errors = GlobalSums(like, ownership), keeps_errors
        dtype = next((x.dtype for x in like.values()), torch.float32)
        vector = torch.zeros(sum(self.chunks.sizes), dtype=dtype, device=groups.device)
        self.error, self.server_error = vector, torch.zeros_like(vector[self.chunks.owned])
        self.errors, self.rows = self.chunks.views(self.error), self.chunks.own_rows()
        shapes = [(rows.stop - rows.start, *like[n].shape[1:]) for n, rows in self.rows.items()]
        errors = unflatten(self.server_error, shapes)
        self.server_errors = dict(zip(self.rows, errors, strict=True))

    def reset(self) -> None:
        """Zeroes the errors."""
        self.error.zero_()
        self.server_error.zero_()

    def __call__(
        self, values: Iterable[tuple[str, Tensor]], live: Mapping[str, Tensor], count: float
    ) -> dict[str, Tensor]:
        """The mean of each tensor, in the order of `like`. Collective.

        `live` masks the elements of tensors where some are always 0: their error and mean are 0.
        `count` is the number of live elements of the whole model.
        """
        chunks, replicas = self.chunks, self.chunks.replicas
        squares = [add_(x.reshape(-1), self.errors[name].view(-1)) for name, x in values]
        scale = (self._total(squares) / count).sqrt().to(self.error)
        sent = [pack_(chunk, scale) for chunk in self.error.split(chunks.lengths)]
        self._after_packing(self.error, {name: (self.errors[name], live[name]) for name in live})

        scales = all_gather(scale.view(1), replicas)
        for bits, peer_scale in zip(to_servers(sent, replicas), scales, strict=True):
            self.server_error += unpack(bits, peer_scale / replicas.size, len(self.server_error))
        holes = {name: (self.server_errors[name], live[name][self.rows[name]]) for name in live}
        for error, mask in holes.values():
            error.mul_(mask)
        squares = [square_sum(error.view(-1)) for error in self.server_errors.values()]
        total = all_reduce(self._total(squares).view(1), replicas)
        scale = (total / count).sqrt().to(self.error).view(())
        packed = pack_(self.server_error, scale)
        self._after_packing(self.server_error, holes)

        sizes = [-(-length // 8) for length in chunks.lengths]
        received = all_gather_v(packed, sizes, replicas).split(sizes)
        pairs = zip(received, chunks.lengths, strict=True)
        means = chunks.views(torch.cat([unpack(bits, scale, length) for bits, length in pairs]))
        for name, mask in live.items():
            means[name].mul_(mask)
        return means

    def _total(self, squares: Sequence[Tensor]) -> Tensor:
        """The sum of per-tensor squares over this replica's ranks, each shard once: a scalar."""
        local_squares = torch.stack(list(squares)) if squares else self.error.new_zeros(0)
        return self.global_sums.of_model(local_squares.view(-1, 1)).sum()

    def _after_packing(self, error: Tensor, holes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        if not self.keeps_errors:
            error.zero_()
        for part, mask in holes.values():
            part.mul_(mask)
