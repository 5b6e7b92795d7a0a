"""Says how the models of an array share a batch dimension, and reshapes to what operators need.

Inside a fused model every activation has the shape that a single model gives it, but for a batch
dimension of B * N rows: the N samples of each of B models. So user code that was written for any
batch size runs unchanged. Two orders of these rows make no copies, each for other operators:

    models outermost    row b * N + n: [B, N, ...] is a view, for batched products
    samples outermost   row n * B + b: [N, B * C, ...] is a view, for grouped convolutions

Shapes: B models, N samples of each, C channels or features of one model; `dim` is the batch
dimension of an activation, 0 or 1.
"""

from torch import Tensor

from mtcli.core.config.errors import wrong


class Array:
    """The number of models, the order of rows, and the samples of each model in this forward."""

    def __init__(self, size: int, samples_outermost: bool) -> None:
        self.size, self.samples_outermost = size, samples_outermost
        self.samples = 0  # N, which every call of the fused model sets

    def fold(self, x: Tensor, dim: int = 0) -> Tensor:
        """Merges models into the batch: [B, N, ...] to [B * N, ...], or where `dim` says."""
        return x.movedim(0, dim + self.samples_outermost).flatten(dim, dim + 1)

    def unfold(self, x: Tensor, dim: int = 0) -> Tensor:
        """The inverse of `fold`, a view: [B, N, ...]."""
        return self.split(x, dim).movedim(dim + self.samples_outermost, 0)

    def split(self, x: Tensor, dim: int = 0) -> Tensor:
        """Splits the batch in two dimensions, in the order of rows. Raises on other numbers."""
        rows = x.shape[dim] if x.dim() > dim else 0
        if rows != self.size * self.samples:
            raise wrong(
                f"an activation of shape {list(x.shape)} has {rows} rows in dimension {dim}, not "
                f"{self.size} models * {self.samples} samples",
                "keep that dimension the batch, or name the module that changes it in keep=",
            )
        both = (self.size, self.samples)
        return x.unflatten(dim, both[::-1] if self.samples_outermost else both)

    def spread(self, values: Tensor, dims: int, dim: int = 0) -> Tensor:
        """Views [B, tail...] so that it broadcasts against `split(x, dim)` of x with `dims`."""
        tail = values.shape[1:]
        shape = [1] * (dims + 1 - len(tail)) + list(tail)
        shape[dim + self.samples_outermost] = self.size
        return values.reshape(shape)

    def repeat(self, values: Tensor) -> Tensor:
        """Gives every sample its model's values: [B, ...] to [B * N, ...]."""
        return self.fold(values.unsqueeze(1).expand(-1, self.samples, *values.shape[1:]))

    def by_model(self, x: Tensor, dim: int = 0) -> Tensor:
        """All rows of each model, in whatever dimensions: [..., C] to [B, rows, C]."""
        if dim == 0 and not self.samples_outermost:
            return self.split(x).flatten(1, -2)
        return self.unfold(x, dim).flatten(1, -2)

    def from_model(self, y: Tensor, like: Tensor, dim: int = 0) -> Tensor:
        """The inverse of `by_model` for x `like`, of other features."""
        if dim == 0 and not self.samples_outermost:
            return y.view(*like.shape[:-1], y.shape[-1])
        return self.fold(y.unflatten(1, self.unfold(like, dim).shape[1:-1]), dim)

    def channels(self, x: Tensor) -> Tensor:
        """Models side by side in the channels: [B * N, C, ...] to [N, B * C, ...]."""
        if self.samples_outermost:
            return self.split(x).flatten(1, 2)
        return self.split(x).transpose(0, 1).flatten(1, 2)

    def from_channels(self, y: Tensor) -> Tensor:
        """The inverse of `channels`, of other channels."""
        y = y.unflatten(1, (self.size, -1))
        return (y if self.samples_outermost else y.transpose(0, 1)).flatten(0, 1)
