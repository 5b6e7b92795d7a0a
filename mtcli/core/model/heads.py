"""Heads that predict next tokens, masked tokens, or classes of a micro-batch's sequences.

A language model's head has no layer but the token table (`TokenLoss`); the others have layers on
top of the last stage's activations. T tokens of a micro-batch, D hidden, N sequences, C classes.
"""

from collections.abc import Callable
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtcli.core.config.model import ModelConfig
from mtcli.core.model.dropout import Dropout
from mtcli.core.model.inputs import Inputs
from mtcli.core.parallel.collectives import sum_out
from mtcli.core.parallel.factory import LayerFactory, Scale, TokenLoss, weighted_sum
from mtcli.kernels.activation import ACTIVATIONS


class Head(Protocol):
    """A head: its weighted losses, and their sum to differentiate; `output` is the token
    table's."""

    def losses(self, x_TD: Tensor, inputs: Inputs, output: TokenLoss | None) -> Tensor:
        """The weighted losses; a loss that cp ranks share counts on the first rank alone."""

    def loss(
        self, x_TD: Tensor, inputs: Inputs, scale: Scale, output: TokenLoss | None
    ) -> tuple[Tensor, Tensor]:
        """(the sum of `losses`, that sum times `scale`, from which the backward starts)."""


def all_tokens(x_TD: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """(x_TD, labels [T], weights [T]) of a micro-batch; weights of None are 1."""
    assert inputs.labels is not None, "losses need labels"
    weights_T = None if inputs.weights is None else inputs.weights.flatten()
    return x_TD, inputs.labels.flatten(), weights_T


class WeightedTokens:
    """Selects the tokens with a nonzero loss weight, so that no others get logits."""

    def __init__(self, build: LayerFactory) -> None:
        rank, shards = build.token_shard
        # Sets of tokens from which equally many are selected: each tp rank's, or each model's.
        self.sets = shards * build.num_models
        self.local_models = slice(rank, rank + build.num_models)

    def __call__(self, x_TD: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """`all_tokens` of the N selected tokens, x_ND [N/tp, D]. Sets with fewer tokens are padded
        with tokens of weight 0."""
        if inputs.weights is None:
            return all_tokens(x_TD, inputs)
        weights_RT = inputs.weights.reshape(self.sets, -1)
        has_weight = weights_RT != 0
        most = max(1, int(has_weight.sum(1).max()))
        if most == weights_RT.shape[1]:
            return all_tokens(x_TD, inputs)
        assert inputs.labels is not None, "losses need labels"
        first = has_weight.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :most]
        labels_N = inputs.labels.view(self.sets, -1).gather(1, first).flatten()
        begins = torch.arange(0, len(x_TD), weights_RT.shape[1], device=x_TD.device)
        rows_N = (first[self.local_models] + begins[:, None]).flatten()
        return x_TD[rows_N], labels_N, weights_RT.gather(1, first).flatten()


class NextTokens:
    """The head of a language model: the cross entropy of every label, from the token table."""

    def __init__(self, build: LayerFactory) -> None:
        self.weighted_tokens = WeightedTokens(build)

    def losses(self, x_TD: Tensor, inputs: Inputs, output: TokenLoss) -> Tensor:
        """The weighted cross entropy of each label [T]."""
        x_TD, labels_T, weights_T = all_tokens(x_TD, inputs)
        losses_T = output.losses(x_TD, labels_T)
        return losses_T if weights_T is None else losses_T * weights_T

    def loss(
        self, x_TD: Tensor, inputs: Inputs, scale: Scale, output: TokenLoss
    ) -> tuple[Tensor, Tensor]:
        """(the sum of the losses, scale times it)."""
        # On a GPU the host would wait for their number, and a CUDA graph needs a fixed one.
        selects = x_TD.device.type == "cpu" and not torch.compiler.is_compiling()
        tokens = (self.weighted_tokens if selects else all_tokens)(x_TD, inputs)
        return output.loss(*tokens, scale)


class MaskedTokens(nn.Module):
    """BERT's pre-training head (arXiv:1810.04805): masked tokens, and optionally sentence order.

    Logits are norm(activation(transform(x))) times the token table, plus a bias, for tokens with a
    loss weight alone.
    """

    def __init__(self, model: ModelConfig, build: LayerFactory, seed: int = 0) -> None:
        super().__init__()
        self.transform = build.dense("head.transform")
        self.norm = build.norm("head.norm", model)
        self.bias = build.parameter("head.bias")
        name = "gelu" if model.is_gated else model.activation
        self.activation = ACTIVATIONS[name].forward
        self.predicted, self.models = WeightedTokens(build), build.num_models
        self.order: FirstTokens | None = None
        if model.sentence_order:
            self.pooler = build.dense("head.pooler")
            self.sentence_order = build.classes("head.sentence_order")
            self.order = FirstTokens(self.pooler, self.sentence_order, build, None)

    def transformed(self, x_TD: Tensor) -> Tensor:
        """norm(activation(transform(x))), the input of the token table: [N, D] -> [N, D]."""
        return cast(Tensor, self.norm(self.activation(self.transform(x_TD), None)))

    def losses(self, x_TD: Tensor, inputs: Inputs, output: TokenLoss) -> Tensor:
        """The losses of the predicted tokens, then of the N sequences, for each model in turn."""
        losses = self.token_losses(x_TD, inputs, output)
        if self.order is None:
            return losses
        both = losses, self.order.losses(x_TD, inputs)
        if self.models == 1:
            return torch.cat(both)
        return torch.cat([x.view(self.models, -1) for x in both], 1).flatten()

    def token_losses(self, x_TD: Tensor, inputs: Inputs, output: TokenLoss) -> Tensor:
        """The weighted losses of the predicted tokens."""
        x_ND, labels_N, weights_N = self.predicted(x_TD, inputs)
        losses = output.losses(self.transformed(x_ND), labels_N)
        return losses if weights_N is None else losses * weights_N

    def row_losses(self, x_TD: Tensor, inputs: Inputs, output: TokenLoss) -> Tensor:
        """The weighted losses of predicted tokens, summed by row in float64 [b]."""
        weights_bS = inputs.weights
        assert weights_bS is not None, "masked tokens have weights"
        x_ND, labels_N, weights_N = self.predicted(x_TD, inputs)
        assert weights_N is not None
        losses_N = (output.losses(self.transformed(x_ND), labels_N) * weights_N).double()
        # Predicted tokens are in the order of the rows, among some of weight 0.
        losses_bS = weights_bS.new_zeros(weights_bS.shape, dtype=torch.float64)
        return losses_bS.masked_scatter(weights_bS != 0, losses_N[weights_N != 0]).sum(1)

    def loss(
        self, x_TD: Tensor, inputs: Inputs, scale: Scale, output: TokenLoss
    ) -> tuple[Tensor, Tensor]:
        """(the sum of the losses, scale times it)."""
        x_ND, labels_N, weights_N = self.predicted(x_TD, inputs)
        total, scaled = output.loss(self.transformed(x_ND), labels_N, weights_N, scale)
        if self.order is None:
            return total, scaled
        of_order, scaled_order = self.order.loss(x_TD, inputs, scale)
        return total + of_order, scaled + scaled_order


class SentenceClasses(nn.Module):
    """Classifies sequences, or chooses among the choices of a question."""

    def __init__(self, model: ModelConfig, build: LayerFactory, seed: int = 0) -> None:
        super().__init__()
        self.pooler = build.dense("head.pooler")
        self.classifier = build.classes("head.classifier")
        drop = Dropout(build.dropout("head.pooled", model.dropout, seed))
        self.first_tokens = FirstTokens(self.pooler, self.classifier, build, drop)

    def losses(self, x_TD: Tensor, inputs: Inputs, output: TokenLoss | None) -> Tensor:
        """The weighted losses of the M labels."""
        return self.first_tokens.losses(x_TD, inputs)

    def loss(
        self, x_TD: Tensor, inputs: Inputs, scale: Scale, output: TokenLoss | None
    ) -> tuple[Tensor, Tensor]:
        """(the sum of the losses, that sum times `scale`)."""
        return self.first_tokens.loss(x_TD, inputs, scale)

    def logits(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """Logits [M, C], float32 at least, on every rank."""
        return self.first_tokens.logits(x_TD, inputs)


class FirstTokens:
    """The classes of sequences: classifier(tanh(pooler(x))) of each sequence's first token.

    Ranks that share sequences have different tokens or columns of them: each computes the logits of
    the first tokens it has, and the sum over ranks gives all ranks all logits. With one label for
    several sequences these are a question's choices, and the classifier gives one logit for each.
    The layers are the head's, under its parameter names.
    """

    def __init__(
        self, pooler: nn.Module, classifier: nn.Module, build: LayerFactory, dropout: Dropout | None
    ) -> None:
        groups = build.groups
        self.pooler, self.classifier, self.dropout = pooler, classifier, dropout
        self.rank, self.numbers = build.token_shard[0], build.dropout_numbers
        self.sharers = groups.axes["sequence"] if build.sequence_parallel else groups.cp
        self.counts = float(groups.cp.rank == 0)

    def logits(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """Logits [M, C], float32 at least, on every rank; C is the number of choices, where there
        are choices."""
        sentences = inputs.sentences
        assert sentences is not None, "sequences are classified by their first tokens"
        mine_N = sentences.rows - self.rank * len(x_TD)
        is_mine_N = (sentences.rows >= 0) & (mine_N >= 0) & (mine_N < len(x_TD))
        pooled_ND = torch.tanh(self.pooler(x_TD[mine_N.where(is_mine_N, 0)]))
        if self.dropout is not None and inputs.numbers is not None:
            numbers_N = inputs.numbers.flatten()[sentences.rows.clamp(min=0)]
            pooled_ND = self.dropout(pooled_ND, self.numbers(numbers_N))
        logits_NC = self.classifier(pooled_ND)
        wide = torch.promote_types(logits_NC.dtype, torch.float32)
        logits_NC = sum_out(logits_NC.to(wide) * is_mine_N[:, None], self.sharers)
        # A row that pads an epoch has no sequence.
        questions = max(1, len(sentences.labels))
        return logits_NC.view(len(sentences.labels), logits_NC.numel() // questions or 1)

    def losses(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        """The weighted cross entropy of each label [M], on the first of the cp ranks alone."""
        return self._weighted(x_TD, inputs) * self.counts

    def loss(self, x_TD: Tensor, inputs: Inputs, scale: Scale) -> tuple[Tensor, Tensor]:
        """(the sum of `losses`, that sum times `scale`, whose gradient all sharing ranks need)."""
        total, scaled = weighted_sum(self._weighted(x_TD, inputs), None, scale)
        return total * self.counts, scaled

    def _weighted(self, x_TD: Tensor, inputs: Inputs) -> Tensor:
        logits_MC, sentences = self.logits(x_TD, inputs), inputs.sentences
        assert sentences is not None, "sequences have labels"
        return F.cross_entropy(logits_MC, sentences.labels, reduction="none") * sentences.weights


HEADS: dict[str, Callable[[ModelConfig, LayerFactory, int], nn.Module]] = {
    "lm": lambda model, build, seed: build.embedding("head"),
    "mlm": MaskedTokens,
    "classification": SentenceClasses,
    "multiple_choice": SentenceClasses,
}
