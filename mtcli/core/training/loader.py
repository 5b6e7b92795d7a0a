"""From samples to a rank's micro-batches, read ahead off the main thread.

A step's loss is the sum of weight times loss over its labels, by the sum of weights over the global
batch, which every rank is given with the step.

Micro-batch m of data rank r is the contiguous block of samples consumed + m * (mbs * dp) + r * mbs
and so on for mbs samples: a global batch holds the same samples on every layout.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from mtcli.core.config.errors import failed
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.loader import (
    Batches,
    CountedTokens,
    Prefetcher,
    SampleId,
    require_ids,
    require_named,
    require_stated_ids,
)
from mtcli.core.mesh.parameters import stage_layers
from mtcli.core.model.build import DTYPES
from mtcli.core.model.inputs import Inputs, make_inputs
from mtcli.core.parallel.attention_mask import restarted
from mtcli.core.parallel.collectives import all_gather
from mtcli.core.parallel.context import zigzag
from mtcli.core.parallel.groups import Groups


class ReadAhead(NamedTuple):
    """A micro-batch as the reader returns it; for a GPU in pinned memory."""

    tokens: np.ndarray | Tensor  # int64 [mbs, seq_len + 1]
    documents: np.ndarray | Tensor | None  # int32 of the same shape, where the config asks for them
    weights: np.ndarray | Tensor | None  # float32 [mbs, seq_len], of the labels' losses
    weight_sum: float  # of this rank's labels; 0 without weights


class StepBatch(NamedTuple):
    """This rank's part of a global batch."""

    load: Callable[[int], Inputs]  # gives micro-batch m
    weight: float  # sum of the loss weights of the global batch, the same on every rank; or alone
    replica_weight: float  # sum of those of this rank's replica


