"""A pipeline stage: some of the model's blocks, with the embedding or the head at the ends.

`named_parameters()` gives the canonical names of mesh/parameters.py. T tokens of a micro-batch, D
hidden; x_TD is [T/tp, D] under sequence parallelism.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

from mtcli.core.config.model import CLASSIFIERS, ModelConfig
from mtcli.core.model.block import Residual, block_class
from mtcli.core.model.dropout import Dropout
from mtcli.core.model.heads import HEADS, Head, NextTokens
from mtcli.core.model.inputs import Inputs
from mtcli.core.parallel.factory import LayerFactory, Scale, TokenLoss


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
        if self.is_first and model.has_embedding_norm:
            self.embedding_norm = build.norm("embedding_norm", model)
        self.embedding_dropout = Dropout(build.dropout("embedding", model.dropout, seed))
        block = block_class(model)
        self.blocks = nn.ModuleDict(
            {str(i): block(i, model, build, seed, recompute) for i in layers}
        )
        if self.is_last and model.norm_order != "post":
            self.final_norm = build.add_norm("final_norm", model)
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
        residual = Residual(x_TD)
        for block in self.blocks.values():
            residual = block(residual, inputs, numbers_T)
        if self.is_last and self.model.norm_order != "post":
            _, x_TD = self.final_norm(*residual)
        else:
            x_TD = residual.total()
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
            if offset := self.model.position_offset:
                positions_T = positions_T + offset
            table = cast(Tensor, self.position_embedding.weight)
            x_TD = x_TD + self.build.lookup(positions_T, table)
        if self.model.token_types:
            types = inputs.token_types
            types = torch.zeros_like(inputs.tokens) if types is None else types
            types_T = self.build.activation_rows(types.flatten())
            table = cast(Tensor, self.token_type_embedding.weight)
            x_TD = x_TD + self.build.lookup(types_T, table)
        return cast(Tensor, self.embedding_norm(x_TD) if self.model.has_embedding_norm else x_TD)


def rounded(number: float, dtype: torch.dtype) -> float:
    """The number of a dtype that is nearest."""
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(mantissa, digits)), exponent - digits)


def _scaled(x_TD: Tensor, factor: float) -> Tensor:
    return x_TD if factor == 1.0 else x_TD * factor
