"""Reads task files: TOML that defines a task's items and how they are scored.

A task of multiple choice has an `answer`. One without is a cloze: its only choice is right where
each of its tokens is the model's argmax. Several prompts with one choice are partial evaluation
(arXiv:1806.02847): the choice is scored after each of them.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr, ValidationError

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.fields import Section
from mtcli.core.config.synonyms import closest
from mtcli.core.config.untrusted import parse_toml, read_untrusted

SUFFIX = ".toml"
PAGE = "docs/reference/tasks.md says what a task file has"
Normalisation = Literal["token", "character", "byte", "unconditional"]


class DataLayout(Section):
    """The files of a dataset's rows: of each list, the first file that the folder has is read."""

    format: Literal["jsonl", "tsv", "lines", "race"] = "jsonl"
    """a JSON object a line, a table with a header, a text a line, or RACE's articles; JSON lines
    are recognised in any case"""
    test: tuple[str, ...]
    """files of the items"""
    test_labels: tuple[str, ...] = ()
    """files of their labels, one a line, where separate: the field `label`"""
    train: tuple[str, ...] = ()
    """files that shots are drawn from"""
    train_labels: tuple[str, ...] = ()
    """files of their labels"""


class TaskFile(Section):
    """A task as data. Templates and expressions are Jinja's, over the fields of a row."""

    name: str = ""
    """name in results; the file's name by default"""
    version: int
    """increased whenever results change"""
    description: str
    """the task, and the source of its prompt"""
    base: str = ""
    """a task of ours whose fields are the defaults of this file"""
    data: DataLayout
    values: dict[str, str] = {}
    """further fields, computed in this order: expressions"""
    where: str = ""
    """an expression: rows for which it is false are left out"""
    intro: str = ""
    """a text before the shots"""
    prompt: str | tuple[str, ...]
    """a template, or one for each answer"""
    choices: str | tuple[str, ...]
    """a template for each choice, or an expression that is a list of texts"""
    answer: str = ""
    """an expression: the number of the right choice from 0, or its text; none makes it a cloze"""
    delimiter: str = " "
    """between prompt and choice"""
    separator: str = "\n\n"
    """after each shot"""
    spare_shot: bool = False
    """for --shots-per lm-eval: lm-eval draws one example more than the shots of an item, where its
    task names neither a fewshot_split nor a test_split"""
    id: str = ""
    """an expression: the item's name; its number from 0 by default"""
    group: str = ""
    """an expression: the part of the data set that an item belongs to"""
    groups: tuple[str, ...] = ()
    """the parts that are reported, each with its own accuracy"""
    cluster: str = ""
    """an expression: the key of items that are not independent, such as a passage"""
    normalisations: tuple[Normalisation, ...] = ()
    """accuracies besides the raw one: by log-likelihood per token, character or byte of a choice,
    or minus the choice's log-likelihood after `unconditional`"""
    unconditional: str = "Answer:"
    """the context of a choice without its question"""
    metric: str = "accuracy"
    """the accuracy that publications report"""
    _file: str = PrivateAttr("")

    @property
    def file(self) -> str:
        """The file it was read from, or the name of a task of ours."""
        return self._file


def task_names() -> tuple[str, ...]:
    """Lists the task files that ship with mtcli."""
    names = (entry.name for entry in _shipped().iterdir())
    return tuple(sorted(n.removesuffix(SUFFIX) for n in names if n.endswith(SUFFIX)))


def load_task(name: str) -> TaskFile:
    """Loads a task of ours by name, or a user's by the path of a file that ends in .toml.

    Raises MtcliError with every wrong field.
    """
    table = _table(name)
    try:
        task = TaskFile.model_validate({"name": Path(name).stem} | table)
    except ValidationError as error:
        raise MtcliError(*(_problem(name, detail) for detail in error.errors())) from None
    _check(name, task)
    task._file = name
    return task


def metric_name(normalisation: str) -> str:
    """Names the accuracy under a normalisation, as results do."""
    return f"accuracy_{'' if normalisation == 'unconditional' else 'per_'}{normalisation}"


def _shipped() -> Any:
    return files("mtcli.core.evaluate.tasks")


def _table(name: str) -> dict[str, Any]:
    try:
        if name.endswith(SUFFIX):
            text = read_untrusted(name).decode("utf-8-sig")
        else:
            text = _shipped().joinpath(name + SUFFIX).read_text(encoding="utf-8")
        table = parse_toml(text)
    except OSError as error:
        raise wrong(f"{name} cannot be read: {error.strerror}", PAGE, "--task") from None
    except ValueError as error:
        raise wrong(f"{name} is not TOML: {error}", PAGE, "--task") from None
    base = table.get("base")
    if not base:
        return table
    if base not in task_names():
        hint = f"one of {', '.join(task_names())}{closest(str(base), task_names())}"
        raise wrong(f"{name}: there is no task {base!r} to be its base", hint, "--task")
    below = _table(str(base))
    for section in ("data", "values"):
        if isinstance(table.get(section), dict):
            table[section] = below.get(section, {}) | table[section]
    return {key: value for key, value in below.items() if key != "name"} | table


def _problem(name: str, detail: Any) -> Problem:
    field = ".".join(str(part) for part in detail["loc"])
    hint = PAGE
    if detail["type"] == "extra_forbidden":
        hint += closest(str(detail["loc"][-1]), (*TaskFile.model_fields, *DataLayout.model_fields))
    return Problem(f"{name}: {field}: {detail['msg'].lower()}", hint, "--task")


def _check(name: str, task: TaskFile) -> None:
    """Raises MtcliError with every contradiction between fields."""
    problems = []
    prompts, choices = len(several(task.prompt)), len(several(task.choices))
    if task.answer and max(prompts, choices) == 1 and not isinstance(task.choices, str):
        problems.append(f"{prompts} prompts and {choices} choices have nothing to choose from")
    if prompts > 1 and (choices > 1 or isinstance(task.choices, str)):
        problems.append(f"{prompts} prompts take 1 choice, and it has {choices}")
    if not task.answer and (prompts > 1 or choices > 1 or isinstance(task.choices, str)):
        problems.append(f"without an answer it is a cloze: 1 prompt and 1 choice, not {choices}")
    if not task.answer and task.normalisations:
        problems.append("a cloze has no normalisations")
    metrics = ["accuracy", *map(metric_name, task.normalisations)]
    if task.metric not in metrics:
        problems.append(f"metric {task.metric!r} is none of {', '.join(metrics)}")
    if task.groups and not task.group:
        problems.append(f"{len(task.groups)} groups, and no expression `group`")
    if problems:
        raise MtcliError(*(Problem(f"{name}: {what}", PAGE, "--task") for what in problems))


def several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """Returns the texts of a field that is one or several."""
    return (value,) if isinstance(value, str) else value
