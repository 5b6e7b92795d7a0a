"""Follows the validation loss of a run: which of its checkpoints are best, and when it ends early.

A function of the losses alone, equal on every rank. A checkpoint has the state as of its step.
"""

import math

from mtcli.core.checkpoint.run_progress import EvaluatedStep, ValidationState, progress_of
from mtcli.core.config.schema import TrainConfig
from mtcli.core.training.state import StartingPoint

# Evaluations remembered besides train.keep_best: where the save of a best one fails, those after it
# are the best that there are.
SPARE = 4


class ValidationLosses:
    """The validation losses of a run that starts somewhere."""

    def __init__(self, train: TrainConfig, start: StartingPoint) -> None:
        self.train = train
        saved = None
        if start.checkpoint and start.is_own:
            saved = progress_of(start.checkpoint).validation
        self.state = saved or ValidationState()

    def note(self, step: int, loss: float) -> bool:
        """Adds an evaluation; says whether its checkpoint is one of the train.keep_best best."""
        best = self.state.best
        is_lower = math.isfinite(loss) and (not best or loss < best[0].loss)
        if math.isfinite(loss):  # of equal ones the earlier is better
            new = EvaluatedStep(step=step, loss=loss)
            ranked = sorted((*best, new), key=lambda evaluated: evaluated.loss)
            best = tuple(ranked[: self.train.keep_best + SPARE])
        since = 0 if is_lower else self.state.since + 1
        self.state = ValidationState(best=best, since=since)
        return step in [evaluated.step for evaluated in best[: self.train.keep_best]]

    @property
    def has_ended(self) -> bool:
        """Whether the last train.patience evaluations brought no lower loss."""
        return 0 < self.train.patience <= self.state.since

    def __str__(self) -> str:
        """Words an early end: "valid_loss was not below 2.1 of step 30 in 3 evaluations"."""
        best = self.state.best
        lowest = f"below {best[0].loss:.4f} of step {best[0].step}" if best else "finite"
        return f"valid_loss was not {lowest} in {self.state.since:,} evaluations"
