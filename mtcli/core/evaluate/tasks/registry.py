"""Parses --task flags, looks tasks up by name, and binds them to a model.

A task is a TOML file, ours or the user's; WikiText-103 alone has code of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mtcli.core.config.errors import MtcliError, Problem, collect_errors, wrong
from mtcli.core.config.schema import EvalConfig
from mtcli.core.config.synonyms import nearest
from mtcli.core.evaluate.eval_tokenizer import EvalTokenizer
from mtcli.core.evaluate.journal import Journal
from mtcli.core.evaluate.loglikelihood import Score
from mtcli.core.evaluate.tasks.choice import prepare_task
from mtcli.core.evaluate.tasks.task import Advance, PreparedTask, Report, TaskOptions, TaskRun
from mtcli.core.evaluate.tasks.task_file import SUFFIX, load_task, task_names
from mtcli.core.evaluate.tasks.wikitext import prepare_wikitext

if TYPE_CHECKING:  # imports torch
    from mtcli.core.inference.chat import ChatPrompts
    from mtcli.core.inference.model import InferenceModel

HARNESS_PREFIX = "lm_eval:"  # lm_eval:NAME and lm_eval:FILE.yaml run lm-evaluation-harness tasks
WIKITEXT = "wikitext103"  # perplexity of wiki.test.tokens, Megatron-LM's protocol
TASKS = (WIKITEXT, *task_names())
OF_ENCODERS = ("mlm", "classification")  # and race, where the head is of multiple choice
USAGE = ", ".join(f"{name}=PATH" for name in (*TASKS, *OF_ENCODERS))
USAGE += f", FILE{SUFFIX}=PATH for a task of your own, "
USAGE += f"or {HARNESS_PREFIX}NAME for a task of lm-evaluation-harness"

# A task of ours and its path, or (path None) one of lm-evaluation-harness.
TaskSpec = tuple[str, Path | None]


def parse_tasks(specs: Sequence[str]) -> list[TaskSpec]:
    """Parses the --task flags, each NAME=PATH or lm_eval:NAME.

    Raises MtcliError with every bad flag: an unknown name with the closest known one, a missing
    path, a name given twice.
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


def require_training_tasks(tables: Sequence[EvalConfig]) -> None:
    """Checks the tasks of a config's [[eval]] tables.

    Raises MtcliError with the problems of all.
    """
    specs = [table.task for table in tables]
    names = [_split(spec)[0] for spec in specs]
    problems = []
    for number, (spec, name) in enumerate(zip(specs, names, strict=True)):
        problem = _problem(spec)
        if problem is None and name in names[:number]:
            hint = "one table for each task"
            problem = Problem(f"{name} is the task of {names.count(name)} tables", hint)
        if problem is not None:
            problems.append(problem._replace(field=f"eval.{number}.task"))
    if problems:
        raise MtcliError(*problems)


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
    is_file = name.endswith(SUFFIX)
    if not is_file and name not in (*TASKS, *OF_ENCODERS):
        near = nearest(name, (*TASKS, *OF_ENCODERS))
        hint = f"did you mean {near}=PATH? " * bool(near) + f"the tasks are {USAGE}"
        return Problem(f"there is no task {name!r}", hint, "--task")
    if not path:
        return Problem(f"{spec} has no path", f"{name}=PATH", "--task")
    is_prefix = name == "mlm" and Path(f"{path}.idx").exists()
    if not Path(path).exists() and not is_prefix:
        hint = "give the file, or the folder it is in"
        return Problem(f"{name}: {path} does not exist", hint, "--task")
    return None


class Evaluation(NamedTuple):
    """The model and tokenizer to run tasks on, and the journal of results."""

    scorer: "InferenceModel"
    tokenizer: EvalTokenizer
    options: TaskOptions
    batch_tokens: int
    journal: Journal
    share: Callable[[Any], Any] = lambda value: value  # rank 0's value, on every rank
    ends: frozenset[int] = frozenset()  # tokens that end a generated text
    chat: "ChatPrompts | None" = None  # renders the contexts of lm-eval's tasks


