"""Reads the rows of a dataset in its public layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import parse_json
from mtcli.core.data.compressed import inner_name
from mtcli.core.data.race import Article, read_race
from mtcli.core.data.text_files import bad_line, json_form, read_text
from mtcli.core.evaluate.tasks.task import find_file
from mtcli.core.evaluate.tasks.task_file import DataLayout

JSON_LINES = (".jsonl", ".ndjson", ".json")
TEXTS = {"lines": ("", ".txt", ".text"), "tsv": ("", ".txt", ".tsv")}  # besides a task's own names


class Row(NamedTuple):
    """A row's fields, and the file and line that it came from."""

    fields: dict[str, Any]
    file: Path
    line: int


class Split(NamedTuple):
    """One part of a dataset: its rows, and the file that they came from."""

    rows: list[Row]
    source: Path
    missing_labels: str = ""  # the file of labels that was not there


def read_test(path: Path, layout: DataLayout) -> Split:
    """Reads the items of a folder, or of the file `path`.

    Raises MtcliError with file and line of the first bad row.
    """
    if layout.format == "race":
        return Split(list(_race(path, layout.test[0])), path)
    if not path.is_dir():
        return _read(path, layout, layout.test_labels)
    file = _first(path, layout.test)
    if file is None:
        message = f"{path} holds none of {', '.join(layout.test)}"
        raise wrong(
            message, "name the file, or the folder it is in: docs/reference/tasks.md", "--task"
        )
    return _read(file, layout, layout.test_labels)


def read_train(path: Path, layout: DataLayout) -> Split | None:
    """Reads the rows that shots are drawn from, next to the items; None where there are none."""
    folder = path if path.is_dir() else path.parent
    if layout.format == "race":
        folder = folder / "train" if (folder / "train").is_dir() else folder.parent / "train"
        return Split(list(_race(folder, "train")), folder) if folder.is_dir() else None
    file = _first(folder, layout.train)
    return None if file is None else _read(file, layout, layout.train_labels)


def _first(folder: Path, patterns: tuple[str, ...]) -> Path | None:
    """Returns the file of the first pattern that the folder has. Raises MtcliError for several."""
    pattern = next((candidate for candidate in patterns if any(folder.glob(candidate))), None)
    return None if pattern is None else find_file(folder, pattern)


def _read(file: Path, layout: DataLayout, label_files: tuple[str, ...]) -> Split:
    text = read_text(file)
    kind = _format(file, text, layout)
    rows = list({"jsonl": _jsonl, "tsv": _tsv, "lines": _lines}[kind](file, text))
    if not rows:
        raise wrong(
            f"{file} has 0 rows", "docs/reference/tasks.md says what each data set is", "--task"
        )
    if not label_files:
        return Split(rows, file)
    labels = _first(file.parent, tuple(Path(name).name for name in label_files))
    if labels is None:
        return Split(rows, file, label_files[0])
    values = [label for _, label in _numbered(read_text(labels))]
    if len(values) != len(rows):
        message = f"{labels} has {len(values)} labels, and {file.name} has {len(rows)} rows"
        raise wrong(message, "both must be of one part of the data set", "--task")
    return Split(
        [
            row._replace(fields={"label": label.strip()} | row.fields)
            for row, label in zip(rows, values, strict=True)
        ],
        file,
    )


def _format(file: Path, text: str, layout: DataLayout) -> str:
    """Detects the format of a file by its content and suffix.

    Raises MtcliError for a JSON document that is not lines, and for a suffix of another format.
    """
    form, suffix = json_form(text), inner_name(file).suffix
    if form == "document":
        hint = 'python -c "import json; [print(json.dumps(row)) for row in json.load(open('
        hint += f"'{file}'))]\" > {file.with_suffix('.jsonl').name}, where it is a list of rows"
        raise wrong(f"{file} is one JSON document, and not a JSON object a line", hint, "--task")
    if form == "lines" or suffix in JSON_LINES or layout.format == "jsonl":
        return "jsonl"
    named = (inner_name(Path(name)).suffix for name in (*layout.test, *layout.train))
    suffixes = dict.fromkeys((*TEXTS[layout.format], *named))
    if suffix not in suffixes:
        said = f"{file} ends in {suffix}, and is no JSON lines"
        hint = f"name it by what it holds: {', '.join(filter(None, suffixes))} or .jsonl"
        raise wrong(said, f"{hint}; docs/reference/tasks.md says what each data set is", "--task")
    return layout.format


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    """Yields the numbers and contents of lines that are not blank."""
    lines = enumerate(text.split("\n"), start=1)
    return ((number, line) for number, line in lines if line.strip())


def _jsonl(file: Path, text: str) -> Iterator[Row]:
    for number, line in _numbered(text):
        try:
            fields = parse_json(line)
        except ValueError as error:
            at = f" at column {error.colno}" if hasattr(error, "colno") else ""
            why = error.msg if hasattr(error, "msg") else error
            raise bad_line(file, number, f"not JSON: {why}{at}") from error
        if not isinstance(fields, dict):
            raise bad_line(file, number, "not a JSON object")
        yield Row(fields, file, number)


def _tsv(file: Path, text: str) -> Iterator[Row]:
    lines = _numbered(text)
    header = next(lines)[1].split("\t")
    for number, line in lines:
        cells = line.split("\t")
        if len(cells) != len(header):
            counts = f"{len(cells)} columns, and the header has {len(header)}"
            raise bad_line(file, number, counts)
        yield Row(dict(zip(header, cells, strict=True)), file, number)


def _lines(file: Path, text: str) -> Iterator[Row]:
    return (Row({"text": line}, file, number) for number, line in _numbered(text))


def _race(path: Path, part: str) -> Iterator[Row]:
    """Yields a row for each question; `earlier` holds the article's previous ones and their
    answers."""
    for level, articles in read_race(path, part).items():
        for file, article in articles:
            for number in range(len(article.questions)):
                fields = _question(article, number) | {"level": level, "file": file.name}
                yield Row(fields, file, 1)


def _question(article: Article, number: int) -> dict[str, Any]:
    asked = [
        {"question": question, "options": list(options), "answer": answer}
        for question, options, answer in zip(*article[1:], strict=True)
    ]
    more = {"article": article.text, "number": number, "last": number == len(asked) - 1}
    return asked[number] | more | {"earlier": asked[:number]}
