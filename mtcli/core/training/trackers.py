"""Experiment trackers, through accelerate's; one that is missing or offline never stops a run."""

import sys
from typing import Any

from mtcli.core.config.schema import RunConfig


def open_trackers(config: RunConfig) -> list[Any]:
    """The trackers of train.trackers that start, each with log(values, step) and finish()."""
    trackers = []
    for name in config.train.trackers:
        try:
            trackers.append(_Quiet(name, _open(name, config)))
        except Exception as error:  # noqa: BLE001 - whatever a tracker does, the run goes on
            _warn(name, error)
    return trackers


class _Quiet:
    """A tracker whose failures are said once and end it, and never the run."""

    def __init__(self, name: str, tracker: Any) -> None:
        self.name, self.tracker = name, tracker

    def log(self, values: dict[str, Any], step: int) -> None:
        self._call("log", values, step=step)

    def finish(self) -> None:
        self._call("finish")

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, method)(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - see open_trackers
            _warn(self.name, error)
            self.tracker = None


def _open(name: str, config: RunConfig) -> Any:
    from accelerate.tracking import TensorBoardTracker, WandBTracker

    output = config.train.output
    if name == "tensorboard":
        tracker = TensorBoardTracker("events", output)
    else:
        tracker = WandBTracker(output.rstrip("/").rpartition("/")[2], dir=output)
    tracker.start()
    return tracker


def _warn(name: str, error: Exception) -> None:
    print(f"warning: {name} is off: {error}", file=sys.stderr)  # noqa: T201 - not data
