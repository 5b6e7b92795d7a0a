"""Asks Optuna for a few trials before each array, and tells it their losses after the array.

The study is a journal file in the sweep's folder, which Optuna's dashboard opens.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.config.synonyms import closest
from mtcli.core.config.untrusted import open_to_lock
from mtcli.core.runtime.json_text import json_text
from mtcli.core.sweep.trials import Varied

if TYPE_CHECKING:
    import optuna

NAME = "optuna.log"
STUDY = "sweep"
SPACE = "varied"  # the study's attribute that holds what it chooses from
SAMPLERS = {"tpe": "TPESampler", "random": "RandomSampler", "gp": "GPSampler", "qmc": "QMCSampler"}


class SamplingPlan(NamedTuple):
    """A sampler, what it chooses from, and how many trials it proposes."""

    sampler: str
    varied: Sequence[Varied]
    trials: int
    seed: int


def read_sampler(text: str | None) -> str | None:
    """Reads --sampler optuna or optuna:NAME. Raises MtcliError for other names, or without Optuna
    installed."""
    if text is None:
        return None
    tool, _, name = text.partition(":")
    hint = f"optuna, or optuna:{', optuna:'.join(SAMPLERS)}{closest(name, SAMPLERS)}"
    if tool != "optuna" or (name or "tpe") not in SAMPLERS:
        raise wrong(f"there is no sampler {text!r}", hint, "--sampler")
    from importlib.util import find_spec

    if find_spec("optuna") is None:
        hint = "pip install 'mtcli[sweep]'"
        raise wrong("--sampler optuna needs optuna, which is not installed", hint, "--sampler")
    return name or "tpe"


class Proposals:
    """Optuna's study of a sweep, on the rank that asks it."""

    def __init__(self, sampling: SamplingPlan, output: Path) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self.sampling = sampling
        self.sampler = getattr(optuna.samplers, SAMPLERS[sampling.sampler])
        log = output / NAME
        varied = sorted(sampling.varied, key=lambda one: one.field)
        space_text = json_text({one.field: list(one.range or one.values) for one in varied})
        try:
            _drop_cut_line(log)
            storage = JournalStorage(JournalFileBackend(str(log)))
            self.study = optuna.create_study(
                storage=storage, study_name=STUDY, direction="minimize", load_if_exists=True
            )
            space = self.study.user_attrs.get(SPACE, space_text)
            if space == space_text:
                self._require_ours()
        except Exception as error:  # Optuna checks no line of a log: any error of its reader
            why = str(error) or type(error).__name__
            hint = "remove it, and a new study begins; or name another folder"
            raise wrong(f"{log} is no study of Optuna's: {why}", hint, "--output") from None
        if space != space_text:
            message = f"{log} is the study of other fields or values"
            raise wrong(message, "vary what it was begun with; or name another folder", "--vary")
        self.study.set_user_attr(SPACE, space_text)

    def _require_ours(self) -> None:
        """Raises an error where a trial chose from other values, or of no value of a field."""
        space = self._distributions()
        for trial in self.study.trials:
            if not trial.distributions.items() <= space.items():
                raise ValueError(f"trial {trial.number} chose from other values")
        for trial in self._trials():
            self._values(trial.params)

    def done(self) -> list[dict[str, Any]]:
        """The values of the trials whose losses an earlier start told the study."""
        return [self._values(t.params) for t in self._trials() if t.state.is_finished()]

    def ask(self, most: int) -> list[tuple[int, dict[str, Any]]]:
        """Proposes up to `most` trials, as (number, values).

        Trials that an earlier start asked for, and whose loss it never told, come first; none are
        left once `sampling.trials` have been proposed.
        """
        waiting = [t for t in self._trials() if t.state.name == "RUNNING"]
        proposed = [(trial.number, self._values(trial.params)) for trial in waiting[:most]]
        left = self.sampling.trials - len(self._trials())
        # By how far the study is: one that goes on draws what it would have drawn, and not its
        # first numbers again.
        self.study.sampler = self.sampler(seed=self.sampling.seed + len(self.study.trials))
        for _ in range(min(left, most - len(proposed))):
            trial = self.study.ask(self._distributions())
            proposed.append((trial.number, self._values(trial.params)))
        return proposed

    def _trials(self) -> list["optuna.trial.FrozenTrial"]:
        """The study's trials, without one whose proposal was cut off by the end of its process."""
        return [t for t in self.study.trials if len(t.params) == len(self.sampling.varied)]

    def tell(self, number: int, score: float | None) -> None:
        """Tells the loss of a trial, or that it has none: it diverged."""
        from optuna.trial import TrialState

        if score is None:
            self.study.tell(number, state=TrialState.FAIL)
        else:
            self.study.tell(number, score)

    def _distributions(self) -> dict[str, "optuna.distributions.BaseDistribution"]:
        from optuna.distributions import (
            CategoricalDistribution,
            FloatDistribution,
            IntDistribution,
        )

        space: dict[str, Any] = {}
        for option in self.sampling.varied:
            if option.range is None:
                space[option.field] = CategoricalDistribution(list(range(len(option.values))))
            elif option.range.whole:
                space[option.field] = IntDistribution(int(option.range.low), int(option.range.high))
            else:
                low, high = option.range.low, option.range.high
                space[option.field] = FloatDistribution(low, high, log=option.range.logarithmic)
        return space

    def _values(self, params: dict[str, Any]) -> dict[str, Any]:
        """Reads a trial's parameters as values: indices of a list's, or rounded numbers."""
        return {
            option.field: option.values[params[option.field]]
            if option.range is None
            else option.range.rounded(params[option.field])
            for option in self.sampling.varied
        }


def _drop_cut_line(log: Path) -> None:
    """Cuts off the last line of a study's log where a process that was killed wrote half of it."""
    if not log.exists():
        return
    with open_to_lock(log) as file:
        lines = file.read()
        end = lines.rfind(b"\n") + 1
        if 0 < end < len(lines):
            file.truncate(end)
