"""A pipeline stage: some of the model's blocks, with the embedding or the head at the ends.

`named_parameters()` gives the canonical names of mesh/parameters.py. T tokens of a micro-batch, D
hidden; x_TD is [T/tp, D] under sequence parallelism.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtcli.core.config.model import CLASSIFIERS, ModelConfig
from mtcli.core.model.attention import Attention
from mtcli.core.model.dropout import Dropout
from mtcli.core.model.heads import HEADS, Head, NextTokens
from mtcli.core.model.inputs import Inputs
from mtcli.core.model.latent_attention import LatentAttention
from mtcli.core.model.mlp import GatedMlp, Mlp
from mtcli.core.model.moe import MixtureOfExperts
from mtcli.core.parallel.factory import LayerFactory, Scale, TokenLoss


class Block(nn.Module):
    """x + f(norm(x)) for attention, then MLP (arXiv:1909.08053, figure 7b). Other norm orders:
    "post", norm(x + f(x)) (figure 7a); "sandwich", x + norm(f(norm(x))); "after", x + norm(f(x))
    (arXiv:2501.00656, section 3.3). With parallel_residual, x + attention(norm(x)) + mlp(norm(x)),
    of two norms or one."""

    def __init__(
        self, layer: int, model: ModelConfig, build: LayerFactory, seed: int, recompute: str
    ) -> None:
        super().__init__()
        name = f"blocks.{layer}"
        mlp: type[Mlp | GatedMlp | MixtureOfExperts] = GatedMlp if model.is_gated else Mlp
        if model.has_experts(layer):
            mlp = MixtureOfExperts
        norms: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
            "pre": (build.norm, build.add_norm),
            "post": (build.add_norm, build.add_norm),
            "sandwich": (build.norm, build.norm),
            "after": (nn.Identity, nn.Identity),
            "parallel2": (build.norm, build.norm),
            "parallel1": (build.norm, nn.Identity),
        }
        self.num_parallel_norms = model.parallel_residual * model.parallel_norms
        order = f"parallel{model.parallel_norms}" if model.parallel_residual else model.norm_order
        attention_norm, mlp_norm = norms[order]
        self.attention_norm = attention_norm(f"{name}.attention_norm", model)
        attention = LatentAttention if model.mla else Attention
        self.attention = attention(layer, model, build, seed)
        self.mlp_norm = mlp_norm(f"{name}.mlp_norm", model)
        self.mlp = mlp(f"{name}.mlp", model, build)
        if model.norms_outputs:
            self.attention_post_norm = build.norm(f"{name}.attention_post_norm", model)
            self.mlp_post_norm = build.norm(f"{name}.mlp_post_norm", model)
        self.attention_dropout = Dropout(build.dropout(f"{name}.attention", model.dropout, seed))
        self.mlp_dropout = Dropout(build.dropout(f"{name}.mlp", model.dropout, seed))
        self.recompute, self.norm_order = recompute, model.norm_order
        self.norms_outputs, self.residual_scale = model.norms_outputs, model.residual_scale

    def forward(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        """x_TD -> x_TD; with recompute = "full" it saves only its input for backward."""
        if self.recompute == "full" and torch.is_grad_enabled():
            return _recomputed(self._run, x_TD, inputs, numbers_T)
        return self._run(x_TD, inputs, numbers_T)

    def _run(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        if self.norms_outputs:
            return self._run_with_post_norms(x_TD, inputs, numbers_T)
        if self.num_parallel_norms:
            return self._run_in_parallel(x_TD, inputs, numbers_T)
        if self.norm_order == "post":
            norm, drop = self.attention_norm, self.attention_dropout
            attended_TD = _scaled(self._attention(x_TD, inputs), self.residual_scale)
            x_TD = _norm_of_sum(norm, drop, x_TD, attended_TD, numbers_T)
            norm, drop = self.mlp_norm, self.mlp_dropout
            mlp_TD = _scaled(self.mlp(x_TD, inputs), self.residual_scale)
            return _norm_of_sum(norm, drop, x_TD, mlp_TD, numbers_T)
        y_TD: Tensor | None = _scaled(
            self._attention(self.attention_norm(x_TD), inputs), self.residual_scale
        )
        if self.attention_dropout.active:
            x_TD, y_TD = self.attention_dropout(y_TD, numbers_T, x_TD), None
        x_TD, y_TD = self.mlp_norm(x_TD, y_TD)  # frees attention's output
        y_TD = _scaled(self.mlp(y_TD, inputs), self.residual_scale)
        return cast(Tensor, self.mlp_dropout(y_TD, numbers_T, x_TD))

    def _run_with_post_norms(
        self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None
    ) -> Tensor:
        y_TD = self.attention_post_norm(self._attention(self.attention_norm(x_TD), inputs))
        x_TD = self.attention_dropout(_scaled(y_TD, self.residual_scale), numbers_T, x_TD)
        y_TD = self.mlp_post_norm(self.mlp(self.mlp_norm(x_TD), inputs))
        return cast(Tensor, self.mlp_dropout(_scaled(y_TD, self.residual_scale), numbers_T, x_TD))

    def _run_in_parallel(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        normed_TD = self.attention_norm(x_TD)
        attended_TD = _scaled(self._attention(normed_TD, inputs), self.residual_scale)
        normed_TD = normed_TD if self.num_parallel_norms == 1 else self.mlp_norm(x_TD)
        mlp_TD = _scaled(self.mlp(normed_TD, inputs), self.residual_scale)
        x_TD = self.attention_dropout(attended_TD, numbers_T, x_TD)
        return cast(Tensor, self.mlp_dropout(mlp_TD, numbers_T, x_TD))

    def _attention(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """Attention; with recompute = "selective" its backward recomputes scores and
        probabilities."""
        if self.recompute == "selective" and torch.is_grad_enabled():
            qkv = self.attention.project(x_TD, inputs)
            mixed = _recomputed(self.attention.mix, qkv, inputs)
            return cast(Tensor, self.attention.out(mixed, numbers=inputs.numbers))
        return cast(Tensor, self.attention(x_TD, inputs))


class Stage(nn.Module):
    """Some blocks of the model; the first stage embeds tokens, the last computes losses."""

    def __init__(
        self,
        model: ModelConfig,
        build: LayerFactory,
        index: int,
        layers: range,
        *,
        seed: int = 0,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        # by number, not by layers: a stage may have no layers, such as one of the head alone
        self.is_first, self.is_last = index == 0, index == build.groups.layout.num_stages - 1
        self.model, self.build = model, build
        self.embedding_scale = model.embedding_scale
        if self.embedding_scale == model.hidden_size**0.5:
            self.embedding_scale = rounded(self.embedding_scale, build.dtype)
        tied = model.tie_embeddings
        if self.is_first or (self.is_last and tied):
            self.embedding = build.embedding("embedding")
        if self.is_first and model.position == "learned":
            self.position_embedding = build.weight("position_embedding")
        if self.is_first and model.token_types:
            self.token_type_embedding = build.weight("token_type_embedding")
        if self.is_first and model.norm_order == "post":
            self.embedding_norm = build.norm("embedding_norm", model)
        self.embedding_dropout = Dropout(build.dropout("embedding", model.dropout, seed))
        self.blocks = nn.ModuleDict(
            {str(i): Block(i, model, build, seed, recompute) for i in layers}
        )
        if self.is_last and model.norm_order != "post":
            self.final_norm = build.norm("final_norm", model)
        if self.is_last and (model.head != "lm" or not tied):
            self.head = HEADS[model.head](model, build, seed)
            if model.head_bias:
                self.head.bias = build.parameter("head.bias")
        self.next_tokens = NextTokens(build)

    @property
    def output(self) -> TokenLoss | None:
        """The token table's loss and logits, for a language model or a head of masked tokens; None
        for a head without a vocabulary."""
        if self.model.head in CLASSIFIERS:
            return None
        has_bias = self.model.head == "mlm" or self.model.head_bias
        bias = cast(nn.Parameter, self.head.bias) if has_bias else None
        table = self.embedding if self.model.tie_embeddings else self.head
        return self.build.loss(table, bias, cap=self.model.logit_softcap)

    def forward(self, x_TD: Tensor | None, inputs: Inputs) -> Tensor:
        """The previous stage's activations (None on the first) -> this stage's."""
        numbers_T = (
            None
            if inputs.numbers is None
            else self.build.dropout_numbers(self.build.activation_rows(inputs.numbers.flatten()))
        )
        if x_TD is None:
            x_TD = self.embedding_dropout(self._embed(inputs), numbers_T)
        for block in self.blocks.values():
            x_TD = block(x_TD, inputs, numbers_T)
        if self.is_last and self.model.norm_order != "post":
            x_TD = self.final_norm(x_TD)
        # logits are linear in what they are made of
        return _scaled(x_TD, self.model.logit_scale) if self.is_last else x_TD

    def losses(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """The last stage's weighted losses, such as the cross entropy of each label [T]; losses
        that cp ranks share are on the first of them."""
        return self._predictor.losses(x_TD, inputs, self.output)

    def loss(self, x_TD: Tensor, inputs: Inputs, scale: Scale) -> tuple[Tensor, Tensor]:
        """(the sum of `losses`, that sum times `scale`, from which the backward starts), on the
        last stage.

        In an array of models the sum and the scale are tensors [models].
        """
        return self._predictor.loss(x_TD, inputs, scale, self.output)

    @property
    def _predictor(self) -> Head:
        """The head that computes the losses; a language model's is `NextTokens`."""
        return cast(Head, self.next_tokens if self.model.head == "lm" else self.head)

    def _embed(self, inputs: Inputs) -> Tensor:
        x_TD = _scaled(self.embedding(inputs.tokens.flatten()), self.embedding_scale)
        if self.model.position == "learned":
            positions_T = self.build.activation_rows(inputs.positions.flatten())
            table = cast(Tensor, self.position_embedding.weight)
            x_TD = x_TD + self.build.lookup(positions_T, table)
        if self.model.token_types:
            types = inputs.token_types
            types = torch.zeros_like(inputs.tokens) if types is None else types
            types_T = self.build.activation_rows(types.flatten())
            table = cast(Tensor, self.token_type_embedding.weight)
            x_TD = x_TD + self.build.lookup(types_T, table)
        return cast(Tensor, self.embedding_norm(x_TD) if self.model.norm_order == "post" else x_TD)


def rounded(number: float, dtype: torch.dtype) -> float:
    """The number of a dtype that is nearest."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(mantissa, digits)), exponent - digits)


def _scaled(x_TD: Tensor, factor: float) -> Tensor:
    return x_TD if factor == 1.0 else x_TD * factor


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
