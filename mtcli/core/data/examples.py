"""Labelled examples to fine-tune a classifier on: RACE's questions, and JSONL of texts.

An example is one sequence with a class, or the choices of a question with the number of the right
one. RACE is laid out as Megatron-LM does (arXiv:1909.08053, section 5.3): a sequence is question
and choice, then the article, at most 128 and 512 tokens, or 1/4 and all of a shorter context.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.schema import RACE_CHOICES, RACE_TOKENS
from mtcli.core.config.untrusted import is_text, open_untrusted, parse_json, shown
from mtcli.core.data.encoder_rows import Segments
from mtcli.core.data.race import read_race
from mtcli.core.data.tokenize import Tokenizer

NAMED = 10  # bad examples in an error; the others are counted
QUESTION = 4  # a question and its choice have at most 1/4 of a sequence
BLANK = "_"  # of a question that a choice fills in
LINE = 'a line is {"text": ..., "label": 0}, and may have a "text_pair"'


class Example(NamedTuple):
    """The sequences that a head decides on together, and the right class or choice."""

    sequences: tuple[Segments, ...]
    label: int
    group: str  # of examples that are counted together: RACE's level

    @property
    def size(self) -> int:
        """Tokens of all its sequences."""
        return sum(sequence.size for sequence in self.sequences)


class Examples(NamedTuple):
    """The examples of a source, how many were left out by kind of fault, and its files."""

    found: list[Example]
    skipped: dict[str, int]
    files: list[Path]


def race_limit(max_seq_len: int, row: int) -> int:
    """Tokens of a sequence: 512, or what the context or a quarter of a row has."""
    return min(RACE_TOKENS, max_seq_len, row // RACE_CHOICES)


def read_race_examples(
    path: Path, part: str, tokenizer: Tokenizer, limit: int, field: str
) -> Examples:
    """Reads RACE's questions, high school's first, of at most `limit` tokens for each choice.

    Raises MtcliError, whose `field` named the folder, for a bad article by its file.
    """
    found, files = [], []
    for level, articles in read_race(path, part, field).items():
        for file, article in articles:
            files.append(file)
            context = _ids(tokenizer, article.text)
            questions = zip(article.questions, article.options, article.answers, strict=True)
            for question, options, answer in questions:
                sequences = []
                for option in options:
                    text = f"{question} {option}"
                    if BLANK in question:
                        text = question.replace(BLANK, option)
                    first = _ids(tokenizer, text)[: max(1, limit // QUESTION)]
                    sequences.append(Segments(first, context[: max(0, limit - len(first) - 3)]))
                found.append(Example(tuple(sequences), answer, level))
    return Examples(found, {}, files)


def read_classes(
    path: Path, tokenizer: Tokenizer, limit: int, num_labels: int, skip_bad: bool, field: str
) -> Examples:
    """Reads JSONL of `text`, `label` and maybe `text_pair`.

    Raises MtcliError with the first bad lines by file and number, unless they are skipped: what is
    no such object, a label out of range, an example of more than `limit` tokens.
    """

    def example(line: bytes) -> Example:
        record = _record(line)
        label = record["label"]
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < num_labels:
            hint = f"a whole number from 0 to {num_labels - 1}, or another model.num_labels"
            raise _BadLine("label", f"label {shown(label)} of num_labels={num_labels}", hint)
        pair = record.get("text_pair")
        second = None if pair is None else _ids(tokenizer, pair)
        segments = Segments(_ids(tokenizer, record["text"]), second)
        if segments.size > limit:
            hint = f"shorten it, or take a model and batch.seq_len of {segments.size} or more"
            reason = f"it has {segments.size} tokens, and {limit} fit"
            raise _BadLine("longer than the context", reason, hint)
        return Example((segments,), label, "")

    found, faults = [], []
    try:
        with open_untrusted(path) as file:
            for number, line in enumerate(file, start=1):
                if line.isspace():
                    continue
                try:
                    found.append(example(line))
                except _BadLine as fault:
                    faults.append((number, fault))
    except OSError as error:
        raise wrong(
            f"{path} cannot be read: {error.strerror}", "name a JSONL file", field
        ) from None
    if faults and not skip_bad:
        raise _refusal(path, faults, field)
    if not found:
        raise wrong(f"{path} has no example: {len(faults)} lines are bad", LINE, field)
    return Examples(found, dict(Counter(fault.kind for _, fault in faults)), [path])


class _BadLine(Exception):
    """What is wrong with a line; `kind` is a few words that lines are counted by."""

    def __init__(self, kind: str, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.hint = kind, reason, hint


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line.decode("utf-8-sig"))
    except ValueError as error:
        raise _BadLine("no JSON", f"it is not JSON: {error}", LINE) from None
    if not isinstance(record, dict):
        raise _BadLine("no object", "it is no JSON object", LINE)
    for name in ("text", "label"):
        if name not in record:
            raise _BadLine(f"no {name}", f"it has no {name}", LINE)
    for name in ("text", "text_pair"):
        if record.get(name) is not None and not is_text(record[name]):
            raise _BadLine(f"no {name}", f"its {name} is {shown(record[name])}, no text", LINE)
    if not is_text(record["text"]):
        raise _BadLine("no text", f"its text is {shown(record['text'])}, no text", LINE)
    return record


def _refusal(path: Path, faults: Sequence[tuple[int, _BadLine]], field: str) -> MtcliError:
    hint = "; data.skip_bad=true leaves such lines out and counts them"
    problems = [
        Problem(f"{path}, line {line}: {fault.reason}", fault.hint + hint, field)
        for line, fault in faults[:NAMED]
    ]
    if len(faults) > NAMED:
        problems.append(Problem(f"{path}: {len(faults) - NAMED} more lines are bad", "", field))
    return MtcliError(*problems)


def _ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text), np.int32)
