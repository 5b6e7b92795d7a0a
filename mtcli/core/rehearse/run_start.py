"""Rehearses the start of a run, for `mtcli train --dry-run`: its checks, header and first batch,
and the memory and time that `plan` predicts. Writes nothing, in one process for all ranks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from mtcli.core.checkpoint.run_progress import planned_samples, progress_of
from mtcli.core.config.counts import duration
from mtcli.core.config.errors import collect_errors
from mtcli.core.config.phases import PhaseSpan, phase_after, phases_of, tokens_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import shown
from mtcli.core.data.bert.row_format import EncoderBatches
from mtcli.core.data.indexed import tokenizer_folder
from mtcli.core.data.loader import CountedTokens, SampleOrder, TokenBatches, require_ids
from mtcli.core.data.subset import require_subset
from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.data.tokenized import TextData
from mtcli.core.mesh.parameters import count_parameters
from mtcli.core.parallel.groups import Axis, world_axis
from mtcli.core.plan.answer import PlanAnswer
from mtcli.core.plan.budget import PhasePlan
from mtcli.core.plan.hardware import NAMES, device_named, for_run, gib
from mtcli.core.plan.memory import state_bytes
from mtcli.core.plan.tables import figures
from mtcli.core.plan.workload import Workload
from mtcli.core.rehearse.request import planned
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.runtime.peak_flops import device_name
from mtcli.core.training.consumed_samples import ConsumedSamples, data_hashes
from mtcli.core.training.loader import num_samples, open_batches
from mtcli.core.training.phase_data import samples_of_sources
from mtcli.core.training.run_log import data_header, run_header
from mtcli.core.training.run_tokenizer import extended_tokenizer
from mtcli.core.training.state import StartingPoint, starting_notes, starting_point, with_tokenizer

ROWS = 64  # that are read at once
SHOWN_TOKENS = 64  # of the first row, as text


class FirstBatch(NamedTuple):
    """The global batch of a run's next step, with the counts of its rows."""

    first_sample: int
    sequences: int
    tokens: int  # without padding
    padding: int
    labels: int  # tokens, or sequences of a classifier, whose loss has a weight
    documents: int  # parts of rows: a document that spans two rows counts in each
    text: str | None  # the beginning of the first row; None without a tokenizer

    def __str__(self) -> str:
        words = f"{self.sequences:,} rows, {self.tokens:,} tokens in {self.documents:,} documents, "
        words += f"{self.labels:,} with a loss"
        return words + (f": {shown(self.text)}" if self.text else "")


@dataclass(frozen=True)
class RunStart:
    """A run on `world` ranks that is about to start, or to go on, after `start.step` steps."""

    config: RunConfig
    world: int
    start: StartingPoint
    header: dict[str, str]
    notes: list[str]
    batch: FirstBatch | None  # None where all steps are done, or the data is not tokenized yet
    plan: PlanAnswer | None  # of the steps that are left; None of a device that plan does not know

    @property
    def seconds(self) -> float | None:
        """The predicted seconds of the steps that are left, without evaluations and saves."""
        return sum(one.seconds for one in self.plan.phases) if self.plan else None

    @property
    def lines(self) -> dict[str, str]:
        """The run's header, its first batch, and its planned memory and time, by name."""
        lines = self.header | ({"batch": str(self.batch)} if self.batch else {})
        if self.plan and self.seconds is not None:
            p, most = self.plan.prediction, self.plan.fullest.memory.total
            device = f"{p.device.name}'s {gib(p.device.memory_bytes)}"
            lines["memory"] = f"{gib(most)} of {device} on the fullest rank (planned)"
            tokens = p.work.tokens_per_step / p.step_seconds
            lines["time"] = f"{p.step_seconds:.4g} s a step, {tokens:,.0f} tokens/s: "
            lines["time"] += f"{duration(math.ceil(self.seconds))} (planned)"
        return lines

    def as_json(self) -> dict[str, Any]:
        """Returns what the run would be, with the keys that it would have at its end."""
        c, plan = self.config, self.plan
        return {
            "dry_run": True,
            "run": c.train.output,
            "world": self.world,
            "parameters": count_parameters(c.model),
            "from": str(self.start),
            "first_step": self.start.step,
            "steps": c.train.steps,
            "tokens": tokens_of(c),
            "seconds": self.seconds,
            "batch": self.batch and self.batch._asdict(),
            "notes": self.notes,
            "header": self.header,
            "plan": plan and figures(plan.prediction),
            **({"phases": [one.as_json() for one in plan.phases]} if plan and c.phase else {}),
        }

    def require_fit(self) -> None:
        """Raises MtcliError (exit 1) where the plan does not fit."""
        if self.plan:
            self.plan.require_fit()


def rehearse_start(
    config: RunConfig, world: int, device: torch.device, pending: Sequence[TextData] = ()
) -> RunStart:
    """Checks what a run on `world` ranks checks before its first step, and plans it on a device.
    Without a batch where its data is text that is `pending`.

    Raises MtcliError where the run's checkpoint, initial weights or data are wrong.
    """
    axis = world_axis(0, 1, FlightRecorder())
    start = starting_point(config, axis)
    config = with_tokenizer(config, start)
    work = Workload.of(config, world)
    header = run_header(config, world, sum(state_bytes(work, 0)), str(start))
    notes, batch = list[str](), None
    if pending:
        count = config.train.steps * config.batch.global_batch_size
        no_data = CountedTokens(config.batch.seq_len, config.model.vocab_size, count)
        header |= data_header(config, no_data, device)
        header["data"] = "; ".join(text.estimate() for text in pending)
    else:
        batches, batch = _read_data(config, start, axis)
        notes = starting_notes(config, start)
        header |= data_header(config, batches, device)
    start.close()
    plan = _planned(config, world, device, start.step)
    return RunStart(config, world, start, header, notes, batch, plan)


