"""RACE (arXiv:1704.04683), zero-shot, prompted and scored as lm-eval's race task, both levels.

One item per article: its last question. The article's earlier questions stand before it with their
answers, so the prompt shows the format without any training example. The choice with the highest
summed log-likelihood is the answer; lm-eval scores the high level, we score high and middle.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import is_text, parse_json, shown
from mtcli.core.evaluate.encode import Encoder
from mtcli.core.evaluate.requests import Score
from mtcli.core.evaluate.tasks.task import (
    PreparedTask,
    Report,
    TaskOptions,
    bad_line,
    read_text,
)

LEVELS = ("high", "middle")
LETTERS = "ABCD"
CLOZE = "  _  ."  # a question that ends so is read as a sentence, its answer in the gap
SHAPE = 'a RACE file is {"article", "questions": [...], "options": [[4 each]], "answers": ["A"..]}'


class Article(NamedTuple):
    """A text and its questions; options are four per question, answers indices into them."""

    text: str
    questions: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]
    answers: tuple[int, ...]


def prepare_race(path: Path, encoder: Encoder, options: TaskOptions) -> PreparedTask:
    """Prepares four requests per article of RACE's .txt files in a folder's high/ and middle/.

    Raises MtcliError when neither level is there, naming the file of the first bad article.
    """
    levels = {level: articles[: options.limit] for level, articles in _read(path).items()}
    requests = [
        one
        for articles in levels.values()
        for article in articles
        for one in encoder.requests(prompt(article), [" " + o for o in article.options[-1]])
    ]
    answers = {level: [a.answers[-1] for a in articles] for level, articles in levels.items()}
    return PreparedTask(sum(map(len, answers.values())), requests, partial(report_race, answers))


def prompt(article: Article) -> str:
    """The article, its earlier questions with their answers, and the last question."""
    text = f"Article: {article.text}\n\n"
    earlier = zip(article.questions, article.options, article.answers, strict=True)
    for question, options, answer in list(earlier)[:-1]:
        if question.endswith(CLOZE):
            text += question[:-5] + options[answer] + "\n"
        else:
            text += f"Question: {question}\nAnswer: {options[answer]}\n"
    return text + article.questions[-1]


def report_race(answers: dict[str, list[int]], scores: Sequence[Score]) -> Report:
    """Reports accuracy over all items and per level (None for a level that is not there)."""
    correct, start = {}, 0
    for level, right in answers.items():
        correct[level] = 0
        for answer in right:
            choices = [score.logprob for score in scores[start : start + len(LETTERS)]]
            correct[level] += choices.index(max(choices)) == answer
            start += len(LETTERS)
    total = sum(map(len, answers.values()))
    report: Report = {"accuracy": sum(correct.values()) / total}
    for level in LEVELS:
        report[level] = correct[level] / len(answers[level]) if level in answers else None
    report |= {"correct": sum(correct.values()), "total": total}
    return report | {f"{level}_total": len(answers.get(level, ())) for level in LEVELS}


def _read(path: Path) -> dict[str, list[Article]]:
    """Reads the articles by level, in the order of their numbers."""
    if not any((path / level).is_dir() for level in LEVELS) and (path / "test").is_dir():
        path = path / "test"
    found = {level: sorted((path / level).glob("*.txt"), key=_number) for level in LEVELS}
    if not any(found.values()):
        message = f"{path} holds 0 RACE articles"
        hint = "give the folder with high/ and middle/, each with RACE's own .txt files"
        raise wrong(message, hint, "--task")
    return {level: [_article(file) for file in files] for level, files in found.items() if files}


def _number(file: Path) -> tuple[int, str]:
    return (int(file.stem), "") if file.stem.isdecimal() else (2**63, file.stem)


def _article(file: Path) -> Article:
    row = _row(file)
    try:
        text, questions, options = row["article"], row["questions"], row["options"]
        answers = [list(LETTERS).index(letter) for letter in row["answers"]]
        _require_texts([text], questions, *options)
    except (KeyError, TypeError, ValueError) as error:
        why = f"no {error} in it" if isinstance(error, KeyError) else "it is not a RACE article"
        raise wrong(f"{file}, line 1: {why}", SHAPE, "--task") from error
    if not questions or not len(questions) == len(options) == len(answers):
        counts = f"{len(questions)} questions, {len(options)} options, {len(answers)} answers"
        raise wrong(f"{file}, line 1: {counts}", SHAPE, "--task")
    for choices in options:
        if len(choices) != len(LETTERS):
            message = f"{len(choices)} options for a question, {len(LETTERS)} are needed"
            raise wrong(f"{file}, line 1: {message}", SHAPE, "--task")
    return Article(text, tuple(questions), tuple(map(tuple, options)), tuple(answers))


def _row(file: Path) -> Any:
    try:
        return parse_json(read_text(file))
    except json.JSONDecodeError as error:
        raise bad_line(file, error.lineno, f"not JSON: {error.msg}") from error
    except ValueError as error:
        raise bad_line(file, 1, f"not JSON: {error}") from error


def _require_texts(*lists: Any) -> None:
    """Raises TypeError where something is not a list of text."""
    for texts in lists:
        if not isinstance(texts, list) or not all(map(is_text, texts)):
            raise TypeError(f"{shown(texts)} is not a list of text")
