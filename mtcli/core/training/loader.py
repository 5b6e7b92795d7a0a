"""Reads a rank's micro-batches, ahead of training on another thread.

A step's loss is sum(weight * loss) / (labels of the global batch that have a weight); every rank
gets that divisor with the step. Weights are not normalised within a batch, where a common factor
would cancel.

Micro-batch m of data rank r is the mbs samples from consumed + m * (mbs * dp) + r * mbs on: a
global batch holds the same samples on every layout. Each row of a grid of tp ranks has consecutive
samples of that block.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mtcli.core.config.blend import Which
from mtcli.core.config.errors import failed
from mtcli.core.config.phases import PhaseSpan, phases_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.bert.row_format import CountedRows, EncoderBatches
from mtcli.core.data.bert.training_data import encoder_batches
from mtcli.core.data.best_fit import open_conversations
from mtcli.core.data.loader import (
    CountedTokens,
    SampleId,
    SampleOrder,
    TokenBatches,
    require_named,
    require_stated_ids,
)
from mtcli.core.data.prefetch import Prefetcher
from mtcli.core.data.subset import (
    Subset,
    SubsetBatches,
    TokenSequences,
    require_subset,
    token_batches,
)
from mtcli.core.mesh.parameters import stage_layers
from mtcli.core.model.inputs import Inputs
from mtcli.core.parallel.collectives import all_gather
from mtcli.core.parallel.context import zigzag
from mtcli.core.parallel.groups import Groups
from mtcli.core.training.bert_inputs import EncoderInputs, EncoderRead
from mtcli.core.training.consumed_samples import require_sources
from mtcli.core.training.run_tokenizer import extended_tokenizer
from mtcli.core.training.token_inputs import TokenInputs, TokenRead

Read = TokenRead | EncoderRead


class StepBatch(NamedTuple):
    """This rank's part of a global batch."""

    load: Callable[[int], Inputs]  # gives micro-batch m
    labels: float  # labels with a weight: of the global batch, or of an asynchronous replica
    replica_labels: float  # those of this rank's replica
    tokens: float  # of the same batch as `labels`, without padding


class MicroBatchLoader:
    """The micro-batches of this rank, step by step."""

    def __init__(
        self,
        batches: TokenBatches | EncoderBatches,
        config: RunConfig,
        groups: Groups,
        subset: Subset | None = None,
        span: PhaseSpan | None = None,
    ) -> None:
        """`subset` is the one whose members the batches are, if any. Without a `span` there are
        steps as long as there are samples."""
        self.batches, self.config, self.groups = batches, config, groups
        self.span = span or phases_of(config)[0]
        self.end = self.span.samples_before(span.last_step) if span else len(batches)
        self.subset = subset
        cp = groups.cp
        positions = zigzag(config.batch.seq_len, cp.size, cp.rank)
        layers = stage_layers(config.model, groups.layout, config.parallel.stage_layers)
        self.has_blocks = any(layers[stage] for stage in groups.layout.stages(groups.pp_rank))
        kind = TokenInputs if config.model.head == "lm" else EncoderInputs
        self.inputs: TokenInputs | EncoderInputs = kind(config, groups, positions)
        self.share = groups.replicas.rank  # of each global batch, which this replica reads
        # Asks no other replica, and reads nothing ahead.
        self.is_asynchronous = config.sync.asynchronous
        self.next_step = -1
        self.reader: Prefetcher[Read] | None = None

    def step(self, step: int, loss_scale: float) -> StepBatch:
        """The micro-batches of step 0, 1, ...; later ones are read meanwhile.

        A `loss_scale` of 0 means no backward, no dropout and no auxiliary losses. Collective.
        Raises MtcliError where no label of the step has a weight.
        """
        if self.is_asynchronous:
            samples = [self._read(first, self._mbs) for first in self._starts(step)]
        else:
            samples = self._read_ahead(step)
        return self._batch(step, samples, loss_scale)

    def _read_ahead(self, step: int) -> list[Read]:
        if step != self.next_step or self.reader is None:
            self.close()
            self.reader = Prefetcher(self._read, self._wanted(step))
        ready = iter(self.reader)
        self.next_step = step + 1
        return [next(ready) for _ in self._starts(step)]

    def adopt(self, subset: Subset, first: int) -> None:
        """Replaces the subset of the same data from sample `first` on."""
        self.close()
        self.reader, self.next_step = None, -1
        assert isinstance(self.batches, SubsetBatches), "data.subset was set"
        self.batches.adopt(subset, first)

    def sample_ids(self, step: int, micro_batch: int) -> list[SampleId]:
        """Where the tokens of one of this rank's micro-batches come from."""
        return self.batches.sample_ids(self._starts(step)[micro_batch], self._mbs)

    def close(self) -> None:
        """Ends the reader."""
        if self.reader is not None:
            self.reader.close()

    def _batch(self, step: int, samples: list[Read], loss_scale: float) -> StepBatch:
        """Builds a step's batch; ranks exchange counts, 8 bytes each, where labels have weights."""
        columns = zip(*(read.counts for read in samples), strict=True)
        sums, replicas = [self._sums(column) for column in columns], self.groups.layout.replicas
        parts = replicas if self.is_asynchronous else 1
        batch = self.inputs.divisors([total for total, _ in sums], parts)
        replica = self.inputs.divisors([part for _, part in sums], replicas)
        self._require_labels(step, batch.labels)
        aux_scale = loss_scale / (replica.tokens or 1.0)
        build: Callable[..., Inputs] = self.inputs.inputs
        firsts = self._starts(step)

        def load(m: int) -> Inputs:
            numbers = self._numbers(firsts[m], loss_scale)
            return build(samples[m], numbers, replica.class_factor, self.has_blocks, aux_scale)

        # A replica without labels has gradients of 0, whatever they are divided by.
        return StepBatch(load, batch.labels, replica.labels or 1.0, batch.tokens)

    def _wanted(self, step: int) -> Iterator[tuple[int, int]]:
        while self.span.samples_before(step + 1) <= self.end:
            yield from ((start, self._mbs) for start in self._starts(step))
            step += 1

    def _starts(self, step: int) -> range:
        """The first sample of each of this rank's micro-batches of a step."""
        layout = self.groups.layout
        data_rank = self.groups.dp_rank % layout.dp + layout.dp * self.share
        block = self.config.batch.micro_batch_size
        begin, end = self.span.samples_before(step), self.span.samples_before(step + 1)
        first = begin + data_rank * block + self.groups.tp_row.rank * self._mbs
        return range(first, end, block * layout.batch_shards)

    def _read(self, start: int, count: int) -> Read:
        # The batches are of the kind that the head's inputs read.
        read: Callable[..., Read] = self.inputs.read
        return read(self.batches, start, count, self._hosted)

    def _hosted(self, rows: np.ndarray) -> np.ndarray | Tensor:
        """Pins rows for a GPU, which then copies them asynchronously."""
        if self.groups.device.type != "cuda":
            return rows
        return torch.from_numpy(rows).pin_memory()

    def _sums(self, parts: Iterable[float]) -> tuple[float, float]:
        """(the sum over the global batch, that over this rank's replica) of counts by micro-batch;
        the replica's twice where replicas are asynchronous.

        Ranks' sums are added in rank order, so that all get the same: 8 bytes of each data rank.
        """
        groups = self.groups
        local_sum = torch.tensor([sum(parts)], dtype=torch.float64).to(groups.device)
        inside = sum(all_gather(local_sum, groups.axes["samples"]).tolist())
        if self.is_asynchronous:
            return inside, inside
        return sum(all_gather(torch.full_like(local_sum, inside), groups.replicas).tolist()), inside

    def _require_labels(self, step: int, labels: float) -> None:
        """Raises MtcliError where no label of a step's global batch has a weight."""
        if not self.is_asynchronous and not labels:
            first, end = self.span.samples_before(step), self.span.samples_before(step + 1)
            message = f"of samples {first} to {end - 1}, step {step + 1}"
            hint = "leave out samples without weight, or set a larger batch.global_batch_size"
            raise failed(f"{message}, no label has a weight", hint)

    def _numbers(self, first: int, loss_scale: float) -> Tensor | None:
        """Global token numbers [mbs, s] of samples from `first` on; None where none is dropped."""
        model = self.config.model
        drops = model.dropout or model.attention_dropout or self.config.lora.dropout
        if not (loss_scale and drops):
            return None
        ids = torch.arange(first, first + self._mbs, device=self.groups.device)
        return ids[:, None] * self.config.batch.seq_len + self.inputs.positions

    @property
    def _mbs(self) -> int:
        """Sequences of a micro-batch that this rank reads."""
        return self.config.batch.micro_batch_size // self.groups.tp_row.size


