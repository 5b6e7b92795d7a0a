"""Prints a run's numbers before it starts, its progress and its warnings; writes its records.

Progress is a bar on a terminal, and elsewhere a line now and then, of names and values.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import Any, Self

import torch
from tqdm import tqdm

from mtcli.core.config.counts import counted, duration
from mtcli.core.config.errors import MtcliError, visible
from mtcli.core.config.fp8 import listed, narrow_layers, weight_sizes
from mtcli.core.config.phases import PhaseSpan, phases_of, tokens_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.sync import mixing_rule
from mtcli.core.config.untrusted import shown
from mtcli.core.data.loader import RunData
from mtcli.core.data.tokenized import describe_texts
from mtcli.core.data.vocabulary import describe_vocabulary
from mtcli.core.exchange.methods import METHODS
from mtcli.core.mesh.parameters import count_adapters, count_parameters, run_parameters
from mtcli.core.mesh.update_table import COLUMNS, TITLE, update_table
from mtcli.core.runtime.console import print_table
from mtcli.core.runtime.launch import Runtime
from mtcli.core.runtime.progress import LINE_SECONDS, write_line
from mtcli.core.runtime.worker_errors import LAUNCHED
from mtcli.core.training.metrics import RunRecords, SaveRecord, StepFacts
from mtcli.core.training.run_folder import how_it_goes_on
from mtcli.core.training.save_schedule import SaveSchedule
from mtcli.core.training.step import Step
from mtcli.core.training.token_inputs import packs_documents
from mtcli.kernels.attention.backends import backend_name, sdpa_backends
from mtcli.kernels.attention.library import library_for
from mtcli.kernels.attention.varlen import takes_documents
from mtcli.kernels.gemm import DTYPES

BAR = "{percentage:3.0f}% {n_fmt}/{total_fmt} |{bar:6}| {elapsed}<{remaining}{postfix}"


def describe_attention(config: RunConfig, device: torch.device) -> dict[str, str]:
    """Names the kernels of attention on a GPU, as a line of the run's numbers; none on a CPU."""
    m, p = config.model, config.parallel
    if device.type != "cuda":
        return {}
    if m.attention_dropout:
        return {"sdpa": "mtcli's masked softmax, with dropout of probabilities"}
    reasons = {"documents": config.data.document_mask, "a soft cap": bool(m.attention_softcap)}
    reasons |= {"sinks": m.attention_sinks, "windows": bool(m.window)}
    words = [word for word, is_so in reasons.items() if is_so]
    dtype = DTYPES[config.train.precision]
    heads = m.num_heads, m.num_heads if dtype == torch.float32 else m.num_kv_heads
    q, k = (torch.empty(1, n, 1024, m.head_dim, dtype=dtype, device=device) for n in heads)
    texts = [f"mtcli's kernel for {', '.join(words)}"] if words else []
    if packs_documents(config) and not {*words} - {"documents", "windows"} and takes_documents(q):
        texts = ["FlashAttention of packed documents"]
    with sdpa_backends(device, repeats=True):
        if p.cp > 1 and p.cp_mode == "ring":
            library = library_for("attention", q, k)
            texts.insert(0, "mtcli's kernel" if library is None else library.name)
        elif words in ([], ["windows"]):
            texts.insert(0, backend_name(q.requires_grad_(), k, m.causal))
    return {"sdpa": ", ".join(texts)}


def run_header(config: RunConfig, world: int, rank_bytes: int, start: str) -> dict[str, str]:
    """Words the numbers of a run on `world` ranks, by name; rank 0 has `rank_bytes` of weights,
    gradients and optimizer, and the weights come from `start`."""
    tokens, phases = config.batch.tokens_per_step, phases_of(config)[1:]
    fills = config.data.format == "tokens" and config.model.head == "lm"
    most = "" if fills else "at most "  # what fills rows up is no token
    return {
        "model": _model(config),
        "layout": f"{counted(world, 'rank')}: {_axes(config, world)}",
        "step": f"{most}{tokens:,} tokens, {_precision(config, world)}",
        "run": f"{counted(config.train.steps, 'step')}, {most}{tokens_of(config):,} tokens",
        **{f"phase {span.number}": describe_phase(config, span) for span in phases},
        "sync": _sync(config, world),
        "rank 0": f"{rank_bytes / 2**20:,.1f} MiB of weights, gradients and optimizer",
        "from": start,
        "output": config.train.output,
    }


def data_header(config: RunConfig, batches: RunData, device: torch.device) -> dict[str, str]:
    """Words what a run reads, by which kernels it attends, and when it saves, by name."""
    saves = SaveSchedule(config.train, config.data.reselect_every)
    lines = describe_texts(config) | describe_vocabulary(config) | batches.describe()
    lines |= describe_attention(config, device)
    return lines | {"saves": str(saves)}


