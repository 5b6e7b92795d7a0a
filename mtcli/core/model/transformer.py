"""A pipeline stage: some of the model's blocks, with the embedding or the head at the ends.

Modules are named so that `named_parameters()` gives the canonical names of mesh/parameters.py. T
tokens of a micro-batch, D hidden; x_TD is [T/tp, D] under sequence parallelism.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mtcli.core.config.model import ModelConfig
from mtcli.core.model.attention import Attention
from mtcli.core.model.inputs import Inputs
from mtcli.core.model.mlp import GatedMlp, Mlp
from mtcli.core.model.moe import MixtureOfExperts
from mtcli.core.parallel.factory import LayerFactory, TokenLoss
from mtcli.kernels.dropout import dropout
from mtcli.kernels.random import stream_key


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (pre-norm, arXiv:1909.08053, figure 7b)."""

    def __init__(
        self, layer: int, model: ModelConfig, build: LayerFactory, seed: int, recompute: str
    ) -> None:
        super().__init__()
        name = f"blocks.{layer}"
        mlp = GatedMlp if model.activation == "swiglu" else Mlp
        if model.num_experts:
            mlp = MixtureOfExperts
        self.attention_norm = build.norm(f"{name}.attention_norm", model)
        self.attention = Attention(layer, model, build, seed)
        self.mlp_norm = build.add_norm(f"{name}.mlp_norm", model)
        self.mlp = mlp(f"{name}.mlp", model, build)
        self.attention_dropout = Dropout(f"{name}.attention", model.dropout, seed)
        self.mlp_dropout = Dropout(f"{name}.mlp", model.dropout, seed)
        self.recompute = recompute

    def forward(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        """x_TD -> x_TD; with recompute = "full" only the input is kept for the backward pass."""
        if self.recompute == "full" and torch.is_grad_enabled():
            return cast(Tensor, _recomputed(self._run, x_TD, inputs, numbers_T))
        return self._run(x_TD, inputs, numbers_T)

    def _run(self, x_TD: Tensor, inputs: Inputs, numbers_T: Tensor | None) -> Tensor:
        y_TD = self._attention(self.attention_norm(x_TD), inputs)
        if self.attention_dropout.drop > 0.0:
            x_TD, y_TD = self.attention_dropout(y_TD, numbers_T, x_TD), None
        x_TD, y_TD = self.mlp_norm(x_TD, y_TD)  # frees attention's output
        return self.mlp_dropout(self.mlp(y_TD, inputs), numbers_T, x_TD)

    def _attention(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """With recompute = "selective" scores and probabilities are computed twice."""
        if self.recompute == "selective" and torch.is_grad_enabled():
            qkv = self.attention.qkv(x_TD, numbers=inputs.numbers)
            mixed = _recomputed(self.attention.mix, qkv, inputs)
            return self.attention.out(mixed, numbers=inputs.numbers)
        return self.attention(x_TD, inputs)


class Dropout(nn.Module):
    """Dropout whose mask depends on (seed, site, token number, column), never on the layout."""

    def __init__(self, site: str, drop: float, seed: int) -> None:
        super().__init__()
        self.drop = drop
        self.key = stream_key(seed, "dropout", site)

    def forward(
        self, x_TD: Tensor, numbers_T: Tensor | None, onto_TD: Tensor | None = None
    ) -> Tensor:
        """x_TD with elements zeroed and the rest scaled up, added to `onto_TD` where given.

        Nothing is zeroed where numbers are None.
        """
        if self.drop > 0.0 and numbers_T is not None:
            return dropout(x_TD, numbers_T, self.key, self.drop, onto_TD)
        return x_TD if onto_TD is None else onto_TD + x_TD


class Stage(nn.Module):
    """Some blocks of the model; the first stage embeds tokens, the last makes losses."""

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
        # by number, not by layers: a stage may hold none, such as one with the head alone
        self.is_first, self.is_last = index == 0, index == build.groups.layout.num_stages - 1
        self.model, self.build = model, build
        tied = model.tie_embeddings
        if self.is_first or (self.is_last and tied):
            self.embedding = build.embedding("embedding")
        if self.is_first and model.position == "learned":
            self.position_embedding = nn.Module()
            self.position_embedding.weight = build.parameter("position_embedding.weight")
        self.embedding_dropout = Dropout("embedding", model.dropout, seed)
        self.blocks = nn.ModuleDict(
            {str(i): Block(i, model, build, seed, recompute) for i in layers}
        )
        if self.is_last:
            self.final_norm = build.norm("final_norm", model)
            if not tied:
                self.head = build.embedding("head")

    @property
    def output(self) -> TokenLoss:
        """The loss of the last stage's activations, and their logits."""
        return self.build.loss(self.embedding if self.model.tie_embeddings else self.head)

    def forward(self, x_TD: Tensor | None, inputs: Inputs) -> Tensor:
        """The previous stage's activations (None on the first) -> this stage's."""
        numbers_T = (
            None if inputs.numbers is None else self.build.my_tokens(inputs.numbers.flatten())
        )
        if x_TD is None:
            x_TD = self.embedding_dropout(self._embed(inputs), numbers_T)
        for block in self.blocks.values():
            x_TD = block(x_TD, inputs, numbers_T)
        return self.final_norm(x_TD) if self.is_last else x_TD

    def losses(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """The weighted cross entropy of each label [T] (last stage)."""
        assert inputs.labels is not None, "losses need labels"
        losses_T = self.output.losses(x_TD, inputs.labels.flatten())
        return losses_T if inputs.weights is None else losses_T * inputs.weights.flatten()

    def loss(self, x_TD: Tensor, inputs: Inputs, scale: float) -> tuple[Tensor, Tensor]:
        """(the sum of `losses`, scale times it, from which the backward starts) (last stage)."""
        assert inputs.labels is not None, "losses need labels"
        weights_T = None if inputs.weights is None else inputs.weights.flatten()
        return self.output.loss(x_TD, inputs.labels.flatten(), weights_T, scale)

    def _embed(self, inputs: Inputs) -> Tensor:
        x_TD = self.embedding(inputs.tokens.flatten())
        if self.model.position == "learned":
            positions_T = self.build.my_tokens(inputs.positions.flatten())
            x_TD = x_TD + nn.functional.embedding(positions_T, self.position_embedding.weight)
        return x_TD


def _recomputed(function, *arguments):  # type: ignore[no-untyped-def]
    """Runs without keeping activations. Dropout is a function of its index, so no random state."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