class MicroBatchLoader:
    """The micro-batches of this rank, step by step."""

    def __init__(self, batches: Batches, config: RunConfig, groups: Groups) -> None:
        self.batches, self.config, self.groups = batches, config, groups
        cp = groups.cp
        positions = zigzag(config.batch.seq_len, cp.size, cp.rank)
        self.positions = positions.to(groups.device)  # of this rank's part of each sequence
        self.host_positions = positions
        layers = stage_layers(config.model, groups.layout, config.parallel.stage_layers)
        self.has_blocks = any(layers[stage] for stage in groups.layout.stages(groups.pp_rank))
        self.share = groups.replicas.rank  # of each global batch, which this replica reads
        self.alone = config.sync.asynchronous  # asks no other replica, and reads nothing ahead
        self.next_step = -1
        self.reader: Prefetcher[ReadAhead] | None = None

    def step(self, step: int, loss_scale: float) -> StepBatch:
        """The micro-batches of step 0, 1, ...; those that follow are read meanwhile.

        A `loss_scale` of 0 says that there is no backward, and leaves dropout and auxiliary losses
        out. Every rank calls it. Raises MtcliError where no label of the step has a weight.
        """
        firsts = self._starts(step)
        if self.alone:
            samples = [self._read(first, self._mbs) for first in firsts]
        else:
            samples = self._read_ahead(step)
        weights = self._weights(step, samples)
        return StepBatch(lambda m: self._inputs(samples[m], firsts[m], loss_scale), *weights)

    def _read_ahead(self, step: int) -> list[ReadAhead]:
        if step != self.next_step or self.reader is None:
            self.close()
            self.reader = Prefetcher(self._read, self._wanted(step))
        ready = iter(self.reader)
        self.next_step = step + 1
        return [next(ready) for _ in self._starts(step)]

    def sample_ids(self, step: int, micro_batch: int) -> list[SampleId]:
        """Where the tokens of one of this rank's micro-batches come from."""
        return self.batches.sample_ids(self._starts(step)[micro_batch], self._mbs)

    def close(self) -> None:
        """Ends the reader."""
        if self.reader is not None:
            self.reader.close()

    def _wanted(self, step: int) -> Iterator[tuple[int, int]]:
        while (step + 1) * self.config.batch.global_batch_size <= len(self.batches):
            yield from ((start, self._mbs) for start in self._starts(step))
            step += 1

    def _starts(self, step: int) -> range:
        """The first sample of each of this rank's micro-batches of a step."""
        size, layout = self.config.batch.global_batch_size, self.groups.layout
        data_rank = self.groups.dp_rank % layout.dp + layout.dp * self.share
        first = step * size + data_rank * self._mbs
        return range(first, (step + 1) * size, self._mbs * layout.batch_shards)

    def _read(self, start: int, count: int) -> ReadAhead:
        data = self.config.data
        asked = data.document_mask or data.document_positions
        documents = self.batches.documents(start, count) if asked else None
        rows = self.batches.batch(start, count)
        require_ids(self.batches, start, rows, self.config.model.vocab_size)
        weights, weight_sum = self.batches.loss_weights(start, count), 0.0
        if weights is not None:
            own = torch.from_numpy(weights)[:, self.host_positions]
            weights, weight_sum = own.numpy(), float(own.sum(dtype=torch.float64))
        return ReadAhead(
            self._hosted(rows), self._hosted(documents), self._hosted(weights), weight_sum
        )

    def _hosted(self, rows: np.ndarray | None) -> np.ndarray | Tensor | None:
        """Rows where the device can fetch them by itself, while this process goes on."""
        if rows is None or self.groups.device.type != "cuda":
            return rows
        return torch.from_numpy(rows).pin_memory()

    def _weights(self, step: int, samples: list[ReadAhead]) -> tuple[float, float]:
        """Sums the loss weights of the global batch, and of this rank's replica: its labels, where
        they weigh 1 each.

        Ranks' sums are added in rank order, so that all get the same: 8 bytes of each data rank.
        """
        size, groups = self.config.batch.global_batch_size, self.groups
        replicas = groups.layout.replicas
        if samples[0].weights is None:
            labels = float(size * self.config.batch.seq_len)
            return labels / (replicas if self.alone else 1), labels / replicas
        own = torch.tensor([sum(read.weight_sum for read in samples)], dtype=torch.float64)
        inside = sum(all_gather(own.to(groups.device), groups.axes["data"]).tolist())
        if self.alone:
            return inside, inside or 1.0
        each = all_gather(torch.tensor([inside], dtype=torch.float64).to(own), groups.replicas)
        weight = sum(each.tolist())
        if not 0.0 < weight < math.inf:
            message = f"the loss weights of samples {step * size} to {(step + 1) * size - 1}"
            hint = "leave out samples without weight, or set a larger batch.global_batch_size"
            raise failed(f"{message}, step {step + 1}, have the sum {weight:g}", hint)
        return weight, inside or 1.0  # by which gradients of nothing are divided

    def _inputs(self, read: ReadAhead, first: int, loss_scale: float) -> Inputs:
        mbs, seq_len, layout = self._mbs, self.config.batch.seq_len, self.groups.layout
        rows = self._on_device(read.tokens)
        positions, documents = self._documents(read)
        model, numbers = self.config.model, None
        if loss_scale and (model.dropout or model.attention_dropout):
            ids = torch.arange(first, first + mbs, device=rows.device)
            numbers = ids[:, None] * seq_len + self.positions
        return make_inputs(
            model,
            DTYPES[self.config.train.precision],
            rows[:, self.positions],
            labels=rows[:, self.positions + 1],
            weights=None if read.weights is None else self._on_device(read.weights),
            positions=positions,
            numbers=numbers,
            documents=documents,
            attended=self.has_blocks,
            aux_scale=loss_scale
            * layout.replicas
            / (self.config.batch.global_batch_size * seq_len),
        )

    def _documents(self, read: ReadAhead) -> tuple[Tensor, Tensor | None]:
        """(positions [mbs, s of this rank], the documents of full rows if they are masked)."""
        positions, data = self.positions.expand(self._mbs, -1), self.config.data
        if read.documents is None:
            return positions, None
        documents = self._on_device(read.documents)[:, :-1].contiguous()
        if data.document_positions:
            positions = restarted(documents)[:, self.positions]
        return positions, documents if data.document_mask else None

    def _on_device(self, rows: np.ndarray | Tensor) -> Tensor:
        return torch.as_tensor(rows).to(self.groups.device, non_blocking=True)

    @property
    def _mbs(self) -> int:
        return self.config.batch.micro_batch_size


def open_loader(
    config: RunConfig, groups: Groups, *, validation: bool = False, planned: int | None = None
) -> MicroBatchLoader:
    """The training (or validation) data of a config, in the order of a run that was `planned` for
    so many samples; None: for those of the config.

    Raises MtcliError where there is no data, or its ids do not fit the model's vocabulary.
    """
    data, steps = config.data, config.train.steps
    require_named(data)
    paths, which, split = data.train, "train", data.split
    if validation:
        steps = config.train.eval_batches
        paths, which, split = data.valid or data.train, "valid", data.split
        if data.valid:
            split = "0,1,0"
    elif data.valid:
        split = "1,0,0"  # data.valid holds nothing back from data.train
    samples = steps * config.batch.global_batch_size
    batches = Batches(paths, split, which, samples, config.batch.seq_len, config.seed, planned)
    require_stated_ids(batches.prefixes, config.model.vocab_size)
    loader = MicroBatchLoader(batches, config, groups)
    loader.alone = config.sync.asynchronous and not validation
    return loader


def synthetic_loader(config: RunConfig, groups: Groups) -> MicroBatchLoader:
    """Micro-batches of counted tokens, as many as the config trains on, for runs without data."""
    samples = config.train.steps * config.batch.global_batch_size
    tokens = CountedTokens(config.batch.seq_len, config.model.vocab_size, samples)
    return MicroBatchLoader(cast(Batches, tokens), config, groups)