def print_header(config: RunConfig, header: Mapping[str, str]) -> None:
    """Prints the numbers of a run, and the table of its optimizers where these are several."""
    for name, text in header.items():
        sys.stdout.write(visible(f"{name:<6} {text}\n"))
    if updates := update_table(config.model, config.lora, config.optimizer):
        print_table(TITLE, COLUMNS, updates)


class RunLog:
    """Rank 0's records and messages; the same calls on other ranks print nothing."""

    def __init__(self, config: RunConfig, speaks: bool, step: int) -> None:
        self.config, self.speaks, self.first_step = config, speaks, step
        self.records = RunRecords(config, speaks, self._say)
        self.bar: Any = None
        self.begun_at = self.line_at = 0.0  # of the clock: the first step, and the last line
        self.last_saved: Path | None = None
        self.loss_scale = 1.0  # that was last shown

    def begin(self, runtime: Runtime, header: Mapping[str, str]) -> None:
        """Prints the run's numbers, by name, and opens the record files."""
        self.records.begin(runtime, self.first_step)
        if not self.speaks:
            return
        print_header(self.config, header)
        self.begun_at = monotonic()
        if sys.stderr.isatty():
            total, first = self.config.train.steps, self.first_step
            self.bar = tqdm(total=total, initial=first, bar_format=BAR, file=sys.stderr)

    def enter(self, span: PhaseSpan) -> None:
        """Records the steps of a phase from here on."""
        self.records.span = span
        if span.number:
            self._say(f"phase {span.number}: {describe_phase(self.config, span)}")

    def step(self, step: Step, facts: StepFacts) -> None:
        """Records a step."""
        if not self.speaks:
            return
        row = self.records.step(step, facts)
        if step.outcome == "overflow":
            what = f"gradients overflow at loss scale {step.loss_scale:,g}"
            self.warn(f"step {step.step} skipped, {what}")
        is_due = step.step % self.config.train.log_every == 0
        if self.bar is None:
            ends = step.step == self.config.train.steps or "valid_loss" in row or facts.tasks
            if ends or (is_due and monotonic() - self.line_at >= LINE_SECONDS):
                self.line_at = monotonic()
                self._say(f"step {step.step}/{self.config.train.steps} {self._figures(row)}")
            return
        if is_due:
            self.bar.set_postfix_str(self._figures(row), refresh=False)
        self.bar.update(step.step - self.bar.n)  # draws the line, so it comes last

    def _figures(self, row: dict[str, Any]) -> str:
        """Words a step's record as names and values, what matters first: 80 columns may be all
        there are. The loss scale only where it has changed."""
        figures = {"loss": f"{row['loss']:.4f}"}
        if "valid_loss" in row:
            figures["valid"] = f"{row['valid_loss']:.4f}"
        named = {key: key.removeprefix("valid_loss/") for key in row if "valid_loss/" in key}
        named |= dict(_first_figures(row))
        figures |= {name: f"{row[key]:.4f}" for key, name in named.items()}
        figures["grad_norm"] = f"{row['grad_norm']:.4g}"
        figures["tokens/s"] = f"{row['tokens_per_second']:.0f}"
        if row["mfu"] is not None:
            figures["mfu"] = f"{row['mfu']:.1%}"
        figures["lr"] = f"{row['lr']:.2e}"
        if row["loss_scale"] != self.loss_scale:
            self.loss_scale = row["loss_scale"]
            figures["loss_scale"] = f"{self.loss_scale:g}"
        if self.bar is None:
            figures["memory_gib"] = f"{row['memory_bytes'] / 2**30:.2f}"
            done = row["step"] - self.first_step
            left = (monotonic() - self.begun_at) / done * (self.config.train.steps - row["step"])
            figures["left"] = duration(left)
        return " ".join(f"{name} {value}" for name, value in figures.items())

    def saved(self, save: SaveRecord) -> None:
        """Records a checkpoint, and how long training stood still for it."""
        self.last_saved = save.folder
        self.records.saved(save)
        text = f"saved {save.folder}: {save.bytes:,} bytes, training waited "
        self._say(f"{text}{save.stall_seconds:.3f} s, written in {save.write_seconds:.3f} s")

    def save_failed(self, step: int, reason: str, last_good: Path | None) -> None:
        """Records and warns of a checkpoint that was not written."""
        self.records.save_failed(step, reason, last_good)

    def stopped_early(self, step: int, reason: str) -> None:
        """Records that the run ends before its last step, as its validation loss does not fall."""
        self.records.event("stopped_early", {"step": step, "reason": reason})
        self._say(f"finished: stopped early at step {step}, as {reason}")

    def warn(self, text: str) -> None:
        """Says what went wrong, and did not end the run."""
        self.records.warn(text)

    def _say(self, text: str) -> None:
        if self.speaks:
            write_line(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Closes the log; an error is recorded as what ended the run."""
        if isinstance(error, MtcliError):
            self.records.failed(error.problems[0].message)
        elif isinstance(error, Exception):
            self.records.failed(f"{type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Closes the progress line, the files and the trackers."""
        if not self.speaks:
            return
        if self.bar is not None:
            self.bar.close()
        self.records.close()

    def stopped(self, step: int, by: str, runtime: Runtime) -> None:
        """Says that a signal has stopped the run after a step, and how to go on."""
        if not self.speaks:
            return
        folder, command = Path(self.config.train.output), "run the same command with"
        if runtime.world == 1 or LAUNCHED in os.environ:
            ranks = f" --nproc {runtime.world}" * (runtime.world > 1)
            command = f"mtcli train {quote(str(folder))}{ranks}"
        said = f"stopped by {by} after step {step:,} of {self.config.train.steps:,}"
        self._say(f"{said}; {how_it_goes_on(folder, command)}")

    def end(self) -> None:
        """Prints the name of the checkpoint or folder that was written last."""
        if self.speaks:
            sys.stdout.write(visible(f"wrote {self.last_saved or self.config.train.output}\n"))


def describe_phase(config: RunConfig, span: PhaseSpan) -> str:
    """Words the steps of a phase, its tokens and what it sets."""
    sections = config.phase[span.number - 1].model_dump(exclude_unset=True)
    del sections["from_tokens"]
    given = [
        f"{section}.{name}={shown(list(value) if isinstance(value, tuple) else value)}"
        for section, fields in sections.items()
        for name, value in fields.items()
    ]
    tokens = span.tokens_before(span.last_step) - span.first_token
    words = f"steps {span.first_step + 1:,} to {span.last_step:,}, {tokens:,} tokens"
    return ", ".join([words if span.steps else "after the run's end", *given])


def _first_figures(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (key, name) of the first figure of each task in a step's record."""
    tasks = set()
    for key in (key for key in row if key.startswith("eval/")):
        task = key.split("/")[1]
        if task not in tasks:
            yield key, task
        tasks.add(task)


def _model(config: RunConfig) -> str:
    """Words the model's size, and the adapters' where only these are trained."""
    words = f"{config.model.architecture}, {count_parameters(config.model):,} parameters"
    if freeze := config.train.freeze:
        table = run_parameters(config.model, config.lora, freeze)
        trained = sum(p.numel for p in table.values() if p.trained)
        tied = next((name for name, p in table.items() if p.tied and p.frozen), "")
        head = f"; the head is tied to {tied}, and is frozen with it" * bool(tied)
        return f"{words}; {trained:,} are trained{head}"
    if not config.lora.rank:
        return words
    trained = count_adapters(config.model, config.lora)
    return f"{words}; {trained:,} of adapters, of rank {config.lora.rank}, are trained"


def _axes(config: RunConfig, world: int) -> str:
    """Words the sizes of tp, pp and dp, and of rarer axes that are not at their default."""
    p = config.parallel
    sizes = {"tp": p.tp, "pp": p.pp, "dp": world // (p.tp * p.cp * p.pp)}
    rarer = {"cp": p.cp, "ep": p.ep, "etp": p.etp, "vpp": p.vpp, "zero": p.zero}
    sizes |= {axis: size for axis, size in rarer.items() if size != (axis != "zero")}
    grid = f" ({p.grid_rows} x {p.tp // p.grid_rows})" if p.grid_rows > 1 else ""
    return " ".join(f"{a}={size}{grid if a == 'tp' else ''}" for a, size in sizes.items())


def _sync(config: RunConfig, world: int) -> str:
    """The strategy of data parallelism, and of how many replicas where they may differ."""
    replicas = config.num_replicas(world)
    inside = world // (config.parallel.tp * config.parallel.cp * config.parallel.pp * replicas)
    ranks = f" of {inside} data ranks" if inside > 1 else ""
    if replicas == 1:
        return config.sync.method
    facts = METHODS[config.sync.method]
    graph = f" ({config.sync.topology})" if facts.on_graph else ""
    groups = f" in {words}" if (words := config.sync.groups(replicas)) else ""
    if mixing_rule(config.sync.method, config.optimizer.momentum) != config.sync.method:
        graph += " as dsgd, since optimizer.momentum is 0"
    averaged = "; what is evaluated and exported is their average" if facts.weights_differ else ""
    return f"{config.sync.method}{graph}, {replicas} replicas{ranks}{groups}{averaged}"


def _precision(config: RunConfig, world: int) -> str:
    """The precision; for fp8 with its scaling, and the layers whose sizes it does not take."""
    t = config.train
    if t.precision != "fp8":
        return t.precision
    sizes = weight_sizes(config.model, config.parallel.tp)
    wide = {k: v for k, v in sizes.items() if k not in narrow_layers(t.fp8_scaling, sizes)}
    return f"fp8 {t.fp8_scaling}" + (f"; in bf16 {listed(wide)}" if wide else "")
