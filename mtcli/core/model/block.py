"""A transformer block: attention, then a dense MLP or a mixture of experts, around a residual
stream. Where norms are is a class of block.

T tokens of a micro-batch, D hidden; x_TD is [T/tp, D] under sequence parallelism.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtcli.core.config.model import ModelConfig
from mtcli.core.model.attention import Attention
from mtcli.core.model.dropout import Dropout
from mtcli.core.model.inputs import Inputs
from mtcli.core.model.latent_attention import LatentAttention
from mtcli.core.model.mlp import GatedMlp, Mlp
from mtcli.core.model.moe import MixtureOfExperts
from mtcli.core.parallel.factory import LayerFactory

NormMaker = Callable[[str, ModelConfig], nn.Module]


class Residual(NamedTuple):
    """The residual stream, and the output of a branch with its bias, which the next norm adds.

    A sum of its own would read and write the stream once more in each direction.
    """

    x_TD: Tensor
    y_TD: Tensor | None = None
    y_bias: Tensor | None = None

    def total(self) -> Tensor:
        """x + y + y_bias; None is zero."""
        if self.y_TD is None:
            return self.x_TD
        return self.x_TD + (self.y_TD if self.y_bias is None else self.y_TD + self.y_bias)


class Block(nn.Module):
    """Attention, MLP and their dropouts, with the norms that a subclass chooses."""

    no_norm: NormMaker = nn.Identity  # ahead of attention, where a layer has none

    def __init__(
        self, layer: int, model: ModelConfig, build: LayerFactory, seed: int, recompute: str
    ) -> None:
        super().__init__()
        name = f"blocks.{layer}"
        mlp: type[Mlp | GatedMlp | MixtureOfExperts] = GatedMlp if model.is_gated else Mlp
        if model.has_experts(layer):
            mlp = MixtureOfExperts
        attention_norm, mlp_norm = self.norm_makers(model, build)
        if not model.has_attention_norm(layer):
            attention_norm = self.no_norm
        self.attention_norm = attention_norm(f"{name}.attention_norm", model)
        attention = LatentAttention if model.mla else Attention
        self.attention = attention(layer, model, build, seed)
        self.mlp_norm = mlp_norm(f"{name}.mlp_norm", model)
        self.mlp = mlp(f"{name}.mlp", model, build)
        self.attention_dropout = Dropout(build.dropout(f"{name}.attention", model.dropout, seed))
        self.mlp_dropout = Dropout(build.dropout(f"{name}.mlp", model.dropout, seed))
        self.recompute, self.residual_scale = recompute, model.residual_scale
        # whether the next norm adds a branch's bias, and whether that may be the next block's
        self.leaves_bias = model.residual_scale == 1.0 and not self.mlp_dropout.active
        self.frees_weights = build.frees_weights

    @abstractmethod
    def norm_makers(self, model: ModelConfig, build: LayerFactory) -> tuple[NormMaker, NormMaker]:
        """Returns what makes the norms ahead of attention and of the MLP."""

    @abstractmethod
    def _run(self, residual: Residual, inputs: Inputs, numbers_T: Tensor | None) -> Residual: ...

    def forward(self, residual: Residual, inputs: Inputs, numbers_T: Tensor | None) -> Residual:
        """The residual stream ahead of the block -> after it; with recompute = "full" it saves only
        its input for backward."""
        if self.recompute == "full" and torch.is_grad_enabled():
            return Residual(_recomputed(self._total, residual.total(), inputs, numbers_T))
        return self._run(residual, inputs, numbers_T)

    def _total(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        return self._run(Residual(x_TD), inputs, numbers_T).total()

    def _attention(self, x_TD: Tensor, inputs: Inputs, with_bias: bool = True) -> Tensor:
        """Attention; with recompute = "selective" its backward recomputes scores and
        probabilities."""
        if self.recompute == "selective" and torch.is_grad_enabled():
            qkv = self.attention.project(x_TD, inputs)
            mixed = _recomputed(self.attention.mix, qkv, inputs)
            return cast(Tensor, self.attention.out(mixed, with_bias, inputs.numbers))
        return cast(Tensor, self.attention(x_TD, inputs, with_bias))

    def _scaled(self, x_TD: Tensor) -> Tensor:
        return x_TD if self.residual_scale == 1.0 else x_TD * self.residual_scale

    def _with_attention(
        self, x_TD: Tensor, normed_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None
    ) -> Residual:
        """x + dropout(attention(normed))."""
        y_TD = self._scaled(self._attention(normed_TD, inputs, not self.leaves_bias))
        bias = self.attention.output_bias if self.leaves_bias else None
        return self._joined(self.attention_dropout, Residual(x_TD, y_TD, bias), numbers_T)

    def _with_mlp(
        self, x_TD: Tensor, normed_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None
    ) -> Residual:
        """x + dropout(mlp(normed))."""
        y_TD = self._scaled(self.mlp(normed_TD, inputs, not self.leaves_bias))
        bias = self.mlp.output_bias if self.leaves_bias else None
        return self._joined(self.mlp_dropout, Residual(x_TD, y_TD, bias), numbers_T)

    def _joined(self, drop: Dropout, residual: Residual, numbers_T: Tensor | None) -> Residual:
        x_TD, y_TD, _ = residual
        return Residual(drop(y_TD, numbers_T, x_TD)) if drop.active else residual


class NoNorm(nn.Module):
    """The sum of a residual stream and a branch twice: a norm of sums that normalises nothing."""

    def __init__(self, name: str, model: ModelConfig) -> None:
        super().__init__()

    def forward(
        self, x_TD: Tensor, y_TD: Tensor | None = None, y_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x + y + y_bias, the same)."""
        total = Residual(x_TD, y_TD, y_bias).total()
        return total, total