def task_runs(specs: Sequence[TaskSpec], evaluation: Evaluation) -> list[TaskRun]:
    """Reads each task's file, packs its requests and binds it to the model.

    Raises MtcliError for all bad files, and for a task of lm-eval's where that is not installed.
    """
    names = [load_task(name).name if name.endswith(SUFFIX) else name for name, _ in specs]
    for name in {name for name in names if names.count(name) > 1}:
        hint = "a task file's `name` sets it apart"
        raise wrong(f"{names.count(name)} tasks are called {name}", hint, "--task")
    steps = (
        partial(_ours, evaluation, name, path) if path else partial(_harness, evaluation, name)
        for name, path in specs
    )
    return collect_errors(*steps)


def _prepared(evaluation: Evaluation, name: str, path: Path) -> tuple[str, PreparedTask]:
    """Prepares a task; returns its name in results, and its requests."""
    arguments = path, evaluation.tokenizer, evaluation.options
    if name == WIKITEXT:
        return name, prepare_wikitext(*arguments)
    if name in OF_ENCODERS:
        message = f"the task {name} is for an encoder, and this model predicts next tokens"
        raise wrong(message, f"one of {', '.join(TASKS)}", "--task")
    task = load_task(name)
    return task.name, prepare_task(task, *arguments)


def _ours(evaluation: Evaluation, name: str, path: Path) -> TaskRun:
    from mtcli.core.evaluate.packing import plan, scored  # imports torch: not to check --task

    name, prepared = _prepared(evaluation, name, path)
    restored = evaluation.share(list(evaluation.journal.scores(name, prepared).items()))
    done: dict[int, Score] = {}  # of requests
    spans = list(zip([0, *prepared.ends[:-1]], prepared.ends, strict=True))
    for number, scores in restored:
        done |= {spans[number][0] + i: Score(*score) for i, score in enumerate(scores)}
    left = [number for number in range(len(prepared.requests)) if number not in done]
    requests = [prepared.requests[number] for number in left]
    try:
        planned = plan(evaluation.scorer, requests, evaluation.batch_tokens)
    except MtcliError as error:
        raise error.about(name) from None
    item_of = [item for item, (start, end) in enumerate(spans) for _ in range(start, end)]

    def run(progress: Advance) -> Report:
        waiting = [end - start for start, end in spans]
        for number, _ in restored:
            evaluation.journal.add(
                name, prepared, number, _span(done, spans[number]), restored=True
            )
        for scores in scored(evaluation.scorer, planned):
            done.update({left[number]: score for number, score in scores.items()})
            for item in (item_of[left[number]] for number in scores):
                waiting[item] -= 1
                if waiting[item] == 0:
                    evaluation.journal.add(name, prepared, item, _span(done, spans[item]))
            evaluation.journal.flush()
            progress(len(scores))
        return prepared.report(_span(done, (0, len(prepared.requests))))

    summary = (
        f"{prepared.num_items:,} items, {len(prepared.requests):,} requests, "
        f"{planned.num_tokens:,} tokens in {planned.num_passes:,} forward passes "
        f"({planned.num_unshared_tokens:,} without sharing)"
    )
    if restored:
        summary += f"; {len(restored):,} items are kept from a run that was ended"
    return TaskRun(name, summary, len(left), run)


def _span(done: dict[int, Score], span: tuple[int, int]) -> list[Score]:
    return [done[number] for number in range(*span)]


def _harness(evaluation: Evaluation, name: str) -> TaskRun:
    if find_spec("lm_eval") is None:
        message = f"{name} needs lm-evaluation-harness, which is not installed"
        raise wrong(message, "pip install 'mtcli[eval]'", "--task")

    def score(progress: Advance) -> Report:
        from mtcli.core.evaluate.harness import HarnessModel, evaluate_harness  # optional extra

        tokenizer, chat = evaluation.tokenizer, evaluation.chat
        if chat is not None:
            tokenizer = replace(tokenizer, encode=chat.encode)
        model = HarnessModel(
            evaluation.scorer,
            tokenizer,
            evaluation.batch_tokens,
            progress,
            evaluation.ends,
            chat,
        )
        options = evaluation.options
        more = options.limit, options.shots, options.seed
        return evaluate_harness(name.removeprefix(HARNESS_PREFIX), model, *more)

    return TaskRun(name, "items and requests as lm-eval makes them", None, score)
