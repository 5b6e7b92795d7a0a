"""Builds an encoder's inputs: rows of several sequences, tokens to predict, sequences to classify.

The loss of a step is (sum of token losses) / P + (sum of sequence losses) / C, for the P predicted
tokens and C labelled sequences of the global batch that have a weight. Weights of sequences times
P / C make both one sum over P.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtcli.core.config.schema import RunConfig
from mtcli.core.data.bert.row_format import EncoderBatches
from mtcli.core.model.inputs import Inputs, Sentences, make_inputs, token_positions
from mtcli.core.parallel.groups import Groups
from mtcli.core.training.token_inputs import Divisors, Hosted
from mtcli.kernels.gemm import DTYPES


class EncoderRead(NamedTuple):
    """A micro-batch as the reader returns it; for a GPU in pinned memory."""

    rows: tuple[np.ndarray | Tensor, ...]  # the fields of EncoderRows
    counts: tuple[int, int, int]  # this rank's predicted tokens, classified sequences, tokens
    padding: np.ndarray | Tensor  # bool [n, this rank's s]


class EncoderInputs:
    """Builds this rank's inputs from rows, whose sequences do not attend to each other."""

    def __init__(self, config: RunConfig, groups: Groups, positions: Tensor) -> None:
        """`positions` [s] are the columns of a full row that this cp rank has, on the host."""
        self.model, self.dtype = config.model, DTYPES[config.train.precision]
        self.groups, self.size = groups, config.batch.seq_len
        self.host_positions = np.array(positions.tolist())  # of fake tensors in a dry run, too
        self.positions = positions.to(groups.device)
        index = torch.full((self.size,), -1)
        index[positions] = torch.arange(len(positions))
        self.index = index.to(groups.device)  # of each position of a row among this rank's, or -1

    def read(self, batches: EncoderBatches, start: int, count: int, hosted: Hosted) -> EncoderRead:
        """Reads rows start .. start + count - 1, and counts; see `TokenInputs.read`."""
        rows = batches.rows(start, count)
        padding = rows.padding[:, self.host_positions]
        # Every cp rank has all labels of sequences, and one of them counts them.
        class_weights = rows.class_weights if self.groups.cp.rank == 0 else ()
        counts = (
            int(np.count_nonzero(rows.weights[:, self.host_positions])),
            int(np.count_nonzero(class_weights)),
            int(np.count_nonzero(~padding)),
        )
        return EncoderRead(tuple(hosted(array) for array in rows), counts, hosted(padding))

    def divisors(self, counts: Sequence[float], parts: int) -> Divisors:
        """The divisors by the `counts` of EncoderRead, summed over a global batch or a replica."""
        predicted, classified, tokens = counts
        if self.model.head != "mlm":
            return Divisors(classified, tokens)
        return Divisors(predicted, tokens, predicted / max(1.0, classified))

    def inputs(
        self,
        read: EncoderRead,
        numbers: Tensor | None,
        class_factor: float,
        attended: bool,
        aux_scale: float,
    ) -> Inputs:
        """Builds a micro-batch's inputs on the device; see `TokenInputs.inputs`."""
        tokens, types, documents, labels, weights, firsts, classes, class_weights, padding = (
            torch.as_tensor(x).to(self.groups.device, non_blocking=True)
            for x in (*read.rows, read.padding)
        )
        columns, documents = self.positions, documents.contiguous()
        index = self.index[firsts % self.size]
        at = torch.where(index < 0, -1, firsts // self.size * len(columns) + index)
        return make_inputs(
            self.model,
            self.dtype,
            tokens[:, columns],
            token_types=types[:, columns],
            labels=labels[:, columns],
            weights=weights[:, columns],
            padding=padding,
            positions=token_positions(documents, self.model)[:, columns],
            documents=documents,
            sentences=Sentences(at, classes, class_weights * class_factor),
            numbers=numbers,
            context=None if attended else 0,
            aux_scale=aux_scale,
        )
