"""Looks up tasks by name, reads --task flags, and binds a task to a model.

A task of ours is a function from a path to a `PreparedTask`; a new one is one row of `TASKS`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.synonyms import closest
from mtcli.core.evaluate.encode import Encoder
from mtcli.core.evaluate.tasks.lambada import prepare_lambada
from mtcli.core.evaluate.tasks.race import prepare_race
from mtcli.core.evaluate.tasks.task import Advance, PreparedTask, Report, TaskOptions
from mtcli.core.evaluate.tasks.wikitext import prepare_wikitext
from mtcli.core.inference.scoring import Scorer

HARNESS_PREFIX = "lm_eval:"  # lm_eval:NAME and lm_eval:FILE.yaml run lm-evaluation-harness tasks
TASKS: dict[str, Callable[[Path, Encoder, TaskOptions], PreparedTask]] = {
    "wikitext103": prepare_wikitext,  # perplexity of wiki.test.tokens, Megatron-LM's protocol
    "lambada": prepare_lambada,  # last words of the raw LAMBADA passages, all tokens right
    "race": prepare_race,  # reading comprehension, high and middle school, prompted as by lm-eval
}
OF_ENCODERS = ("mlm", "classification")  # and race, where the head is of multiple choice
USAGE = ", ".join(f"{name}=PATH" for name in (*TASKS, *OF_ENCODERS))
USAGE += f", or {HARNESS_PREFIX}NAME for a task of lm-evaluation-harness"

# A task of ours and its path, or (path None) one of lm-evaluation-harness.
TaskSpec = tuple[str, Path | None]


def parse_tasks(specs: Sequence[str]) -> list[TaskSpec]:
    """Parses the --task flags, each NAME=PATH or lm_eval:NAME.

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
        problems.append(Problem("no task is given, at least 1 is needed", USAGE, "--task"))
    if problems:
        raise MtcliError(*problems)
    return [(name, Path(path) if path else None) for name, path in map(_split, specs)]


def _split(spec: str) -> tuple[str, str]:
    if spec.startswith(HARNESS_PREFIX):
        return spec, ""
    name, _, path = spec.partition("=")
    return name, path


def _problem(spec: str) -> Problem | None:
    name, path = _split(spec)
    if name.startswith(HARNESS_PREFIX):
        named = name.removeprefix(HARNESS_PREFIX)
        return None if named else Problem(f"{spec} names no task", USAGE, "--task")
    if name not in (*TASKS, *OF_ENCODERS):
        hint = f"the tasks are {USAGE}{closest(name, (*TASKS, *OF_ENCODERS))}"
        return Problem(f"there is no task {name!r}", hint, "--task")
    if not path:
        return Problem(f"{spec} has no path", f"{name}=PATH", "--task")
    is_prefix = name == "mlm" and Path(f"{path}.idx").exists()
    if not Path(path).exists() and not is_prefix:
        hint = "give the file, or the folder it is in"
        return Problem(f"{name}: {path} does not exist", hint, "--task")
    return None


class TaskRun(NamedTuple):
    """One task ready to run."""

    name: str
    summary: str  # what it will do, in numbers
    num_requests: int | None  # None: lm-eval decides while it runs
    run: Callable[[Advance], Report]


def task_runs(
    specs: Sequence[TaskSpec],
    scorer: Scorer,
    encoder: Encoder,
    options: TaskOptions,
    batch_tokens: int,
) -> list[TaskRun]:
    """Binds each task to the model, its file read and its requests packed.

    Raises MtcliError for all bad files, and for a task of lm-eval's where it is not installed.
    """

    def ours(name: str, path: Path) -> TaskRun:
        from mtcli.core.evaluate.packing import plan, run  # imports torch: not to check --task

        if name not in TASKS:
            message = f"the task {name} is for an encoder, and this model predicts next tokens"
            raise wrong(message, f"one of {', '.join(TASKS)}", "--task")
        prepared = TASKS[name](path, encoder, options)
        planned = plan(scorer, prepared.requests, batch_tokens)
        summary = (
            f"{prepared.num_items:,} items, {len(planned.requests):,} requests, "
            f"{planned.num_tokens:,} tokens in {len(planned.groups):,} forward passes "
            f"({planned.num_unshared_tokens:,} without sharing)"
        )
        return TaskRun(
            name,
            summary,
            len(planned.requests),
            lambda progress: prepared.report(run(scorer, planned, progress)),
        )

    def harness(name: str) -> TaskRun:
        if find_spec("lm_eval") is None:
            message = f"{name} needs lm-evaluation-harness, which is not installed"
            raise wrong(message, "pip install 'mtcli[eval]'", "--task")

        def score(progress: Advance) -> Report:
            from mtcli.core.evaluate.harness import HarnessModel, evaluate_harness  # optional extra

            model = HarnessModel(scorer, encoder, batch_tokens, progress)
            return evaluate_harness(name.removeprefix(HARNESS_PREFIX), model, options.limit)

        return TaskRun(name, "items and requests as lm-eval makes them", None, score)

    return collect_errors(
        *(partial(ours, name, path) if path else partial(harness, name) for name, path in specs)
    )
