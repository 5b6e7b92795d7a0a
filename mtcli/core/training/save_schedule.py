"""Decides when a run saves: after some steps, after some time, and at its end.

A save by time has to be the same step on every rank: rank 0's clock decides, and the exchange that
ends a step tells the others.
"""

from time import monotonic

from mtcli.core.config.schema import SAVING_SHARE, TrainConfig


class SaveSchedule:
    """The saves of a run that begins now."""

    def __init__(self, train: TrainConfig, reselect_every: int = 0) -> None:
        """Every `reselect_every` steps a run selects its core-set again, by a checkpoint."""
        self.train, self.last = train, monotonic()
        self.periods = [period for period in (train.save_every, reselect_every) if period]

    def due_by_step(self, step: int) -> bool:
        """Whether a run saves after a step, at whatever time."""
        return step == self.train.steps or any(step % period == 0 for period in self.periods)

    def due_by_time(self, cost_seconds: float) -> bool:
        """Whether the last save was train.save_minutes ago, by this rank's clock; longer where
        training stood still `cost_seconds` for it."""
        wait = self.train.seconds_between_saves(cost_seconds)
        return self.train.save_minutes > 0.0 and monotonic() - self.last >= wait

    def saved(self) -> None:
        """Restarts the clock of saves by time."""
        self.last = monotonic()

    def __str__(self) -> str:
        train = self.train
        times = [f"every {train.save_every:,} steps"] if train.save_every else []
        if train.save_minutes:
            rarer = f"rarer where that would take over {SAVING_SHARE:.0%} of the time"
            times.append(f"{train.save_minutes:g} min after the last save ({rarer})")
        checkpoints = f"the newest {train.keep:,}" if train.keep else "all"
        if train.keep_best:
            times.append(f"after an evaluation that is among the best {train.keep_best:,}")
            checkpoints += f" and the best {train.keep_best:,}" if train.keep else ""
        return f"{', '.join([*times, 'at the end'])}; keeps {checkpoints}"
