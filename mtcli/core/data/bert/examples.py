"""Reads labelled examples to fine-tune a classifier: RACE's questions, and JSONL of texts.

An example is one sequence with a class, or the choices of a question with the number of the right
one. RACE is laid out as in Megatron-LM (arXiv:1909.08053, section 5.3): a sequence is question and
choice, then the article, cut to 128 and 512 tokens, or to 1/4 and all of a shorter context. Cut
ones are counted.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtcli.core.config.errors import Problem, wrong
from mtcli.core.config.schema import RACE_TOKENS
from mtcli.core.config.untrusted import is_text, shown
from mtcli.core.data.bad_lines import BadLine, json_object, refusal
from mtcli.core.data.bert.row_format import Segments
from mtcli.core.data.line_files import read_lines
from mtcli.core.data.race import Article, read_race_files
from mtcli.core.data.tokenize import Tokenizer

QUESTION = 4  # a question and its choice have at most 1/4 of a sequence
BLANK = "_"  # of a question that a choice fills in
LINE = 'a line is {"text": ..., "label": 0}, and may have a "text_pair"'


class Example(NamedTuple):
    """The sequences that a head decides on together, and the right class or choice."""

    sequences: tuple[Segments, ...]
    label: int
    group: str  # of examples that are counted together: RACE's level
    cluster: str  # what it shares with others: RACE's article
    name: str

    @property
    def size(self) -> int:
        """The tokens of all sequences."""
        return sum(sequence.size for sequence in self.sequences)


class Examples(NamedTuple):
    """The examples of a source: skipped ones as places by kind of fault, the files, and how many
    (articles, questions with their choice) were cut to the limit."""

    examples: list[Example]
    skipped: dict[str, list[str]]
    files: list[Path]
    ended: tuple[int, int] = (0, 0)


class Room(NamedTuple):
    """The most tokens of a sequence and of a row, and whether longer examples are skipped."""

    sequence: int
    row: int
    skip_bad: bool = False


def race_limit(max_seq_len: int) -> int:
    """Returns the most tokens of a sequence: 512, or a shorter context."""
    return min(RACE_TOKENS, max_seq_len)


def read_race_examples(
    path: Path, part: str, tokenizer: Tokenizer, room: Room, field: str
) -> Examples:
    """Reads RACE's questions, high school's first, into sequences that fit in `room`.

    Raises MtcliError, whose `field` named the folder, with the first bad articles by file, and the
    first questions that fit in no row, unless they are skipped.
    """
    levels, bad = read_race_files(path, part, field)
    faults = [_fault_of(file, problem) for file, problem in bad]
    examples, files, ended = [], [], [0, 0]
    for level, articles in levels.items():
        for file, article in articles:
            files.append(file)
            context = _ids(tokenizer, article.text)
            for number, label in enumerate(article.answers):
                asked, truncated = _choices(article, number, context, tokenizer, room)
                cluster = f"{level}/{file.name}"
                example = Example(asked, label, level, cluster, f"{cluster}#{number}")
                if example.size > room.row:
                    reason = f"question {number + 1} and its choices have {example.size} tokens, "
                    reason += f"and batch.seq_len={room.row} is the context"
                    hint = f"batch.seq_len of {example.size} or more"
                    faults.append((f"{file}:1", BadLine("longer than the context", reason, hint)))
                    continue
                examples.append(example)
                ended = [a + b for a, b in zip(ended, truncated, strict=True)]
    if faults and not room.skip_bad:
        raise refusal(faults, path, len(examples), field)
    if not examples:
        raise wrong(
            f"{path} has no question: all {len(faults)} are bad",
            "mend the files that are named above",
            field,
        )
    return Examples(examples, _by_kind(faults), files, (ended[0], ended[1]))


def _fault_of(file: Path, problem: Problem) -> tuple[str, BadLine]:
    """Converts the problem of a bad article into (FILE:LINE, fault)."""
    line, _, why = problem.message.removeprefix(f"{file}, line ").partition(": ")
    where, why = (f"{file}:{line}", why) if line.isdecimal() else (str(file), problem.message)
    return where, BadLine("bad articles", why, problem.hint)


def _choices(
    article: Article, number: int, context: np.ndarray, tokenizer: Tokenizer, room: Room
) -> tuple[tuple[Segments, ...], tuple[bool, bool]]:
    """Builds a question's sequences, and says whether (the article, a question with its choice) was
    cut."""
    question, sequences, truncated = article.questions[number], [], [False, False]
    for option in article.options[number]:
        text = f"{question} {option}"
        if BLANK in question:
            text = question.replace(BLANK, option)
        asked = _ids(tokenizer, text)
        first = asked[: max(1, room.sequence // QUESTION)]
        left = max(0, room.sequence - len(first) - 3)
        sequences.append(Segments(first, context[:left]))
        truncated = [truncated[0] or len(context) > left, truncated[1] or len(asked) > len(first)]
    return tuple(sequences), (truncated[0], truncated[1])


def read_classes(
    path: Path, tokenizer: Tokenizer, room: Room, num_labels: int, field: str
) -> Examples:
    """Reads lines of `text`, `label` and optionally `text_pair`.

    Raises MtcliError with the first bad lines by file and number, unless they are skipped: no such
    object, a label out of range, or too many tokens for `room`.
    """

    def read(line: bytes) -> Example:
        record = _record(line)
        label = record["label"]
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < num_labels:
            hint = f"a whole number from 0 to {num_labels - 1}"
            reason = f"label {shown(label)} of num_labels={num_labels}"
            raise BadLine("label", reason, hint, "another model.num_labels")
        pair = record.get("text_pair")
        second = None if pair is None else _ids(tokenizer, pair)
        segments = Segments(_ids(tokenizer, record["text"]), second)
        if segments.size > room.sequence:
            reason = f"it has {segments.size} tokens, and {room.sequence} fit"
            longer = f"batch.seq_len and a model of {segments.size} or more"
            raise BadLine("longer than the context", reason, "shorten it", longer)
        return Example((segments,), label, "", "", "")

    lines, numbered = read_lines(path, lambda line: partial(read, line), field)
    examples = [example._replace(name=str(number)) for number, example in lines]
    faults = [(f"{path}:{number}", fault) for number, fault in numbered]
    if faults and not room.skip_bad:
        raise refusal(faults, path, len(examples), field)
    if not examples:
        raise wrong(f"{path} has no example: {len(faults)} lines are bad", LINE, field)
    return Examples(examples, _by_kind(faults), [path])


def _by_kind(faults: list[tuple[str, BadLine]]) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for where, fault in faults:
        kinds.setdefault(fault.kind, []).append(where)
    return kinds


def _record(line: bytes) -> dict[str, Any]:
    record = json_object(line, LINE)
    for name in ("text", "label"):
        if name not in record:
            raise BadLine(f"no {name}", f"it has no {name}", LINE)
    for name in ("text", "text_pair"):
        if record.get(name) is not None and not is_text(record[name]):
            raise BadLine(f"no {name}", f"its {name} is {shown(record[name])}, no text", LINE)
    if not is_text(record["text"]):
        raise BadLine("no text", f"its text is {shown(record['text'])}, no text", LINE)
    return record


def _ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text), np.int32)
