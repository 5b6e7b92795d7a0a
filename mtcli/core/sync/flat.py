"""Flat tensors: several tensors one after the other in one, which replicas exchange at once."""

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of tensors in one vector, in their order."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unflatten(vector: Tensor, shapes: Iterable[Sequence[int]]) -> list[Tensor]:
    """The tensors of these shapes that lie in a vector one after the other: views."""
    sizes = [tuple(shape) for shape in shapes]
    parts = vector.split([prod(size) for size in sizes])
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]