def _planned(
    config: RunConfig, world: int, device: torch.device, steps_done: int
) -> PlanAnswer | None:
    """Plans the steps of a run that are left, on a device; None of one that plan does not know."""
    if (name := device_name(device)) not in NAMES:
        return None
    spans, of_run = phases_of(config), for_run(device_named(name), config, world)
    left = [(span, min(span.steps, span.last_step - steps_done)) for span in spans]
    phases = tuple(
        PhasePlan(span.number, steps, planned(span.config, world, of_run))
        for span, steps in left
        if steps > 0
    )
    prediction = phases[0].prediction if phases else planned(spans[-1].config, world, of_run)
    return PlanAnswer(config, prediction, phases=phases)


def _read_data(
    config: RunConfig, start: StartingPoint, world: Axis
) -> tuple[TokenBatches | EncoderBatches, FirstBatch | None]:
    """Opens what a run reads where it starts, and its next batch, if a step is left."""
    phases, subset = phases_of(config), require_subset(config)
    span, following = phase_after(phases, start.step), phase_after(phases, start.step + 1)
    record, begun_with = None, None
    if start.checkpoint and start.is_own:
        record, begun_with = (
            progress_of(start.checkpoint).samples,
            planned_samples(start.checkpoint),
        )

    def opened(
        span: PhaseSpan, planned: int | None, read: Mapping[str, int]
    ) -> TokenBatches | EncoderBatches:
        read_samples = samples_of_sources(span.config, read, 0, world)
        return open_batches(
            span.config, "train", subset, SampleOrder(*span.samples, planned, read_samples)
        )

    valid = SampleOrder(0, num_samples(span.config, "valid"))
    sets = span.config.data.valid_sets if config.train.eval_every else {}
    configs = map(span.config.validating, sets)
    batches, *_ = collect_errors(
        lambda: opened(span, begun_with, record.read if record else {}),
        *(partial(open_batches, one, "valid", None, valid) for one in configs),
    )
    samples = ConsumedSamples(config, batches, data_hashes(batches, 0, world), subset, span)
    if start.checkpoint and start.is_own:
        samples.resume(record, span.samples_before(start.step))
    if start.step >= config.train.steps:
        return batches, None
    if following.number != span.number:
        batches = opened(following, *samples.order_of(following))
    return batches, _first_batch(following, batches, start.step)


def _first_batch(
    span: PhaseSpan, batches: TokenBatches | EncoderBatches, steps_done: int
) -> FirstBatch:
    """Reads the global batch of the step after `steps_done` ones, and counts. Raises MtcliError for
    ids that the vocabulary lacks."""
    config = span.config
    size = config.batch.global_batch_size
    first = span.samples_before(steps_done)
    counts, beginning = np.zeros(4, np.int64), np.empty(0, np.int64)
    for start in range(first, first + size, ROWS):
        rows = _read(config, batches, start, min(ROWS, first + size - start))
        counts += rows.counts
        beginning = beginning if start > first else rows.ids[0, :SHOWN_TOKENS]
    tokens, padding, labels, documents = counts.tolist()
    prefix = batches.sample_ids(first, 1)[0].prefix if config.data.format == "tokens" else None
    text = _text(config, prefix, beginning)
    return FirstBatch(first, size, tokens, padding, labels, documents, text)


class _Rows(NamedTuple):
    """Rows of a batch: ids, the documents they are of, which fill the row up (each [n, seq_len]),
    and the number of labels whose loss has a weight."""

    ids: np.ndarray
    documents: np.ndarray
    padding: np.ndarray
    labels: int

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """(tokens, padding, labels, documents)."""
        real = ~self.padding
        begins = np.diff(self.documents, axis=1, prepend=-1) != 0
        tokens = int(real.sum())
        return tokens, real.size - tokens, self.labels, int((begins & real).sum())


def _read(
    config: RunConfig, batches: TokenBatches | EncoderBatches, start: int, count: int
) -> _Rows:
    if config.model.head != "lm":
        rows = cast(EncoderBatches, batches).rows(start, count)
        weights = rows.weights if config.model.head == "mlm" else rows.class_weights
        return _Rows(rows.tokens, rows.documents, rows.padding, int(np.count_nonzero(weights)))
    of_tokens = cast(TokenBatches, batches)
    ids = of_tokens.batch(start, count)
    require_ids(of_tokens, start, ids, config.model.vocab_size)
    ids, documents = ids[:, :-1], of_tokens.documents(start, count)[:, :-1]
    loss_weights = of_tokens.loss_weights(start, count)
    padding = of_tokens.padding(start, count)
    labels = ids.size if loss_weights is None else int(np.count_nonzero(loss_weights))
    return _Rows(ids, documents, np.zeros(ids.shape, bool) if padding is None else padding, labels)


def _text(config: RunConfig, prefix: str | None, ids: np.ndarray) -> str | None:
    """Decodes ids by the tokenizer of the data at `prefix`, of the config, or of the initial
    weights; None without one."""
    spec = (prefix and tokenizer_folder(prefix)) or config.data.tokenizer
    spec = spec or extended_tokenizer(config)
    return load_tokenizer(spec).decode(ids.tolist()) if spec else None
