"""Tasks of encoders: masked tokens and sentence order, RACE, and labelled texts.

The head decides: a classifier's logits of each example, of one checkpoint or, as an ensemble, the
mean of several ones' probabilities (arXiv:1909.08053, section 5.3).
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mtcli.core.config.errors import collect_errors, wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RACE_CHOICES
from mtcli.core.data.encoder_rows import EncoderBatches
from mtcli.core.data.example_rows import ExampleRows
from mtcli.core.data.examples import Room, race_limit, read_classes, read_race_examples
from mtcli.core.data.indexed import with_suffix
from mtcli.core.data.masked_rows import MaskedRows
from mtcli.core.data.preprocess import PreprocessRequest, preprocess
from mtcli.core.data.race import LEVELS
from mtcli.core.data.special_tokens import special_tokens
from mtcli.core.data.tokenize import Tokenizer
from mtcli.core.evaluate.tasks.task import Advance, Report, TaskRun, exp
from mtcli.core.inference.model import InferenceModel

SEED = 1234  # of what is masked
HEAD_OF_TASK = {"mlm": "mlm", "race": "multiple_choice", "classification": "classification"}


def encoder_runs(
    specs: Sequence[tuple[str, Path | None]],
    models: Sequence[InferenceModel],
    tokenizer: Tokenizer,
    limit: int | None,
    batch_tokens: int,
) -> list[TaskRun]:
    """Binds tasks to encoders of one head. Raises MtcliError for all that is wrong with them."""

    def prepared(name: str, path: Path | None) -> TaskRun:
        model = models[0].config.model
        if path is None or HEAD_OF_TASK.get(name) != model.head:
            tasks = [task for task, head in HEAD_OF_TASK.items() if head == model.head]
            message = f"the task {name} is not for a model with head={model.head!r}"
            raise wrong(message, f"--task {tasks[0]}=PATH", "--task")
        rows = _rows(name, path, model, tokenizer, limit)
        size = max(1, batch_tokens // rows.seq_len)
        starts = range(0, len(rows), size)
        report = _report_masked if name == "mlm" else _report_classes
        summary = f"{len(rows):,} rows of {rows.seq_len} tokens in {len(starts):,} forward passes"

        def run(progress: Advance) -> Report:
            return report(rows, [(s, min(size, len(rows) - s)) for s in starts], models, progress)

        return TaskRun(name, summary, len(rows) * len(models), run)

    return collect_errors(*((lambda spec=spec: prepared(*spec)) for spec in specs))


def _rows(
    name: str, path: Path, model: ModelConfig, tokenizer: Tokenizer, limit: int | None
) -> MaskedRows | ExampleRows:
    special, size = special_tokens(tokenizer), model.max_seq_len
    if name == "mlm":
        return _masked(path, model, tokenizer, limit)
    if name == "race":
        room = Room(race_limit(size), RACE_CHOICES * race_limit(size))
        size = room.row
        found = read_race_examples(path, "test", tokenizer, room, "--task")
    else:
        found = read_classes(path, tokenizer, Room(size, size), model.num_labels, "--task")
    if limit is not None:
        groups = dict.fromkeys(example.group for example in found.found)
        kept = [[e for e in found.found if e.group == group][:limit] for group in groups]
        found = found._replace(found=[example for part in kept for example in part])
    return ExampleRows([(str(path), found)], size, special)


def _masked(path: Path, model: ModelConfig, tokenizer: Tokenizer, limit: int | None) -> MaskedRows:
    """The rows of a dataset of sentences, or of the documents in a text file, each once."""
    special, about = special_tokens(tokenizer), (model.max_seq_len, SEED)

    def opened(prefix: Path, samples: int) -> MaskedRows:
        order = model.sentence_order
        return MaskedRows([str(prefix)], "1,0,0", "train", samples, *about, special, order)

    def whole(prefix: Path) -> MaskedRows:
        rows = opened(prefix, 1).packed[0].rows_of_epoch(0)
        return opened(prefix, min(rows, limit or rows))

    if with_suffix(path, ".idx").exists():
        return whole(path)
    with tempfile.TemporaryDirectory() as folder:
        tokens = tokenizer.save(Path(folder) / "tokenizer")
        request = PreprocessRequest(
            inputs=(str(path),),
            output=Path(folder) / "text",
            tokenizer=str(tokens),
            split_on_blank=path.suffix not in (".jsonl", ".csv", ".tsv", ".parquet"),
            sentences=True,
        )
        preprocess(request, lambda line: None)
        return whole(Path(folder) / "text")  # mapped, so that it may go


Spans = Sequence[tuple[int, int]]  # (first row, rows) of each forward pass


def _report_masked(
    rows: EncoderBatches, spans: Spans, models: Sequence[InferenceModel], progress: Advance
) -> Report:
    """Perplexity of masked tokens, and accuracy of the order of sentences where there are two."""
    from mtcli.core.inference.encoder import head_outputs

    if len(models) > 1:
        raise wrong("masked tokens have no ensemble", "leave --ensemble out", "--ensemble")
    loss, masked, right, pairs = 0.0, 0, 0, 0
    dp = models[0].groups.layout.dp
    for at in range(0, len(spans), dp):
        batches = [rows.rows(*span) for span in spans[at : at + dp]]
        for read, found in zip(batches, head_outputs(models[0], batches), strict=True):
            loss, masked = loss + found.loss, masked + int(read.weights.sum())
            if found.logits_MC.numel():
                counted = read.class_weights > 0
                guessed = found.logits_MC.argmax(1).numpy()
                right += int((guessed == read.classes)[counted].sum())
                pairs += int(counted.sum())
        progress(sum(len(read.tokens) for read in batches))
    report: Report = {"loss": loss / masked, "perplexity": exp(loss / masked), "masked": masked}
    report["sop_accuracy"] = right / pairs if pairs else None
    return report | {"sop_correct": right, "sop_total": pairs}


def _report_classes(
    rows: ExampleRows, spans: Spans, models: Sequence[InferenceModel], progress: Advance
) -> Report:
    """Accuracy over all examples, and of RACE per level; of an ensemble that of each member too."""
    from mtcli.core.inference.encoder import head_outputs

    batches = [rows.rows(*span) for span in spans]
    labels = np.concatenate([read.classes for read in batches])
    groups = np.array([e.group for n in range(len(rows)) for e in rows.examples_of(n)])
    probabilities = []
    for model in models:
        parts = []
        for at in range(0, len(batches), model.groups.layout.dp):
            some = batches[at : at + model.groups.layout.dp]
            parts += [one.logits_MC.softmax(1).numpy() for one in head_outputs(model, some)]
            progress(sum(len(read.tokens) for read in some))
        probabilities.append(np.concatenate(parts))
    correct = np.mean(probabilities, axis=0).argmax(1) == labels
    report: Report = {"accuracy": float(correct.mean())}
    if groups.any():
        for level in LEVELS:
            mine = groups == level
            report[level] = float(correct[mine].mean()) if mine.any() else None
            report[f"{level}_total"] = int(mine.sum())
    report |= {"correct": int(correct.sum()), "total": len(labels)}
    for number, one in enumerate(probabilities if len(models) > 1 else (), start=1):
        report[f"accuracy_{number}"] = float((one.argmax(1) == labels).mean())
    return report
