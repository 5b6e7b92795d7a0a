"""Evaluates encoders: masked tokens and sentence order, RACE, and labelled texts.

A classifier decides by its logits of each example; an ensemble of checkpoints, by the mean of their
probabilities (arXiv:1909.08053, section 5.3).
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RACE_CHOICES
from mtcli.core.config.untrusted import is_number
from mtcli.core.data.bert.example_rows import ExampleRows
from mtcli.core.data.bert.examples import (
    Example,
    Room,
    race_limit,
    read_classes,
    read_race_examples,
)
from mtcli.core.data.bert.masked_rows import MaskedRows
from mtcli.core.data.bert.row_format import EncoderRows
from mtcli.core.data.bert.special_tokens import SpecialTokens, special_tokens
from mtcli.core.data.indexed import with_suffix
from mtcli.core.data.preprocess import PreprocessRequest, preprocess
from mtcli.core.data.race import LEVELS
from mtcli.core.data.sources import find_sources
from mtcli.core.data.tokenize import Tokenizer
from mtcli.core.evaluate.journal import Journal
from mtcli.core.evaluate.statistics import accuracy_of
from mtcli.core.evaluate.tasks.task import Advance, Record, Report, TaskRun, exp, part_report
from mtcli.core.inference.bert_heads import HeadOutput, head_outputs
from mtcli.core.inference.model import InferenceModel

SEED = 1234  # of what is masked
LEAST = float(np.log(np.finfo(np.float64).tiny))  # of a probability of 0: JSON has no infinity
HEAD_OF_TASK = {"mlm": "mlm", "race": "multiple_choice", "classification": "classification"}


def encoder_runs(
    specs: Sequence[tuple[str, Path | None]],
    models: Sequence[InferenceModel],
    tokenizer: Tokenizer,
    limit: int | None,
    batch_tokens: int,
    journal: Journal,
) -> list[TaskRun]:
    """Binds tasks to encoders of one head. Collective.

    Raises MtcliError with everything that is wrong with the tasks.
    """

    def prepared(name: str, path: Path | None) -> TaskRun:
        model = models[0].config.model
        if path is None or HEAD_OF_TASK.get(name) != model.head:
            tasks = [task for task, head in HEAD_OF_TASK.items() if head == model.head]
            message = f"the task {name} is not for a model with head={model.head!r}"
            raise wrong(message, f"--task {tasks[0]}=PATH", "--task")
        rows = _rows(name, path, model, tokenizer, limit)
        if isinstance(rows, ExampleRows):
            task = _classes_task(rows, models)
        elif len(models) > 1:
            raise wrong("masked tokens have no ensemble", "leave --ensemble out", "--ensemble")
        else:
            task = _masked_task(rows, path)
        return _bound(name, task, models, batch_tokens, journal)

    return collect_errors(*((lambda spec=spec: prepared(*spec)) for spec in specs))


def _rows(
    name: str, path: Path, model: ModelConfig, tokenizer: Tokenizer, limit: int | None
) -> MaskedRows | ExampleRows:
    special, size = special_tokens(tokenizer), model.max_seq_len
    if name == "mlm":
        return _masked(path, model, tokenizer, special, limit)
    if name == "race":
        room = Room(race_limit(size), RACE_CHOICES * race_limit(size))
        size = room.row
        examples = read_race_examples(path, "test", tokenizer, room, "--task")
    else:
        examples = read_classes(path, tokenizer, Room(size, size), model.num_labels, "--task")
    if limit is not None:
        groups = dict.fromkeys(example.group for example in examples.examples)
        limited = [[e for e in examples.examples if e.group == group][:limit] for group in groups]
        examples = examples._replace(examples=[example for part in limited for example in part])
    return ExampleRows([(str(path), examples)], size, special)


def _masked(
    path: Path, model: ModelConfig, tokenizer: Tokenizer, special: SpecialTokens, limit: int | None
) -> MaskedRows:
    """Opens the rows of a dataset of sentences, or of the documents in a text file, each once."""
    length_and_seed = (model.max_seq_len, SEED)

    def opened(prefix: Path, samples: int) -> MaskedRows:
        order = model.sentence_order
        return MaskedRows(
            [str(prefix)], "1,0,0", "train", samples, *length_and_seed, special, order
        )

    def whole(prefix: Path) -> MaskedRows:
        rows = opened(prefix, 1).packed[0].rows_of_epoch(0)
        return opened(prefix, min(rows, limit or rows))

    if with_suffix(path, ".idx").exists():
        return whole(path)
    with tempfile.TemporaryDirectory() as folder:
        tokens = tokenizer.save(Path(folder) / "tokenizer")
        request = PreprocessRequest(
            (str(path),), Path(folder) / "text", str(tokens), sentences=True
        )
        try:
            kinds = {source.kind for source in find_sources(request.inputs).sources}
            preprocess(request._replace(split_on_blank="text" in kinds), lambda line: None)
        except MtcliError as error:
            more = "flags are those of `mtcli preprocess --sentences`, whose PREFIX is read too"
            problems = (Problem(p.message, f"{p.hint}; {more}", "--task") for p in error.problems)
            raise MtcliError(*problems, code=error.code) from None
        return whole(Path(folder) / "text")  # mapped, so that it may go


class EncoderTask(NamedTuple):
    """A task of an encoder: its rows, and the items in each of them."""

    rows: MaskedRows | ExampleRows
    items: list[Sequence[int]]  # of each row, by their numbers
    hashes: Callable[[], Sequence[str]]  # of the items
    records: Callable[[EncoderRows, Sequence[int], Sequence[HeadOutput]], list[Record]]
    """the lines of a batch's items, by their numbers and the output of each model"""
    restored: Callable[[int, Record], Record | None]
    """an item's line by that of an earlier run; None where that is none"""
    report: Callable[[Sequence[Record]], Report]  # of all lines


