"""Reads RACE's files (arXiv:1704.04683): articles, questions, four options each, answers."""

from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.untrusted import is_text, shown
from mtcli.core.data.bad_lines import NAMED
from mtcli.core.data.text_files import json_of, read_text

LEVELS = ("high", "middle")
LETTERS = "ABCD"
SHAPE = 'a RACE file is {"article", "questions": [...], "options": [[4 each]], "answers": ["A"..]}'


class Article(NamedTuple):
    """A text and its questions; four options per question, and answers as indices into them."""

    text: str
    questions: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]
    answers: tuple[int, ...]


class RaceFiles(NamedTuple):
    """Articles by level, each with its file, and the faults of other files."""

    levels: dict[str, list[tuple[Path, Article]]]
    bad: list[tuple[Path, Problem]]


def read_race(
    path: Path, part: str, field: str = "--task"
) -> dict[str, list[tuple[Path, Article]]]:
    """Reads the articles of a folder by level; see `read_race_files`.

    Raises MtcliError, whose `field` named the folder, with the first bad articles by file.
    """
    race = read_race_files(path, part, field)
    if race.bad:
        raise MtcliError(*(problem for _, problem in race.bad[:NAMED]))
    return race.levels


def read_race_files(path: Path, part: str, field: str) -> RaceFiles:
    """Reads the articles of a folder with high/ and middle/, by level, in numerical order. A folder
    above has them in `part`: train, dev or test.

    Raises MtcliError, whose `field` named the folder, where neither level exists.
    """
    if not any((path / level).is_dir() for level in LEVELS) and (path / part).is_dir():
        path = path / part
    files = {level: sorted((path / level).glob("*.txt"), key=_number) for level in LEVELS}
    if not any(files.values()):
        message = f"{path} holds 0 RACE articles"
        hint = "give the folder with high/ and middle/, each with RACE's own .txt files"
        raise wrong(message, hint, field)
    levels: dict[str, list[tuple[Path, Article]]] = {}
    bad = []
    for level, file in ((name, file) for name in LEVELS for file in files[name]):
        try:
            levels.setdefault(level, []).append((file, _article(file, field)))
        except MtcliError as error:
            bad.append((file, error.problems[0]))
    return RaceFiles({level: articles for level, articles in levels.items() if articles}, bad)


def _number(file: Path) -> tuple[int, str]:
    return (int(file.stem), "") if file.stem.isdecimal() else (2**63, file.stem)


def _article(file: Path, field: str) -> Article:
    row = json_of(read_text(file, field), file, 1, field)
    try:
        text, questions, options = row["article"], row["questions"], row["options"]
        answers = [list(LETTERS).index(letter) for letter in row["answers"]]
        _require_texts([text], questions, *options)
    except (KeyError, TypeError, ValueError) as error:
        why = f"no {error} in it" if isinstance(error, KeyError) else "it is not a RACE article"
        raise wrong(f"{file}, line 1: {why}", SHAPE, field) from error
    if not questions or not len(questions) == len(options) == len(answers):
        counts = f"{len(questions)} questions, {len(options)} options, {len(answers)} answers"
        raise wrong(f"{file}, line 1: {counts}", SHAPE, field)
    for choices in options:
        if len(choices) != len(LETTERS):
            message = f"{len(choices)} options for a question, {len(LETTERS)} are needed"
            raise wrong(f"{file}, line 1: {message}", SHAPE, field)
    return Article(text, tuple(questions), tuple(map(tuple, options)), tuple(answers))


def _require_texts(*lists: Any) -> None:
    """Raises TypeError unless each argument is a list of text."""
    for texts in lists:
        if not isinstance(texts, list) or not all(map(is_text, texts)):
            raise TypeError(f"{shown(texts)} is not a list of text")