def open_loader(
    config: RunConfig,
    groups: Groups,
    *,
    validation: bool = False,
    planned: int | None = None,
    span: PhaseSpan | None = None,
    read: Sequence[int] = (),
) -> MicroBatchLoader:
    """Opens the training (or validation) data of a config, or of a phase's `span`.

    `planned` samples were the run's when it began, or its order of samples, which decides that;
    None: the config's. `read` samples of each source were read before a phase's order. Raises
    MtcliError where there is no data, or its ids do not fit the model's vocabulary.
    """
    require_named(config.data)
    which: Which = "valid" if validation else "train"
    subset = None if validation else require_subset(config)
    first, end = span.samples if span else (0, num_samples(config, which))
    batches = open_batches(config, which, subset, SampleOrder(first, end, planned, read))
    loader = MicroBatchLoader(batches, config, groups, subset, span)
    loader.is_asynchronous = config.sync.asynchronous and not validation
    return loader


def open_batches(
    config: RunConfig, which: Which, subset: Subset | None, order: SampleOrder
) -> TokenBatches | EncoderBatches:
    """Opens the samples of a run as its data.format and its model's head read them."""
    samples = order.end
    if config.data.format == "conversations":
        conversations = open_conversations(config, extended_tokenizer(config), which)
        conversations.num_samples, conversations.planned = samples, order.planned or samples
        return conversations
    if config.model.head != "lm":
        encoded = encoder_batches(config, which, samples)
        if subset is not None:
            require_sources(subset, encoded.prefixes, encoded.files)
        return encoded

    def check(sequences: TokenSequences) -> None:
        if subset is not None:
            where = sequences.prefixes, sequences.files, sequences.shares
            require_sources(subset, *where)

    batches = token_batches(config, which, subset, order, check)
    require_stated_ids(batches.prefixes, config.model.vocab_size)
    return batches


def num_samples(config: RunConfig, which: Which) -> int:
    """Returns the samples of a run without phases, or of one of its evaluations."""
    steps = config.train.eval_batches if which == "valid" else config.train.steps
    return steps * config.batch.global_batch_size


def synthetic_loader(config: RunConfig, groups: Groups) -> MicroBatchLoader:
    """Makes a loader of counted tokens for all of train.steps, for runs without data."""
    samples = config.train.steps * config.batch.global_batch_size
    if config.model.head != "lm":
        return MicroBatchLoader(CountedRows(config, samples), config, groups)
    tokens = CountedTokens(config.batch.seq_len, config.model.vocab_size, samples)
    return MicroBatchLoader(tokens, config, groups)