class PreNormBlock(Block):
    """x + f(norm(x)) for attention, then MLP (arXiv:1909.08053, figure 7b)."""

    no_norm = NoNorm

    def norm_makers(self, model: ModelConfig, build: LayerFactory) -> tuple[NormMaker, NormMaker]:
        """Makes both norms those of a sum, with the residual add ahead of them."""
        return build.add_norm, build.add_norm

    def _run(self, residual: Residual, inputs: Inputs, numbers_T: Tensor | None) -> Residual:
        x_TD, y_TD = self.attention_norm(*residual)
        # a norm frees the branch's output
        x_TD, y_TD = self.mlp_norm(*self._with_attention(x_TD, y_TD, inputs, numbers_T))
        residual = self._with_mlp(x_TD, y_TD, inputs, numbers_T)
        # A compiler fuses the sum with what a block does, and sees no other block. FSDP2 gathers a
        # block's weights for the gradient of each of its outputs.
        ends = torch.compiler.is_compiling() or self.frees_weights
        return Residual(residual.total()) if ends else residual


class PostNormBlock(Block):
    """norm(x + f(x)) (arXiv:1909.08053, figure 7a)."""

    def norm_makers(self, model: ModelConfig, build: LayerFactory) -> tuple[NormMaker, NormMaker]:
        """Makes both norms those of a sum."""
        return build.add_norm, build.add_norm

    def _run(self, residual: Residual, inputs: Inputs, numbers_T: Tensor | None) -> Residual:
        x_TD = residual.total()
        _, x_TD = self.attention_norm(*self._with_attention(x_TD, x_TD, inputs, numbers_T))
        _, x_TD = self.mlp_norm(*self._with_mlp(x_TD, x_TD, inputs, numbers_T))
        return Residual(x_TD)


class OutputNormBlock(Block):
    """x + norm(f(norm(x))) (Gemma 2, arXiv:2408.00118, section 2), or x + norm(f(x)) with norm
    order "after" (OLMo 2, arXiv:2501.00656, section 3.3)."""

    def __init__(
        self, layer: int, model: ModelConfig, build: LayerFactory, seed: int, recompute: str
    ) -> None:
        super().__init__(layer, model, build, seed, recompute)
        name = f"blocks.{layer}"
        self.attention_post_norm = build.norm(f"{name}.attention_post_norm", model)
        self.mlp_post_norm = build.norm(f"{name}.mlp_post_norm", model)

    def norm_makers(self, model: ModelConfig, build: LayerFactory) -> tuple[NormMaker, NormMaker]:
        """Makes the norms ahead of f, if the order has them."""
        maker = nn.Identity if model.norm_order == "after" else build.norm
        return maker, maker

    def _run(self, residual: Residual, inputs: Inputs, numbers_T: Tensor | None) -> Residual:
        x_TD = residual.total()
        y_TD = self.attention_post_norm(self._attention(self.attention_norm(x_TD), inputs))
        x_TD = self.attention_dropout(self._scaled(y_TD), numbers_T, x_TD)
        y_TD = self.mlp_post_norm(self.mlp(self.mlp_norm(x_TD), inputs))
        return Residual(self.mlp_dropout(self._scaled(y_TD), numbers_T, x_TD))


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)) (arXiv:2204.06745, section 2.1), of two norms or
    one."""

    def __init__(
        self, layer: int, model: ModelConfig, build: LayerFactory, seed: int, recompute: str
    ) -> None:
        super().__init__(layer, model, build, seed, recompute)
        self.shares_norm = model.parallel_norms == 1

    def norm_makers(self, model: ModelConfig, build: LayerFactory) -> tuple[NormMaker, NormMaker]:
        """Makes a norm for both, or one for each."""
        return build.norm, nn.Identity if model.parallel_norms == 1 else build.norm

    def _run(self, residual: Residual, inputs: Inputs, numbers_T: Tensor | None) -> Residual:
        x_TD = residual.total()
        normed_TD = self.attention_norm(x_TD)
        attended_TD = self._scaled(self._attention(normed_TD, inputs))
        normed_TD = normed_TD if self.shares_norm else self.mlp_norm(x_TD)
        mlp_TD = self._scaled(self.mlp(normed_TD, inputs))
        x_TD = self.attention_dropout(attended_TD, numbers_T, x_TD)
        return Residual(self.mlp_dropout(mlp_TD, numbers_T, x_TD))


def block_class(model: ModelConfig) -> type[Block]:
    """Chooses the class of a model's blocks."""
    if model.parallel_residual:
        return ParallelBlock
    if model.norms_outputs:
        return OutputNormBlock
    return PostNormBlock if model.norm_order == "post" else PreNormBlock


def _recomputed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Runs `function`, recomputing it in backward. No random state is saved, as dropout is a
    function of token numbers."""
    result = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, result)
