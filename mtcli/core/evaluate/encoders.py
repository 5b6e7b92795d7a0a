"""Tasks of encoders: masked tokens and sentence order, RACE, and labelled texts.

The head decides: a classifier's logits of each example, of one checkpoint or, as an ensemble, the
mean of several ones' probabilities (arXiv:1909.08053, section 5.3).
"""

import tempfile
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RACE_CHOICES
from mtcli.core.data.encoder_rows import EncoderBatches
from mtcli.core.data.example_rows import ExampleRows
from mtcli.core.data.examples import Example, Room, race_limit, read_classes, read_race_examples
from mtcli.core.data.indexed import with_suffix
from mtcli.core.data.masked_rows import MaskedRows
from mtcli.core.data.preprocess import PreprocessRequest, preprocess
from mtcli.core.data.race import LEVELS
from mtcli.core.data.sources import find_sources
from mtcli.core.data.special_tokens import SpecialTokens, special_tokens
from mtcli.core.data.tokenize import Tokenizer
from mtcli.core.evaluate.journal import Journal
from mtcli.core.evaluate.statistics import accuracy_of
from mtcli.core.evaluate.tasks.task import Advance, Record, Report, TaskRun, exp, part_report
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
    """Binds tasks to encoders of one head; a classifier's items go to the journal at the end.

    Raises MtcliError for all that is wrong with them.
    """

    def prepared(name: str, path: Path | None) -> TaskRun:
        model = models[0].config.model
        if path is None or HEAD_OF_TASK.get(name) != model.head:
            tasks = [task for task, head in HEAD_OF_TASK.items() if head == model.head]
            message = f"the task {name} is not for a model with head={model.head!r}"
            raise wrong(message, f"--task {tasks[0]}=PATH", "--task")
        rows = _rows(name, path, model, tokenizer, limit)
        size = max(1, batch_tokens // rows.seq_len)
        starts = range(0, len(rows), size)
        spans = [(start, min(size, len(rows) - start)) for start in starts]
        summary = f"{len(rows):,} rows of {rows.seq_len} tokens in {len(starts):,} forward passes"
        if cut := rows.describe().get("cut"):
            summary += f"; cut: {cut}"

        def run(progress: Advance) -> Report:
            if isinstance(rows, MaskedRows):
                return _report_masked(rows, spans, models, progress, path)
            probabilities = _probabilities(rows, spans, models, progress)
            for number, record in _records(rows, np.mean(probabilities, axis=0)):
                journal.keep(name, number, record)
            return _report_classes(rows, probabilities)

        return TaskRun(name, summary, len(rows) * len(models), run)

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
    """The rows of a dataset of sentences, or of the documents in a text file, each once."""
    about = (model.max_seq_len, SEED)

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
            (str(path),), Path(folder) / "text", str(tokens), sentences=True
        )
        try:
            kinds = {source.kind for source in find_sources(request.inputs).sources}
            preprocess(request._replace(split_on_blank="text" in kinds), lambda line: None)
        except MtcliError as error:
            more = "flags are those of `mtcli preprocess --sentences`, whose PREFIX is read too"
            told = (Problem(p.message, f"{p.hint}; {more}", "--task") for p in error.problems)
            raise MtcliError(*told, code=error.code) from None
        return whole(Path(folder) / "text")  # mapped, so that it may go


Spans = Sequence[tuple[int, int]]  # (first row, rows) of each forward pass


def _report_masked(
    rows: EncoderBatches,
    spans: Spans,
    models: Sequence[InferenceModel],
    progress: Advance,
    path: Path,
) -> Report:
    """Perplexity of masked tokens, and accuracy of the order of sentences where there are two.

    Raises MtcliError where the text of `path` has no token that may be masked.
    """
    from mtcli.core.inference.encoder import head_outputs

    if len(models) > 1:
        raise wrong("masked tokens have no ensemble", "leave --ensemble out", "--ensemble")
    loss, masked, right, pairs = 0.0, 0, 0, 0
    dp = models[0].groups.layout.dp
    for at in range(0, len(spans), dp):
        batches = [rows.rows(*span) for span in spans[at : at + dp]]
        for read, output in zip(batches, head_outputs(models[0], batches), strict=True):
            loss, masked = loss + output.loss, masked + int(read.weights.sum())
            if output.logits_MC.numel():
                counted = read.class_weights > 0
                guessed = output.logits_MC.argmax(1).numpy()
                right += int((guessed == read.classes)[counted].sum())
                pairs += int(counted.sum())
        progress(sum(len(read.tokens) for read in batches))
    if not masked:
        message = f"no token of {path} may be masked: all are special ones"
        raise wrong(message, "a text of which the tokenizer knows the letters", "--task")
    report: Report = {"loss": loss / masked, "perplexity": exp(loss / masked), "masked": masked}
    report["sop_accuracy"] = right / pairs if pairs else None
    return report | {"sop_correct": right, "sop_total": pairs}


def _probabilities(
    rows: ExampleRows, spans: Spans, models: Sequence[InferenceModel], progress: Advance
) -> list[np.ndarray]:
    """Computes each model's probabilities [examples, C], in the order of the rows."""
    from mtcli.core.inference.encoder import head_outputs

    batches = [rows.rows(*span) for span in spans]
    probabilities = []
    for model in models:
        parts = []
        for at in range(0, len(batches), model.groups.layout.dp):
            some = batches[at : at + model.groups.layout.dp]
            parts += [one.logits_MC.softmax(1).numpy() for one in head_outputs(model, some)]
            progress(sum(len(read.tokens) for read in some))
        probabilities.append(np.concatenate(parts))
    return probabilities


def _records(rows: ExampleRows, probabilities: np.ndarray) -> Iterator[tuple[int, Record]]:
    """Yields each example's number and its line in the file of items."""
    for number, chances in zip(rows.order().tolist(), probabilities, strict=True):
        example = rows.examples[number]
        record: Record = {"hash": _hash(example), "id": example.name}
        record |= {name: getattr(example, name) for name in ("group", "cluster") if example.group}
        with np.errstate(divide="ignore"):
            record |= {"loglikelihoods": np.log(chances).clip(min=LEAST).tolist()}
        pick = int(chances.argmax())
        record |= {"answer": example.label, "pick": pick, "correct": pick == example.label}
        yield number, record


def _hash(example: Example) -> str:
    """Hashes an example's tokens, which names it in a result."""
    parts = [part for one in example.sequences for part in one if part is not None]
    return sha256(b"\0".join(part.tobytes() for part in parts)).hexdigest()[:16]


def _report_classes(rows: ExampleRows, probabilities: Sequence[np.ndarray]) -> Report:
    """Accuracy over all examples, and of RACE per level; of an ensemble that of each member too."""
    examples = [rows.examples[number] for number in rows.order()]
    labels, groups = (np.array([getattr(e, name) for e in examples]) for name in ("label", "group"))
    correct = np.mean(probabilities, axis=0).argmax(1) == labels
    clusters = [example.cluster for example in examples] if groups[0] else None
    accuracy = accuracy_of(correct.tolist(), clusters)
    report: Report = {"accuracy": accuracy.value, "interval": accuracy.interval}
    report |= {"standard_error": accuracy.standard_error}
    for level in LEVELS if groups[0] else ():
        report |= part_report(level, correct[groups == level].tolist())
    report |= {"correct": int(correct.sum()), "total": len(labels)}
    for number, output in enumerate(probabilities if len(probabilities) > 1 else (), start=1):
        report[f"accuracy_{number}"] = float((output.argmax(1) == labels).mean())
    return report
