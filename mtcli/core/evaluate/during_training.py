"""Evaluates the tasks of a config's [[eval]] tables on the weights of a run that trains.

The results are those that `mtcli eval` has of the checkpoint of the step, in the run's precision.
Requests are made anew each time, so that between evaluations they take no memory.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mtcli.core.config.errors import MtcliError, collect_errors, wrong
from mtcli.core.config.schema import EvalConfig
from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.evaluate.bert_tasks import encoder_runs
from mtcli.core.evaluate.eval_tokenizer import eval_tokenizer
from mtcli.core.evaluate.journal import Journal
from mtcli.core.evaluate.packing import BATCH_TOKENS
from mtcli.core.evaluate.tasks.registry import (
    Evaluation,
    parse_tasks,
    require_training_tasks,
    task_runs,
)
from mtcli.core.evaluate.tasks.task import TaskOptions, TaskRun
from mtcli.core.inference.live_model import LiveModel, Trained


class TrainingTasks:
    """The tasks of a run's [[eval]] tables."""

    def __init__(self, trained: Trained, tokenizer: Path | None) -> None:
        """Builds the model; `tokenizer` is the folder that the run's checkpoints get. Collective.

        Raises MtcliError where there is none.
        """
        if tokenizer is None:
            message = "tasks are texts, and the run's data and initial weights name no tokenizer"
            hint = "data.tokenizer = a folder or a name, or data of `mtcli preprocess`"
            raise wrong(message, hint, "eval")
        self.config, self.tokenizer = trained.config, load_tokenizer(tokenizer)
        self.model = LiveModel(trained)

    def require(self) -> None:
        """Reads every task once. Raises MtcliError with all that is wrong with them."""
        require_training_tasks(self.config.eval)

        def read(number: int, table: EvalConfig) -> None:
            try:
                self._bound(table)
            except MtcliError as error:
                field = f"eval.{number}.task"
                raise MtcliError(*(p._replace(field=field) for p in error.problems)) from None

        collect_errors(*(partial(read, *pair) for pair in enumerate(self.config.eval)))

    def __call__(self, step: int) -> dict[str, float]:
        """Returns the figures of the tasks that are due after a step, by their keys in its record:
        eval/TASK/METRIC. Collective."""
        due = [table for table in self.config.eval if step % table.every == 0]
        figures: dict[str, float] = {}
        if not due:
            return figures
        with self.model.weights():
            for run in map(self._bound, due):
                figures |= dict(_figures(f"eval/{run.name}", run.run(lambda done: None)))
        return figures

    def _bound(self, table: EvalConfig) -> TaskRun:
        """Reads a task's file and packs its requests."""
        scorer, journal, limit = self.model.model, Journal(None, ""), table.limit or None
        tokens = BATCH_TOKENS[scorer.groups.device.type]
        specs = parse_tasks([table.task])
        if scorer.config.model.head != "lm":
            (run,) = encoder_runs(specs, [scorer], self.tokenizer, limit, tokens, journal)
            return run
        options = TaskOptions(scorer.max_seq_len, limit)
        ends = self.model.stated_ends()
        if ends is None:
            ends = frozenset(id for id in [self.tokenizer.eod_id] if id is not None)
        text = eval_tokenizer(self.tokenizer)
        evaluation = Evaluation(scorer, text, options, tokens, journal, ends=ends)
        (run,) = task_runs(specs, evaluation)
        return run


def _figures(name: str, report: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for metric, value in report.items():
        if isinstance(value, dict):
            yield from _figures(f"{name}/{metric}", value)
        elif isinstance(value, float):
            yield f"{name}/{metric}", value
