"""Evaluates checkpoints: opens them, binds their tasks, and runs the tasks one after another."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any

from mtcli.core.config.errors import wrong
from mtcli.core.data.tokenize import Tokenizer, load_tokenizer
from mtcli.core.evaluate.bert_tasks import encoder_runs
from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer
from mtcli.core.evaluate.journal import Journal
from mtcli.core.evaluate.packing import BATCH_TOKENS
from mtcli.core.evaluate.request import EvalRequest
from mtcli.core.evaluate.tasks.registry import Evaluation, task_runs
from mtcli.core.evaluate.tasks.task import TaskOptions, TaskRun
from mtcli.core.inference.chat import ChatPrompts
from mtcli.core.inference.model import InferenceModel, OpenModel, open_model
from mtcli.core.runtime.launch import Runtime
from mtcli.core.runtime.progress import progress_bar


def evaluate(
    request: EvalRequest, runtime: Runtime, say: Callable[[str], object]
) -> dict[str, Any] | None:
    """Returns each task's report, and how it was produced; None on every rank but the first.
    Collective.

    The first rank announces the work in numbers through `say`.
    """
    opened, *members = (
        open_model(path, request.overrides, runtime, True, request.base, request.weights)
        for path in (request.checkpoint, *request.ensemble)
    )
    read = replace(opened, tokenizer=_tokenizer(opened, request.tokenizer))
    identity = "+".join(model.identity() for model in (read, *members))
    summary = {"checkpoint": request.checkpoint} | opened.facts()
    summary |= {"device": runtime.device.type}
    summary |= {"versions": {name: _version(name) for name in ("mtcli", "torch", "lm_eval")}}
    with Journal(request.items if runtime.rank == 0 else None, identity) as journal:
        runs = _task_runs(request, read, [model.scorer for model in members], journal, runtime)
        if runtime.rank == 0:
            say(_announcement(summary, runs))
        reports = _run(runs, quiet=runtime.rank > 0)
        journal.finish(list(reports["tasks"]))
    if runtime.rank > 0:
        return None
    return summary | reports | ({"items": request.items_beside_json()} if journal.lines else {})


def _task_runs(
    request: EvalRequest,
    opened: OpenModel,
    ensemble: Sequence[InferenceModel],
    journal: Journal,
    runtime: Runtime,
) -> list[TaskRun]:
    tokens = request.batch_tokens or BATCH_TOKENS[runtime.device.type]
    scorer, tokenizer = opened.scorer, opened.require_tokenizer()
    if scorer.config.model.head == "lm":
        options = TaskOptions(
            scorer.max_seq_len,
            request.limit,
            request.overlap,
            request.shots,
            request.shots_per,
            request.seed,
            request.contaminated,
        )
        folder = opened.checkpoint.tokenizer_folder
        chat = ChatPrompts(tokenizer, folder) if request.chat else None
        arguments = eval_tokenizer(tokenizer), options, tokens, journal, scorer.of_rank_0
        return task_runs(request.tasks, Evaluation(scorer, *arguments, opened.end_ids(), chat))
    models = [scorer, *ensemble]
    return encoder_runs(request.tasks, models, tokenizer, request.limit, tokens, journal)


def _tokenizer(opened: OpenModel, tokenizer: str | None) -> Tokenizer:
    chosen = opened.tokenizer if tokenizer is None else load_tokenizer(tokenizer)
    if chosen is None:
        message = f"the checkpoint {opened.checkpoint.folder} holds no tokenizer"
        raise wrong(message, "name the one that it was trained with", "--tokenizer")
    return chosen


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _announcement(summary: dict[str, Any], runs: Sequence[TaskRun]) -> str:
    model = summary["model"]
    sizes = ", ".join(f"{name}={size}" for name, size in summary["layout"].items())
    first = (
        f"{summary['checkpoint']}: {model['architecture']}, "
        f"{model['num_parameters']:,} parameters, {model['max_seq_len']:,} positions, "
        f"{model['precision']} on {summary['device']}; {sizes}"
    )
    return "\n".join([first, *(f"{run.name}: {run.summary}" for run in runs)])


def _run(runs: Sequence[TaskRun], quiet: bool) -> dict[str, Any]:
    """Runs the tasks; returns the reports by name, and the total seconds."""
    start, reports = perf_counter(), {}
    for run in runs:
        with progress_bar(run.name, run.num_requests, " requests", quiet=quiet) as bar:
            reports[run.name] = run.run(bar.update)
    return {"tasks": reports, "seconds": perf_counter() - start}