def _bound(
    name: str,
    task: EncoderTask,
    models: Sequence[InferenceModel],
    batch_tokens: int,
    journal: Journal,
) -> TaskRun:
    """Binds a task to its models; the journal has the items that an earlier run finished.

    A forward pass is skipped where all of its items are finished.
    """
    rows, dp = task.rows, models[0].groups.layout.dp
    size = max(1, batch_tokens // rows.seq_len)
    spans = [(start, min(size, len(rows) - start)) for start in range(0, len(rows), size)]
    lines = journal.recorded(name, task.hashes()) if name in journal.known else {}
    restored = {number: task.restored(number, line) for number, line in lines.items()}
    finished = dict(models[0].of_rank_0([pair for pair in restored.items() if pair[1] is not None]))

    def items_of(span: tuple[int, int]) -> list[int]:
        return [number for row in range(span[0], sum(span)) for number in task.items[row]]

    left = [span for span in spans if not all(number in finished for number in items_of(span))]
    for number in chain.from_iterable(map(items_of, left)):
        finished.pop(number, None)
    summary = f"{len(rows):,} rows of {rows.seq_len} tokens in {len(spans):,} forward passes"
    if cut := rows.describe().get("cut"):
        summary += f"; cut: {cut}"
    if finished:
        summary += f"; {len(finished):,} items are kept from a run that was ended"

    def run(progress: Advance) -> Report:
        done = dict(finished)
        for number, record in finished.items():
            journal.keep(name, number, record, restored=True)
        for at in range(0, len(left), dp):
            some = left[at : at + dp]
            batches = [rows.rows(*span) for span in some]
            outputs = zip(*(head_outputs(model, batches) for model in models), strict=True)
            for span, read, of_models in zip(some, batches, outputs, strict=True):
                numbers = items_of(span)
                records = task.records(read, numbers, of_models)
                for number, record in zip(numbers, records, strict=True):
                    done[number] = record
                    journal.keep(name, number, record)
            journal.flush()
            progress(sum(count for _, count in some) * len(models))
        return task.report([done[number] for number in range(sum(map(len, task.items)))])

    return TaskRun(name, summary, sum(count for _, count in left) * len(models), run)


def _masked_task(rows: MaskedRows, path: Path) -> EncoderTask:
    """Builds the task of masked perplexity, and of the accuracy of sentence order where rows have
    two halves. An item is a row."""

    def line(number: int, hashed: str, loss: float, counts: Mapping[str, Any]) -> Record:
        return {"hash": hashed, "id": f"row {number}", **counts, "loglikelihoods": [-loss]}

    def records(
        read: EncoderRows, numbers: Sequence[int], outputs: Sequence[HeadOutput]
    ) -> list[Record]:
        (output,) = outputs
        right_M, counted_M = np.zeros(len(read.classes), bool), read.class_weights > 0
        if output.logits_MC.numel():
            right_M = (output.logits_MC.argmax(1).numpy() == read.classes) & counted_M
        row_M = read.firsts // rows.seq_len
        counts = {
            "num_tokens": read.weights.sum(1),
            "sop_correct": np.bincount(row_M, right_M, len(numbers)),
            "sop_total": np.bincount(row_M, counted_M, len(numbers)),
        }
        of_rows = [
            {name: int(values[row]) for name, values in counts.items()}
            for row in range(len(numbers))
        ]
        fields = zip(numbers, _row_hashes(read), output.losses_R.tolist(), of_rows, strict=True)
        return [line(*one) for one in fields]

    def restored(number: int, earlier: Record) -> Record | None:
        counts = {name: earlier.get(name) for name in ("num_tokens", "sop_correct", "sop_total")}
        sums = _numbers(earlier, "loglikelihoods", 1)
        if not sums or not all(type(count) is int for count in counts.values()):
            return None
        return line(number, earlier["hash"], -sums[0], counts)

    def hashes() -> list[str]:
        return [one for number in range(len(rows)) for one in _row_hashes(rows.rows(number, 1))]

    items: list[Sequence[int]] = [(number,) for number in range(len(rows))]
    return EncoderTask(rows, items, hashes, records, restored, partial(_report_masked, path))


def _row_hashes(read: EncoderRows) -> list[str]:
    """Hashes each row: its tokens, labels and the weights that mark predicted ones."""
    rows = zip(read.tokens, read.labels, read.weights, strict=True)
    return [sha256(b"".join(part.tobytes() for part in row)).hexdigest()[:16] for row in rows]


def _report_masked(path: Path, records: Sequence[Record]) -> Report:
    """Reports perplexity and accuracies. Raises MtcliError where the text of `path` has no token
    that may be masked."""
    masked, right, pairs = (
        sum(record[name] for record in records)
        for name in ("num_tokens", "sop_correct", "sop_total")
    )
    if not masked:
        message = f"no token of {path} may be masked: all are special ones"
        raise wrong(message, "a text of which the tokenizer knows the letters", "--task")
    loss = -sum(record["loglikelihoods"][0] for record in records) / masked
    report: Report = {"loss": loss, "perplexity": exp(loss), "masked": masked}
    report["sop_accuracy"] = right / pairs if pairs else None
    return report | {"sop_correct": right, "sop_total": pairs}


def _classes_task(rows: ExampleRows, models: Sequence[InferenceModel]) -> EncoderTask:
    """Builds the task of a classifier's accuracy, or of an ensemble's. An item is an example."""
    hashes = [_hash(example) for example in rows.examples]

    def line(number: int, logs: list[float], members: list[int]) -> Record:
        example, pick = rows.examples[number], int(np.argmax(logs))
        record: Record = {"hash": hashes[number], "id": example.name}
        record |= {name: getattr(example, name) for name in ("group", "cluster") if example.group}
        record |= {"loglikelihoods": logs, "answer": example.label, "pick": pick}
        record |= {"members": members} if len(models) > 1 else {}
        return record | {"correct": pick == example.label}

    def records(
        read: EncoderRows, numbers: Sequence[int], outputs: Sequence[HeadOutput]
    ) -> list[Record]:
        chances = np.stack([output.logits_MC.softmax(1).numpy() for output in outputs])
        with np.errstate(divide="ignore"):
            logs = np.log(chances.mean(0)).clip(min=LEAST).tolist()
        of_items = zip(numbers, logs, chances.argmax(2).T.tolist(), strict=True)
        return [line(number, *fields) for number, *fields in of_items]

    def restored(number: int, earlier: Record) -> Record | None:
        model = models[0].config.model
        num_classes = model.num_labels or len(rows.examples[number].sequences)
        logs = _numbers(earlier, "loglikelihoods", num_classes)
        members = _numbers(earlier, "members", len(models)) if len(models) > 1 else [0]
        return line(number, logs, list(map(int, members))) if logs and members else None

    items = [rows.epochs.items(number).tolist() for number in range(len(rows))]
    return EncoderTask(rows, items, lambda: hashes, records, restored, _report_classes)


def _hash(example: Example) -> str:
    """Hashes an example's tokens, as its name in a result."""
    parts = [part for one in example.sequences for part in one if part is not None]
    return sha256(b"\0".join(part.tobytes() for part in parts)).hexdigest()[:16]


def _numbers(record: Record, name: str, count: int) -> list[float]:
    """Reads a list of `count` numbers in an earlier run's line; empty where it is anything else."""
    values = record.get(name)
    if not isinstance(values, list) or len(values) != count or not all(map(is_number, values)):
        return []
    return list(map(float, values))


def _report_classes(records: Sequence[Record]) -> Report:
    """Reports the accuracy of all examples, of each level of RACE, and of each member of an
    ensemble."""
    correct = [record["correct"] for record in records]
    has_groups = "group" in records[0]
    clusters = [record["cluster"] for record in records] if has_groups else None
    accuracy = accuracy_of(correct, clusters)
    report: Report = {"accuracy": accuracy.value, "interval": accuracy.interval}
    report |= {"standard_error": accuracy.standard_error}
    for level in LEVELS if has_groups else ():
        report |= part_report(level, [r["correct"] for r in records if r["group"] == level])
    report |= {"correct": sum(correct), "total": len(correct)}
    for number in range(len(records[0].get("members", ()))):
        right = [record["members"][number] == record["answer"] for record in records]
        report[f"accuracy_{number + 1}"] = sum(right) / len(right)
    return report
