"""The tasks by name: each is a function from a path to requests, and from their scores to a report.

A new task is one row of `TASKS`. Items are what a task counts (questions, passages), requests what
the model is asked.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from mtcli.core.evaluate.encode import Encoder
from mtcli.core.evaluate.lambada import prepare_lambada
from mtcli.core.evaluate.prepared import Options, Prepared
from mtcli.core.evaluate.race import prepare_race
from mtcli.core.evaluate.wikitext import prepare_wikitext
from mtcli.core.spec.errors import MtcliError, Problem
from mtcli.core.spec.synonyms import closest

HARNESS_PREFIX = "lm_eval:"  # lm_eval:NAME and lm_eval:FILE.yaml run lm-evaluation-harness tasks


class Task(NamedTuple):
    """One evaluation: `prepare` reads the file, `headline` names the number people quote."""

    name: str
    about: str
    headline: str
    prepare: Callable[[Path, Encoder, Options], Prepared]


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        task.name: task
        for task in (
            Task(
                "wikitext103",
                "perplexity of wiki.test.tokens, Megatron-LM's protocol",
                "perplexity",
                prepare_wikitext,
            ),
            Task(
                "lambada",
                "last words of the raw LAMBADA passages, all tokens right",
                "accuracy",
                prepare_lambada,
            ),
            Task(
                "race",
                "reading comprehension, high and middle school, prompted as lm-eval does",
                "accuracy",
                prepare_race,
            ),
        )
    }
)


class TaskSpec(NamedTuple):
    """One --task: a task of ours and its path, or (path None) one of lm-evaluation-harness."""

    name: str
    path: Path | None


def parse_tasks(specs: Sequence[str]) -> list[TaskSpec]:
    """The --task flags, each NAME=PATH or lm_eval:NAME.

    Raises MtcliError with every bad flag at once: an unknown name with the closest known one, a
    missing path, a name given twice.
    """
    problems = [problem for spec in specs if (problem := _problem(spec)) is not None]
    names = [_split(spec)[0] for spec in specs]
    problems += [
        Problem(f"{name} is given {names.count(name)} times", "give each task once", "--task")
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if not specs:
        problems.append(Problem("no task is given, at least 1 is needed", _usage(), "--task"))
    if problems:
        raise MtcliError(*problems)
    return [TaskSpec(name, Path(path) if path else None) for name, path in map(_split, specs)]


def _split(spec: str) -> tuple[str, str]:
    if spec.startswith(HARNESS_PREFIX):
        return spec, ""
    name, _, path = spec.partition("=")
    return name, path


def _problem(spec: str) -> Problem | None:
    name, path = _split(spec)
    if name.startswith(HARNESS_PREFIX):
        named = name.removeprefix(HARNESS_PREFIX)
        return None if named else Problem(f"{spec} names no task", _usage(), "--task")
    if name not in TASKS:
        hint = f"the tasks are {_usage()}{closest(name, TASKS)}"
        return Problem(f"there is no task {name!r}", hint, "--task")
    if not path:
        return Problem(f"{spec} has no path", f"{name}=PATH", "--task")
    if not Path(path).exists():
        hint = "give the file, or the folder it is in"
        return Problem(f"{name}: {path} does not exist", hint, "--task")
    return None


def _usage() -> str:
    ours = ", ".join(f"{name}=PATH" for name in TASKS)
    return f"{ours}, or {HARNESS_PREFIX}NAME for a task of lm-evaluation-harness"
