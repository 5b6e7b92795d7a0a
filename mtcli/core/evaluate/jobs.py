"""A task bound to a model: what it will compute, in numbers, and the function that computes it."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

from mtcli.core.evaluate.encode import Encoder
from mtcli.core.evaluate.prepared import Options, Progress, Report
from mtcli.core.evaluate.scoring import plan, run
from mtcli.core.evaluate.tasks import HARNESS_PREFIX, TASKS, TaskSpec
from mtcli.core.scorer import Scorer
from mtcli.core.spec.errors import every, wrong


class Job(NamedTuple):
    """One task ready to run."""

    name: str
    summary: str  # what it will do, in numbers
    num_requests: int | None  # None: lm-eval decides while it runs
    run: Callable[[Progress], Report]


def make_jobs(
    specs: Sequence[TaskSpec],
    scorer: Scorer,
    encoder: Encoder,
    options: Options,
    batch_tokens: int,
) -> list[Job]:
    """One job per task, files read and requests packed.

    Raises MtcliError for all bad files, and for a task of lm-eval's where it is not installed.
    """
    given = scorer, encoder, options, batch_tokens
    return every(
        *(partial(_theirs if spec.path is None else _ours, spec, *given) for spec in specs)
    )


def _ours(
    spec: TaskSpec, scorer: Scorer, encoder: Encoder, options: Options, batch_tokens: int
) -> Job:
    assert spec.path is not None, spec
    prepared = TASKS[spec.name].prepare(spec.path, encoder, options)
    planned = plan(scorer, prepared.requests, batch_tokens)
    summary = (
        f"{prepared.num_items:,} items, {len(planned.requests):,} requests, "
        f"{planned.num_tokens:,} tokens in {len(planned.groups):,} forward passes "
        f"({planned.num_unshared_tokens:,} without sharing)"
    )

    def score(progress: Progress) -> Report:
        return prepared.report(run(scorer, planned, progress))

    return Job(spec.name, summary, len(planned.requests), score)


def _theirs(
    spec: TaskSpec, scorer: Scorer, encoder: Encoder, options: Options, batch_tokens: int
) -> Job:
    if find_spec("lm_eval") is None:
        raise wrong(
            f"{spec.name} needs lm-evaluation-harness, which is not installed",
            "pip install 'mtcli[eval]'",
            "--task",
        )

    def score(progress: Progress) -> Report:
        from mtcli.core.evaluate.harness import HarnessModel, evaluate_harness  # optional extra

        model = HarnessModel(scorer, encoder, batch_tokens, progress)
        return evaluate_harness(spec.name.removeprefix(HARNESS_PREFIX), model, options.limit)

    return Job(spec.name, "items and requests as lm-eval makes them", None, score)
