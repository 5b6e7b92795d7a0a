"""A transformer block: attention, then a dense MLP or a mixture of experts, around a residual
stream. Where norms are is a class of block.

T tokens of a micro-batch, D hidden; x_TD is [T/tp, D] under sequence parallelism.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import cast

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


class Block(nn.Module):
    """Attention, MLP and their dropouts, with the norms that a subclass chooses."""

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
            attention_norm = nn.Identity
        self.attention_norm = attention_norm(f"{name}.attention_norm", model)
        attention = LatentAttention if model.mla else Attention
        self.attention = attention(layer, model, build, seed)
        self.mlp_norm = mlp_norm(f"{name}.mlp_norm", model)
        self.mlp = mlp(f"{name}.mlp", model, build)
        self.attention_dropout = Dropout(build.dropout(f"{name}.attention", model.dropout, seed))
        self.mlp_dropout = Dropout(build.dropout(f"{name}.mlp", model.dropout, seed))
        self.recompute, self.residual_scale = recompute, model.residual_scale

    @abstractmethod
    def norm_makers(self, model: ModelConfig, build: LayerFactory) -> tuple[NormMaker, NormMaker]:
        """Returns what makes the norms ahead of attention and of the MLP."""

    @abstractmethod
    def _run(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor: ...

    def forward(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        """x_TD -> x_TD; with recompute = "full" it saves only its input for backward."""
        if self.recompute == "full" and torch.is_grad_enabled():
            return _recomputed(self._run, x_TD, inputs, numbers_T)
        return self._run(x_TD, inputs, numbers_T)

    def _attention(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """Attention; with recompute = "selective" its backward recomputes scores and
        probabilities."""
        if self.recompute == "selective" and torch.is_grad_enabled():
            qkv = self.attention.project(x_TD, inputs)
            mixed = _recomputed(self.attention.mix, qkv, inputs)
            return cast(Tensor, self.attention.out(mixed, numbers=inputs.numbers))
        return cast(Tensor, self.attention(x_TD, inputs))

    def _scaled(self, x_TD: Tensor) -> Tensor:
        return x_TD if self.residual_scale == 1.0 else x_TD * self.residual_scale


class PreNormBlock(Block):
    """x + f(norm(x)) for attention, then MLP (arXiv:1909.08053, figure 7b)."""

    def norm_makers(self, model: ModelConfig, build: LayerFactory) -> tuple[NormMaker, NormMaker]:
        """Makes the second norm one of a sum, with the residual add ahead of it."""
        return build.norm, build.add_norm

    def _run(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        y_TD: Tensor | None = self._scaled(self._attention(self.attention_norm(x_TD), inputs))
        if self.attention_dropout.active:
            x_TD, y_TD = self.attention_dropout(y_TD, numbers_T, x_TD), None
        x_TD, y_TD = self.mlp_norm(x_TD, y_TD)  # frees attention's output
        y_TD = self._scaled(self.mlp(y_TD, inputs))
        return cast(Tensor, self.mlp_dropout(y_TD, numbers_T, x_TD))


class PostNormBlock(Block):
    """norm(x + f(x)) (arXiv:1909.08053, figure 7a)."""

    def norm_makers(self, model: ModelConfig, build: LayerFactory) -> tuple[NormMaker, NormMaker]:
        """Makes both norms those of a sum."""
        return build.add_norm, build.add_norm

    def _run(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        norm, drop = self.attention_norm, self.attention_dropout
        y_TD = self._scaled(self._attention(x_TD, inputs))
        x_TD = _norm_of_sum(norm, drop, x_TD, y_TD, numbers_T)
        norm, drop = self.mlp_norm, self.mlp_dropout
        y_TD = self._scaled(self.mlp(x_TD, inputs))
        return _norm_of_sum(norm, drop, x_TD, y_TD, numbers_T)


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

    def _run(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        y_TD = self.attention_post_norm(self._attention(self.attention_norm(x_TD), inputs))
        x_TD = self.attention_dropout(self._scaled(y_TD), numbers_T, x_TD)
        y_TD = self.mlp_post_norm(self.mlp(self.mlp_norm(x_TD), inputs))
        return cast(Tensor, self.mlp_dropout(self._scaled(y_TD), numbers_T, x_TD))


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

    def _run(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        normed_TD = self.attention_norm(x_TD)
        attended_TD = self._scaled(self._attention(normed_TD, inputs))
        normed_TD = normed_TD if self.shares_norm else self.mlp_norm(x_TD)
        mlp_TD = self._scaled(self.mlp(normed_TD, inputs))
        x_TD = self.attention_dropout(attended_TD, numbers_T, x_TD)
        return cast(Tensor, self.mlp_dropout(mlp_TD, numbers_T, x_TD))


def block_class(model: ModelConfig) -> type[Block]:
    """Chooses the class of a model's blocks."""
    if model.parallel_residual:
        return ParallelBlock
    if model.norms_outputs:
        return OutputNormBlock
    return PostNormBlock if model.norm_order == "post" else PreNormBlock


def _norm_of_sum(
    norm: nn.Module, drop: Dropout, x_TD: Tensor, y_TD: Tensor, numbers_T: Tensor | None
) -> Tensor:
    """norm(x + dropout(y))."""
    if drop.active:
        return cast(Tensor, norm(drop(y_TD, numbers_T, x_TD))[1])
    return cast(Tensor, norm(x_TD, y_TD)[1])


def _recomputed(function: Callable[..., Tensor], *arguments: object) -> Tensor:
    """Runs `function`, recomputing it in backward. No random state is saved, as dropout is a
    function of token numbers."""
    result = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return cast(Tensor, result)
