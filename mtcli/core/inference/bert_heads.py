"""Runs an encoder's head on rows: losses of masked tokens, logits of sequences."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from mtcli.core.data.bert.row_format import EncoderRows
from mtcli.core.inference.model import InferenceModel
from mtcli.core.model.heads import MaskedTokens, SentenceClasses
from mtcli.core.model.inputs import Inputs, Sentences, make_inputs, token_positions
from mtcli.core.parallel.collectives import all_reduce
from mtcli.core.parallel.factory import TokenLoss
from mtcli.kernels.gemm import DTYPES


class HeadOutput(NamedTuple):
    """A head's outputs for R rows: summed losses of predicted tokens, and logits of sequences."""

    losses_R: Tensor  # float64: nats, weighted
    logits_MC: Tensor  # float64; none where the head classifies no sequence


@torch.no_grad()
def head_outputs(model: InferenceModel, batches: Sequence[EncoderRows]) -> list[HeadOutput]:
    """Runs the head on batches of rows, divided over data ranks; returns all outputs on every rank.

    With experts, which are sharded over data ranks, all ranks run all batches.
    """
    config, layout = model.config.model, model.groups.layout
    classes = {"mlm": 2 * config.sentence_order, "classification": config.num_labels}
    sizes = []
    for rows in batches:
        labels = len(rows.classes)
        shape = labels, classes.get(config.head, len(rows.firsts) // max(1, labels))
        sizes.append((len(rows.tokens), shape))
    ends = [*accumulate((count + prod(shape) for count, shape in sizes), initial=0)]
    flat = torch.zeros(ends[-1], dtype=torch.float64, device=model.groups.device)
    answers = model.groups.axes["tp_grid"].rank == 0
    for number, rows in enumerate(batches):
        owner = 0 if config.num_experts else number % layout.dp
        if owner == model.groups.dp_rank or config.num_experts:
            output = _outputs(model, _inputs(model, rows))
            # one rank of each replica answers
            if output is not None and owner == model.groups.dp_rank and answers:
                flat[ends[number] : ends[number + 1]] = output
    flat = all_reduce(flat, model.groups.world).cpu()
    return [
        HeadOutput(flat[start : start + count], flat[start + count : end].view(shape))
        for start, end, (count, shape) in zip(ends, ends[1:], sizes, strict=False)
    ]


def class_logits(model: InferenceModel, tokens: Tensor) -> Tensor:
    """The logits [b, C] of a classifying head, for rows [b, s] of one sequence each."""
    (count, size), ids = tokens.shape, tokens.numpy()
    none, ones = np.zeros((count, size), np.float32), np.ones(count, np.float32)
    zeros, firsts = np.zeros((count, size), np.int64), np.arange(count) * size
    documents = zeros.astype(np.int32)
    rows = EncoderRows(ids, zeros, documents, ids, none, firsts, zeros[:, 0], ones)
    return head_outputs(model, [rows])[0].logits_MC


def _outputs(model: InferenceModel, inputs: Inputs) -> Tensor | None:
    """(losses of rows, logits), concatenated, on the last stage's ranks."""
    outputs = model.forward([inputs])
    if not outputs:
        return None
    stage = model.stages[model.groups.layout.num_stages - 1]
    if model.config.model.head != "mlm":
        logits = cast(SentenceClasses, stage.head).logits(outputs[0], inputs)
        return torch.cat([logits.new_zeros(inputs.shape[0]), logits.flatten()]).double()
    head = cast(MaskedTokens, stage.head)
    parts = [head.row_losses(outputs[0], inputs, cast(TokenLoss, stage.output))]
    if head.order is not None:
        parts.append(head.order.logits(outputs[0], inputs).flatten().double())
    return torch.cat(parts)


def _inputs(model: InferenceModel, rows: EncoderRows) -> Inputs:
    device, padding = model.groups.device, torch.from_numpy(rows.padding)
    moved = (torch.as_tensor(array).to(device) for array in rows)
    tokens, token_types, documents, labels, weights, *sentences = moved
    return make_inputs(
        model.config.model,
        DTYPES[model.config.train.precision],
        tokens,
        token_types=token_types,
        labels=labels,
        weights=weights,
        padding=padding.to(device),
        positions=token_positions(documents, model.config.model),
        documents=documents,
        sentences=Sentences(*sentences),
    )
