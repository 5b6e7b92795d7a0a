"""Runs B models as one module: what goes in and out has the models first, [B, N, ...]."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mtcli.core.config.errors import wrong
from mtcli_fused.array import Array


@dataclass(frozen=True)
class Shared:
    """Marks an argument that has no batch dimension and is the same for all models: a mask."""

    value: object


class FusedModels(nn.Module):
    """B models as one: takes [B, N, ...] and returns [B, N, ...], model by model.

    Every tensor among the arguments, in whatever structure, has the B models first, then the shape
    that one model takes: `x.expand(B, *x.shape)` is one batch for all. Others are in `Shared`.
    """

    def __init__(self, model: nn.Module, array: Array, batch_dim: int) -> None:
        super().__init__()
        self.model, self.array, self.batch_dim = model, array, batch_dim
        self.names = list(inspect.signature(model.forward).parameters)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the models return, with B first. Raises MtcliError for other shapes."""
        names = self.names + [""] * len(args)  # of *args there are more than names
        dims = [self._dim(name) for name, _ in zip(names, args, strict=False)]
        more = {name: (x, self._dim(name)) for name, x in kwargs.items()}
        self.array.samples = self._samples([*zip(args, dims, strict=True), *more.values()])
        y = self.model(
            *(self._fold(x, dim) for x, dim in zip(args, dims, strict=True)),
            **{name: self._fold(*pair) for name, pair in more.items()},
        )
        if isinstance(self.model, nn.MultiheadAttention):
            return self._unfold(y[0], self.batch_dim), self._unfold(y[1], 0)
        return self._unfold(y, self.batch_dim)

    def named_slots(self) -> Iterator[tuple[str, nn.Parameter, int | None]]:
        """Names, parameters, and the model of each, None where it is stacked [B, ...]."""
        seen = set()
        for path, module in self.named_modules():
            for name, parameter in module.named_parameters(path, recurse=False):
                if parameter not in seen:
                    seen.add(parameter)
                    yield name, parameter, self._owner(path)

    def _owner(self, path: str) -> int | None:
        """The model that the module at a path belongs to, where it was left unfused."""
        parts = path.split(".")
        for i in range(1, len(parts)):
            if isinstance(self.get_submodule(".".join(parts[:i])), KeptModules):
                return int(parts[i + 1]) if len(parts) > i + 1 else None
        return None

    def _dim(self, name: str) -> int:
        return 0 if name.endswith("key_padding_mask") else self.batch_dim  # torch's convention

    def _samples(self, arguments: Iterable[tuple[Any, int]]) -> int:
        """N, on which all arguments agree."""
        sizes = {}
        for value, dim in arguments:
            for x in tree_leaves(value):
                if not isinstance(x, Tensor) or not x.dim():
                    continue
                if x.dim() < dim + 2 or len(x) != self.array.size:
                    batch = ", ".join([str(self.array.size), *["T"] * dim, "N", "..."])
                    raise wrong(
                        f"an argument of shape {list(x.shape)} is not [{batch}], as for "
                        f"{self.array.size} models",
                        "stack the models' arguments; wrap what has no batch in fused.Shared",
                    )
                sizes[x.shape[dim + 1]] = x
        if len(sizes) != 1:
            shapes = ", ".join(str(list(x.shape)) for x in sizes.values()) or "none of them tensors"
            raise wrong(f"arguments of different numbers of samples: {shapes}")
        return next(iter(sizes))

    def _fold(self, value: Any, dim: int) -> Any:
        def one(x: Any) -> Any:
            if isinstance(x, Shared):
                return x.value
            return self.array.fold(x, dim) if isinstance(x, Tensor) and x.dim() else x

        return tree_map(one, value)

    def _unfold(self, value: Any, dim: int) -> Any:
        return tree_map(lambda y: self.array.unfold(y, dim) if isinstance(y, Tensor) else y, value)


class KeptModules(nn.Module):
    """A block that is left as B modules, one after another on their models' samples."""

    def __init__(self, models: Sequence[nn.Module], array: Array, batch_dim: int) -> None:
        super().__init__()
        self.models, self.array, self.batch_dim = nn.ModuleList(models), array, batch_dim

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Takes and returns folded activations; tensors without a batch go to every model."""
        rows, dim = self.array.size * self.array.samples, self.batch_dim

        def of(b: int) -> Callable[[Any], Any]:
            def one(x: Any) -> Any:
                batched = isinstance(x, Tensor) and x.dim() > dim and x.shape[dim] == rows
                return self.array.unfold(x, dim)[b] if batched else x

            return one

        outputs = [
            model(*tree_map(of(b), args), **tree_map(of(b), kwargs))
            for b, model in enumerate(self.models)
        ]
        return tree_map(
            lambda *ys: (
                self.array.fold(torch.stack(ys), dim) if isinstance(ys[0], Tensor) else ys[0]
            ),
            *outputs,
        )


class OwnParameters(nn.Module):
    """A user's module with parameters of its own, [1, ...] in a model: it sees one per sample."""

    def __getattr__(self, name: str) -> Any:
        """The value of that name, of parameters and unequal buffers one for each sample."""
        value = super().__getattr__(name)
        if name in self.__dict__["_stacked"]:
            return self.__dict__["_array"].repeat(value.squeeze(1))
        return value
