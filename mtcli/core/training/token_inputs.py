"""Builds a language model's inputs from rows of tokens, and documents and loss weights if any.

A label weighs 1 where the data has no weights.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtcli.core.config.schema import RunConfig
from mtcli.core.data.loader import TokenBatches, require_ids
from mtcli.core.model.inputs import Inputs, make_inputs
from mtcli.core.parallel.attention_mask import Documents, document_starts, restarted
from mtcli.core.parallel.groups import Groups
from mtcli.kernels.attention.varlen import PackedDocuments
from mtcli.kernels.gemm import DTYPES

Hosted = Callable[[np.ndarray], np.ndarray | Tensor]


class TokenRead(NamedTuple):
    """A micro-batch as the reader returns it; for a GPU in pinned memory."""

    tokens: np.ndarray | Tensor  # int64 [mbs, seq_len + 1]
    documents: np.ndarray | Tensor | None  # int32 of the same shape, where the config asks for them
    packed: tuple[np.ndarray | Tensor, int] | None  # `document_starts` of the columns that attend
    weights: np.ndarray | Tensor | None  # float32 [mbs, this rank's s], of the labels' losses
    padding: np.ndarray | Tensor | None  # bool [mbs, this rank's s]
    counts: tuple[int, ...]  # this rank's labels that have a weight, and tokens; () without weights


class Divisors(NamedTuple):
    """The divisors of a batch's sums."""

    labels: float  # labels with a weight; divides the summed loss
    tokens: float  # tokens without padding; divides the summed losses of routers
    class_factor: float = 1.0  # multiplies weights of sequences' labels: both sums share `labels`


def packs_documents(config: RunConfig) -> bool:
    """Whether kernels on a GPU may be told the documents of each micro-batch by the host.

    Of what is compiled or replayed, no size may follow from the data, and a ring has no full rows.
    """
    fixed = config.train.compile or config.train.cuda_graphs
    full = config.parallel.cp == 1 or config.parallel.cp_mode == "a2a"
    return config.data.document_mask and full and not fixed


class TokenInputs:
    """Builds this rank's inputs from rows of tokens."""

    def __init__(self, config: RunConfig, groups: Groups, positions: Tensor) -> None:
        """`positions` [s] are the columns of a full row that this cp rank has, on the host."""
        self.config, self.device = config, groups.device
        self.host_positions, self.positions = positions, positions.to(groups.device)
        self.packs = self.device.type != "cpu" and packs_documents(config)

    def read(self, batches: TokenBatches, start: int, count: int, hosted: Hosted) -> TokenRead:
        """Reads samples start .. start + count - 1, and counts this rank's labels and tokens.

        `hosted` moves an array to where the device can fetch it. Raises MtcliError for ids that the
        vocabulary lacks.
        """
        data = self.config.data
        asked = data.document_mask or data.document_positions
        documents = batches.documents(start, count) if asked else None
        rows = batches.batch(start, count)
        require_ids(batches, start, rows, self.config.model.vocab_size)
        weights, padding = (
            None if x is None else torch.from_numpy(x)[:, self.host_positions].numpy()
            for x in (batches.loss_weights(start, count), batches.padding(start, count))
        )
        assert padding is None or weights is not None, "what fills rows up has no loss"
        counts: tuple[int, ...] = ()
        if weights is not None:
            filled = 0 if padding is None else np.count_nonzero(padding)
            counts = int(np.count_nonzero(weights)), int(weights.size - filled)
        hosted_documents, hosted_weights, hosted_padding = (
            None if x is None else hosted(x) for x in (documents, weights, padding)
        )
        packed = None
        if documents is not None and self.packs:
            starts, longest = document_starts(documents[:, :-1])
            packed = hosted(starts), longest
        return TokenRead(
            hosted(rows), hosted_documents, packed, hosted_weights, hosted_padding, counts
        )

    def divisors(self, counts: Sequence[float], parts: int) -> Divisors:
        """The divisors of sums over a global batch, or the 1 / `parts` of it that a replica has.

        `counts` are those of TokenRead, summed; empty where every label weighs 1.
        """
        labels, tokens = counts or [self.config.batch.tokens_per_step / parts] * 2
        return Divisors(labels, tokens)

    def inputs(
        self,
        read: TokenRead,
        numbers: Tensor | None,
        class_factor: float,
        attended: bool,
        aux_scale: float,
    ) -> Inputs:
        """Builds a micro-batch's inputs on the device.

        `numbers` are the tokens' global numbers [mbs, s] for dropout; `attended` says whether this
        rank has blocks; `aux_scale` is that of one token's auxiliary loss.
        """
        rows = self._on_device(read.tokens)
        positions, documents = self._documents(read)
        return make_inputs(
            self.config.model,
            DTYPES[self.config.train.precision],
            rows[:, self.positions],
            labels=rows[:, self.positions + 1],
            weights=None if read.weights is None else self._on_device(read.weights),
            padding=None if read.padding is None else self._on_device(read.padding),
            positions=positions,
            numbers=numbers,
            documents=documents,
            context=self.config.batch.seq_len if attended else 0,
            aux_scale=aux_scale,
        )

    def _documents(self, read: TokenRead) -> tuple[Tensor, Documents | None]:
        """(positions [mbs, s of this rank], documents of full rows where attention masks them)."""
        positions, data = self.positions.expand(len(read.tokens), -1), self.config.data
        if read.documents is None:
            return positions, None
        documents = self._on_device(read.documents)[:, :-1].contiguous()
        if data.document_positions:
            positions = restarted(documents)[:, self.positions]
        if not data.document_mask:
            return positions, None
        if read.packed is None:
            return positions, Documents(documents)
        starts, longest = read.packed
        packed = PackedDocuments(self._on_device(starts), longest)
        return positions, Documents(documents, packed)

    def _on_device(self, rows: np.ndarray | Tensor) -> Tensor:
        return torch.as_tensor(rows).to(self.device, non_blocking=True)
