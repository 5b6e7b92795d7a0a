"""Computes B models' layers in one call each: HFTA's table of operators (arXiv:2102.02344, 3).

An operator is torch's own module with other parameters and another forward: every parameter and
buffer is that of the models, stacked in a leading dimension of B, under torch's name. Activations
are as `array.py` says. What keeps rows apart and has no parameters (pooling, activations) needs no
fused form.

Shapes: B models, N samples, C channels, F features, V rows of a table.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.config.errors import wrong
from mtcli_fused.array import Array

CHANNELS_OF_A_BLOCK = 8  # of oneDNN's kernels
Convolve = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]  # x, weight, bias, groups
CONVOLUTIONS = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}


class FusedOperator(nn.Module):
    """The attributes that `fuse` sets on every operator."""

    array: Array
    batch_dim: int
    # plain attributes that models may have different values of, and these values [B]
    varied: tuple[str, ...] = ()
    values: dict[str, list[float]]


def linear(array: Array, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int = 0) -> Tensor:
    """y_b = x_b W_b^T + bias_b as one batched product: [..., F_i] to [..., F_o]."""
    rows = array.by_model(x, dim)
    if bias is None:
        y = torch.bmm(rows, weight.transpose(1, 2))
    else:
        y = torch.baddbmm(bias.unsqueeze(1), rows, weight.transpose(1, 2))
    return array.from_model(y, x, dim)


def affine(
    array: Array, x: Tensor, parameters: tuple[Tensor, Tensor | None], dim: int = 0
) -> Tensor:
    """x_b times weight_b plus bias_b, in the last dimensions."""
    weight, bias = (p if p is None else array.spread(p, x.dim(), dim) for p in parameters)
    x = array.split(x, dim)
    return (x * weight if bias is None else torch.addcmul(bias, x, weight)).flatten(dim, dim + 1)


class Linear(FusedOperator):
    """A batched product."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., out_features]."""
        return linear(self.array, x, self.weight, self.bias, self.batch_dim)


