"""Divides a run into phases: spans of its steps, each with a config of its own.

A phase is a config: that of the phase before, with what its [[phase]] table sets. The run's own
tables are phase 0. A phase begins at the first step before which `from_tokens` were trained on, so
that steps are whole. Steps, samples and tokens are counted over the run.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mtcli.core.config.schema import PhaseConfig, RunConfig


class PhaseSpan(NamedTuple):
    """A phase's steps first_step + 1 .. last_step, and the config that they run by."""

    number: int  # of the [[phase]] table in force, from 1 on; 0: none
    config: RunConfig  # has no phases
    first_step: int
    last_step: int
    first_sample: int  # sequences before it
    first_token: int  # tokens before it
    curve: tuple[int, int] = (0, 0)  # (steps before its learning-rate curve, steps of that)
    samples: tuple[int, int] = (0, 0)  # of it and neighbours with the same sources and seq_len

    @property
    def steps(self) -> int:
        """The number of its steps."""
        return self.last_step - self.first_step

    def samples_before(self, step: int) -> int:
        """Returns the sequences of the run's first `step` steps, by this phase's batch."""
        return self.first_sample + (step - self.first_step) * self.config.batch.global_batch_size

    def tokens_before(self, step: int) -> int:
        """Returns the tokens of the run's first `step` steps, by this phase's batch."""
        return self.first_token + (step - self.first_step) * self.config.batch.tokens_per_step


def phases_of(config: RunConfig) -> tuple[PhaseSpan, ...]:
    """Returns the phases of a run in order: a single one without [[phase]]. A phase that begins
    after the end of the run has no steps."""
    spans: list[PhaseSpan] = []
    step = sample = token = 0
    ends = [*(phase.from_tokens for phase in config.phase), None]
    configs = _configs(config)
    for number, (of_phase, end) in enumerate(zip(configs, ends, strict=True)):
        last = config.train.steps
        if end is not None:
            last = min(last, step + -(-max(0, end - token) // of_phase.batch.tokens_per_step))
        span = PhaseSpan(number, of_phase, step, max(step, last), sample, token)
        spans.append(span)
        step, sample = span.last_step, span.samples_before(span.last_step)
        token = span.tokens_before(span.last_step)
    return tuple(_placed(spans, config.phase))


def phase_after(spans: Sequence[PhaseSpan], step: int) -> PhaseSpan:
    """Returns the phase of the last of `step` steps that are done; the first one where none is."""
    return next((span for span in spans if span.first_step < step <= span.last_step), spans[0])


def in_force(config: RunConfig, step: int) -> RunConfig:
    """Returns the config by which step `step` of a run was made."""
    return phase_after(phases_of(config), step).config


def tokens_of(config: RunConfig) -> int:
    """Returns the tokens of a run."""
    last = phases_of(config)[-1]
    return last.tokens_before(last.last_step)


def with_steps_of_tokens(config: RunConfig) -> RunConfig:
    """Sets the steps of a config from its train.tokens, if any."""
    if not config.train.tokens:
        return config
    step = token = 0
    ends = [*(min(one.from_tokens, config.train.tokens) for one in config.phase)]
    for of_phase, end in zip(_configs(config), [*ends, config.train.tokens], strict=True):
        count = -(-max(0, end - token) // of_phase.batch.tokens_per_step)
        step, token = step + count, token + count * of_phase.batch.tokens_per_step
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": step})})


def _configs(config: RunConfig) -> list[RunConfig]:
    """Lists the config of each phase, the run's own first."""
    configs = [config.model_copy(update={"phase": ()})] if config.phase else [config]
    for phase in config.phase:
        configs.append(_changed(configs[-1], phase))
    return configs


def _changed(config: RunConfig, phase: PhaseConfig) -> RunConfig:
    """Applies a phase's settings to the config before it. A curve of its own has no warm-up and
    decays over all of its steps, unless it says so."""
    sections = {}
    for name in ("batch", "optimizer", "data", "model"):
        settings = getattr(phase, name) or ()
        given = {field: value for field, value in settings if value is not None}
        if name == "optimizer" and given:
            given = {"warmup_steps": 0, "decay_steps": 0} | given
        if given:
            sections[name] = getattr(config, name).model_copy(update=given)
    return config.model_copy(update=sections) if sections else config


def _placed(spans: list[PhaseSpan], phases: Sequence[PhaseConfig]) -> list[PhaseSpan]:
    """Adds to each phase the steps of its learning-rate curve, and its samples of one order."""
    pairs = zip(spans, spans[1:], strict=False)
    curves = [0, *(number for number, one in enumerate(phases, 1) if begins_curve(one))]
    orders = [0, *(second.number for first, second in pairs if _order(first) != _order(second))]
    placed = []
    for span in spans:
        first, last = _around(curves, span.number, spans)
        curve = first.first_step, last.last_step - first.first_step
        first, last = _around(orders, span.number, spans)
        samples = first.first_sample, last.samples_before(last.last_step)
        placed.append(span._replace(curve=curve, samples=samples))
    return placed


def begins_curve(phase: PhaseConfig) -> bool:
    """Says whether a phase begins a learning-rate curve: it sets a field of one."""
    return any(value is not None for _, value in phase.optimizer or ())


def _order(span: PhaseSpan) -> tuple[tuple[str, ...], int]:
    """Returns what the order of a phase's samples depends on."""
    return span.config.data.train, span.config.batch.seq_len


def _around(
    heads: Sequence[int], number: int, spans: Sequence[PhaseSpan]
) -> tuple[PhaseSpan, PhaseSpan]:
    """Returns the first and the last of the phases around one that begin with the same head."""
    last = min([head for head in heads if head > number], default=len(spans)) - 1
    return spans[max(head for head in heads if head <= number)], spans[last]
