"""Writes the card of a model (README.md) from its checkpoint and run: sizes, data, losses, use.

Names of data are without their folders, and no path of this machine is in a card.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtcli.core.checkpoint.folder import CHECKPOINTS
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.run_progress import progress_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import is_number, parse_json, read_untrusted
from mtcli.core.mesh.parameters import count_active, count_parameters
from mtcli.core.runtime.hub import is_hub, parse_hub

CARD = "README.md"
METRICS = "metrics.jsonl"  # of the run folder
MAX_RESULT_BYTES = 1 << 24
SHOWN = 10  # rows of the table of losses
Loss = tuple[int, float, float | None]  # step, loss, loss of validation


def model_card(source: Checkpoint, repository: str) -> str:
    """Writes the card of a checkpoint that is pushed to owner/name."""
    lines = [*_head(source), f"# {repository.partition('/')[2]}", ""]
    lines += ["Trained and converted with mtcli.", "", "## Model", ""]
    lines += _table(("field", "value"), _sizes(source))
    if source.config is not None:
        lines += [
            "",
            "## Training",
            "",
            *_table(("field", "value"), _training(source, source.config)),
        ]
    if losses := losses_of(source):
        rows = [(f"{step:,}", f"{loss:.4f}", _shown(valid)) for step, loss, valid in losses]
        lines += ["", "## Losses", "", *_table(("step", "loss", "validation"), rows)]
    if figures := evaluations_of(source):
        lines += ["", "## Evaluation", "", *_table(("task", "metric", "value"), figures)]
    lines += ["", "## Use", "", "```", f"mtcli generate hub:{repository} --prompt TEXT"]
    lines += [f"mtcli eval hub:{repository} --task wikitext103=PATH"]
    lines += [f"mtcli train hub:{repository} --set data.train=my.jsonl", "```", ""]
    return "\n".join(lines)


def losses_of(source: Checkpoint) -> list[Loss]:
    """Reads the losses of a checkpoint's run, up to its step: of at most SHOWN steps, evenly, the
    last among them; none where it lies in no run."""
    path = source.folder.absolute().parent.parent / METRICS
    if source.folder.absolute().parent.name != CHECKPOINTS or not path.is_file():
        return []
    found = []
    for line in read_untrusted(path).splitlines():
        row = None
        with suppress(ValueError):  # a line that a killed run left unfinished
            row = parse_json(line)
        if isinstance(row, dict) and type(row.get("step")) is int and is_number(row.get("loss")):
            valid = row.get("valid_loss")
            found.append((row["step"], float(row["loss"]), valid if is_number(valid) else None))
    steps = [one for one in found if one[0] <= source.step]
    validated = [one for one in steps if one[2] is not None] or steps
    stride = -(-len(validated) // SHOWN) or 1
    return validated[::-1][::stride][::-1]


def evaluations_of(source: Checkpoint) -> list[tuple[str, str, str]]:
    """Reads (task, metric, value) from results of `mtcli eval --json` in a checkpoint's folder or
    its run's. Skips results that name another checkpoint, or are older than the config."""
    folder = source.folder.absolute()
    folders = [folder, folder.parent.parent] if folder.parent.name == CHECKPOINTS else [folder]
    saved = max((path.stat().st_mtime for path in folder.glob("config.*")), default=0.0)
    rows: list[tuple[str, str, str]] = []
    for path in sorted(path for one in folders for path in one.glob("*.json")):
        result: Any = None
        with suppress(OSError, ValueError):  # some other file
            result = parse_json(read_untrusted(path, MAX_RESULT_BYTES))
        match result:
            case {"checkpoint": str(name), "tasks": dict(tasks)}:
                if (
                    Path(name).name in {one.name for one in folders}
                    and path.stat().st_mtime > saved
                ):
                    rows += [
                        row for task, report in tasks.items() for row in _figures(task, report)
                    ]
    return rows


def _figures(task: str, report: Any) -> list[tuple[str, str, str]]:
    """Lists a task's metrics: the numbers of its report that are no counts."""
    figures = report.items() if isinstance(report, dict) else ()
    return [(task, name, f"{value:.4f}") for name, value in figures if isinstance(value, float)]


def _head(source: Checkpoint) -> list[str]:
    """The card's metadata, which the hub reads."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    init = source.config.train.init if source.config else None
    if init is not None and is_hub(init):
        lines.append(f"base_model: {parse_hub(init).repository}")
    return [*lines, "tags:", "- mtcli", "---", ""]


def _sizes(source: Checkpoint) -> list[tuple[str, str]]:
    model = source.model
    rows = [("architecture", model.architecture), ("parameters", f"{count_parameters(model):,}")]
    if model.num_experts:
        rows.append(("parameters of a token", f"{count_active(model):,}"))
        rows.append(("experts", f"{model.num_experts}, {model.top_k} for each token"))
    rows += [("layers", str(model.num_layers)), ("hidden size", str(model.hidden_size))]
    rows.append(("heads", f"{model.num_heads}, {model.num_kv_heads} of keys"))
    return [*rows, ("context", f"{model.max_seq_len:,}"), ("vocabulary", f"{model.vocab_size:,}")]


def _training(source: Checkpoint, config: RunConfig) -> list[tuple[str, str]]:
    batch, optimizer, train = config.batch, config.optimizer, config.train
    record = progress_of(source).samples
    tokens = record.tokens if record else train.steps * batch.tokens_per_step
    names = [word if is_hub(word) else Path(word).name for word in config.data.train]
    rows = [("data", ", ".join(names)), ("steps", f"{train.steps:,}"), ("tokens", f"{tokens:,}")]
    rows.append(("batch", f"{batch.global_batch_size} sequences of {batch.seq_len:,}"))
    rows.append(("optimizer", f"{optimizer.name}, lr {optimizer.lr:g}, {optimizer.schedule}"))
    rows += [("precision", train.precision), ("seed", str(config.seed))]
    if train.init is not None:
        rows.append(("started from", train.init if is_hub(train.init) else Path(train.init).name))
    return rows


def _shown(valid: float | None) -> str:
    return "" if valid is None else f"{valid:.4f}"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    cells = [head, ("---",) * len(head), *rows]
    return [
        f"| {' | '.join(' '.join(value.replace('|', '/').split()) for value in row)} |"
        for row in cells
    ]