class Convolution(FusedOperator):
    """Conv1d, 2d and 3d: groups of B models' channels, or what is faster on the same numbers.

    On one core of an x86 with AVX-512, B = 8, forward and backward: a 1x1 convolution of 64
    channels takes 34.7 ms in groups and 9.3 as a product. Where channels are no multiple of 8,
    oneDNN's grouped kernels are slow but for channels last: a transposed one of 8 channels to 3,
    2.7 ms for 6.2, with both copies.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [rows, C, ...]."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x = F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        if self._is_pointwise():
            return self._batched_gemm(x)
        convolve = CONVOLUTIONS[x.dim() - 2, False]
        rest = (self.stride, padding, self.dilation)
        return in_groups(self, x, lambda x, w, b, groups: convolve(x, w, b, *rest, groups))

    def _is_pointwise(self) -> bool:
        ones = (*self.kernel_size, *self.stride, self.groups)
        return set(ones) == {1} and self.padding in ("same", "valid", (0,) * len(self.padding))

    def _batched_gemm(self, x: Tensor) -> Tensor:
        """W_b x_bn for every sample: weight [B, C_o, C_i] times [.., C_i, L]."""
        array = self.array
        weight = array.spread(self.weight.flatten(2), 3)
        y = torch.matmul(weight, array.split(x.flatten(2)))
        if self.bias is not None:
            y = y + array.spread(self.bias.unsqueeze(2), 3)
        return y.view(x.shape[0], -1, *x.shape[2:])


class TransposedConvolution(FusedOperator):
    """ConvTranspose1d, 2d and 3d, as `Convolution` but for products."""

    def forward(self, x: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Takes and returns [rows, C, ...]."""
        dims = x.dim() - 2
        sizes = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
        more = self._output_padding(x, output_size, *sizes)
        convolve = CONVOLUTIONS[dims, True]

        def call(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
            rest = (self.stride, self.padding, more, groups, self.dilation)
            return convolve(x, weight, bias, *rest)

        return in_groups(self, x, call)


def in_groups(conv: nn.Module, x: Tensor, call: Convolve) -> Tensor:
    """A convolution of all models, of B times as many groups."""
    array, weight, bias = conv.array, conv.weight, conv.bias
    x = array.channels(x)
    odd = any(c // conv.groups % CHANNELS_OF_A_BLOCK for c in (conv.in_channels, conv.out_channels))
    if odd and x.dim() == 4 and not x.is_cuda:
        x = x.contiguous(memory_format=torch.channels_last)
    bias = bias if bias is None else bias.flatten()
    y = call(x, weight.flatten(0, 1), bias, array.size * conv.groups)
    return array.from_channels(y.contiguous())


class BatchNorm(FusedOperator):
    """Batch norm over the samples of each model, with statistics [B, C]."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [rows, C, ...]."""
        self._check_input_dim(x)
        mean, var = self.running_mean, self.running_var
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        cumulative = self.training and mean is not None and self.momentum is None
        if cumulative:
            mean, var = torch.zeros_like(mean), torch.zeros_like(var)
        y = F.batch_norm(
            self.array.channels(x),
            *(p if p is None else p.view(-1) for p in (mean, var, self.weight, self.bias)),
            self.training or mean is None,
            1.0 if self.momentum is None else self.momentum,
            self.eps,
        )
        if cumulative:
            share = 1.0 / self.num_batches_tracked.to(mean.dtype).unsqueeze(1)
            self.running_mean.lerp_(mean, share)
            self.running_var.lerp_(var, share)
        return self.array.from_channels(y)


class LayerNorm(FusedOperator):
    """Layer norm of all rows, then weight and bias per model."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [..., *normalized_shape]."""
        y = F.layer_norm(x, self.normalized_shape, eps=self.eps)
        if self.weight is None:
            return y
        return affine(self.array, y, (self.weight, self.bias), self.batch_dim)


class RMSNorm(FusedOperator):
    """RMS norm of all rows, then weights per model."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [..., *normalized_shape]."""
        y = F.rms_norm(x, self.normalized_shape, eps=self.eps)
        if self.weight is None:
            return y
        return affine(self.array, y, (self.weight, None), self.batch_dim)


class GroupNorm(FusedOperator):
    """Group norm of B times as many groups."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [rows, C, ...]: B * num_groups groups of B * C channels."""
        parameters = (p if p is None else p.view(-1) for p in (self.weight, self.bias))
        groups = self.array.size * self.num_groups
        y = F.group_norm(self.array.channels(x), groups, *parameters, self.eps)
        return self.array.from_channels(y)


class PReLU(FusedOperator):
    """Slopes per model."""

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns [rows, C, ...], with slopes [B, 1] or [B, C]."""
        slopes = self.weight.expand(-1, x.shape[1]).flatten()
        return self.array.from_channels(F.prelu(self.array.channels(x), slopes))


class Embedding(FusedOperator):
    """A table of B * V rows; id i of model b is row b * V + i, its padding row too."""

    without_batch = False  # ids are positions, the same for every sample
    declared = True  # whether it is known that they are, or are not

    def forward(self, ids: Tensor) -> Tensor:
        """Returns [ids..., embedding_dim]; of positions [T] or [1, T], [rows, T, embedding_dim]."""
        array, dim = self.array, self.batch_dim
        if self.without_batch:
            ids = ids.squeeze(0) if ids.dim() > 1 else ids
            split = ids.expand(array.size, *ids.shape)
            first = self._first_rows(ids).view(-1, *[1] * ids.dim())
            return array.repeat(self._look_up(split, first))
        if ids.dim() == 1 and not self.declared:
            raise wrong(
                f"ids of shape {list(ids.shape)} may be positions, or a label of every sample",
                "fuse(..., positions=[names of embeddings of positions]); [] says that none are",
            )
        split = array.split(ids, dim)
        embedded = self._look_up(split, array.spread(self._first_rows(ids), ids.dim(), dim))
        return embedded.flatten(dim, dim + 1)

    def _first_rows(self, ids: Tensor) -> Tensor:
        return torch.arange(self.array.size, device=ids.device) * self.num_embeddings

    def _look_up(self, ids: Tensor, first: Tensor) -> Tensor:
        # an id beyond V would be a row of the next model: it becomes -1, which torch refuses
        legal = (ids >= 0) & (ids < self.num_embeddings)
        embedded = F.embedding(torch.where(legal, ids + first, -1), self.weight.flatten(0, 1))
        if self.padding_idx is None:
            return embedded
        return torch.where((ids == self.padding_idx).unsqueeze(-1), embedded.detach(), embedded)


class DropoutPerModel(FusedOperator):
    """Dropout with a rate for each model; `spans` are the dimensions that a mask has of its own."""

    varied = ("p",)

    def forward(self, x: Tensor) -> Tensor:
        """Takes and returns any shape."""
        if not self.training or len(set(self.values["p"])) == 1:
            return super().forward(x)
        own = x.dim() if isinstance(self, nn.Dropout) else 2
        mask = keep_mask(self.array, x, self.values["p"], (self.batch_dim, own))
        return x * mask


def keep_mask(array: Array, x: Tensor, rates: Sequence[float], dims: tuple[int, int]) -> Tensor:
    """Factors 0 or 1 / (1 - p_b); `dims`: the batch's, and how many masks do not broadcast over."""
    dim, own = dims
    keep = 1.0 - torch.tensor(rates, dtype=x.dtype, device=x.device)
    keep = array.spread(keep, x.dim(), dim)
    draws = torch.rand(*x.shape[:own], *[1] * (x.dim() - own), dtype=x.dtype, device=x.device)
    factors = torch.where(array.split(draws, dim) < keep, 1.0 / keep, 0.0)
    return factors.flatten(dim, dim + 1)
