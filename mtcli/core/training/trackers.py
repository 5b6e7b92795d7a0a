"""Logs runs to experiment trackers through accelerate; a tracker that fails never stops a run.

A resumed run has the same id at each tracker, from the run folder; one from step 0 gets a new id.
"""

import json
import os
import re
import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import load_json
from mtcli.core.runtime.atomic_writes import write_text
from mtcli.core.training.run_folder import TENSORBOARD

IDS = "trackers.json"  # of a run folder: each tracker's id of the run
PROJECT = "mtcli"


def open_trackers(config: RunConfig, step: int) -> list["Tracker"]:
    """Opens train.trackers, of a run that has made `step` steps; skips one that does not start."""
    trackers, path = [], Path(config.train.output) / IDS
    saved_ids = _known(path) if step else {}
    ids = dict(saved_ids)
    for name in config.train.trackers:
        try:
            tracker, ids[name] = _open(name, config, step, saved_ids.get(name))
            trackers.append(Tracker(name, tracker))
        except Exception as error:  # noqa: BLE001 - whatever a tracker does, the run goes on
            _warn(name, error)
    if ids:
        with suppress(OSError):  # a full disk, which the records will tell of
            write_text(path, json.dumps(ids) + "\n")
    return trackers


class Tracker:
    """A tracker that warns at its first failure, and is off from then on."""

    def __init__(self, name: str, tracker: Any) -> None:
        self.name, self.tracker = name, tracker

    def log(self, values: dict[str, Any], step: int) -> None:
        """Logs a step's values by name."""
        self._call("log", values, step=step)

    def finish(self) -> None:
        """Ends the run at the tracker."""
        self._call("finish")

    def _call(self, method: str, *arguments: Any, **named: Any) -> None:
        if self.tracker is None:
            return
        try:
            getattr(self.tracker, method)(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - see open_trackers
            _warn(self.name, error)
            self.tracker = None


def _open(name: str, config: RunConfig, step: int, run_id: str | None) -> tuple[Any, str]:
    """(a tracker that has started, its id of the run); a resumed run passes its `run_id`."""
    from accelerate import PartialState
    from accelerate.tracking import (
        MLflowTracker,
        TensorBoardTracker,
        TrackioTracker,
        WandBTracker,
    )

    PartialState()  # without which accelerate's trackers but TensorBoard's fail in their first line
    train = config.train
    project = train.tracker_project or os.environ.get("WANDB_PROJECT") or PROJECT
    folder = Path(train.output).name
    title = train.tracker_name or os.environ.get("WANDB_NAME") or folder
    fields, tags = config.model_dump(mode="json", exclude_none=True), train.tracker_tags
    if name == "tensorboard":  # which drops what an ended attempt has told of later steps
        tracker = TensorBoardTracker(TENSORBOARD, train.output, purge_step=step + 1)
        tracker.start()
        return tracker, TENSORBOARD
    if name == "mlflow":
        tracker = MLflowTracker(
            project, run_id=run_id, run_name=title, tags=dict.fromkeys(tags, "true") or None
        )
        tracker.start()
        if run_id is None:  # it takes no second value of a parameter
            tracker.store_init_configuration(_flat(fields))
        return tracker, tracker.tracker.info.run_id
    if name == "trackio":  # which knows a run by its name
        run = run_id or train.tracker_name or f"{folder}-{secrets.token_hex(4)}"
        tracker = TrackioTracker(project, name=run, resume="allow", config=fields)
    else:
        run = os.environ.get("WANDB_RUN_ID") or run_id or secrets.token_hex(4)
        names = {"name": title, "entity": train.tracker_entity, "tags": list(tags) or None}
        same = {"id": run, "resume": "allow", "dir": train.output}
        tracker = WandBTracker(project, config=fields, **names, **same)
    tracker.start()
    return tracker, run


def _known(path: Path) -> dict[str, str]:
    """Reads the run's ids by tracker; leaves out ids that are no plain word."""
    with suppress(MtcliError):
        ids = load_json(path, "", "", 1 << 16)
        if isinstance(ids, dict):
            return {k: v for k, v in ids.items() if _is_plain(v)}
    return {}


def _is_plain(word: Any) -> bool:
    return isinstance(word, str) and re.fullmatch(r"[\w.-]{1,128}", word) is not None


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A config's fields as section.name."""
    fields: dict[str, Any] = {}
    for name, value in table.items():
        nested = isinstance(value, dict)
        fields |= _flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return fields


def _warn(name: str, error: Exception) -> None:
    print(f"warning: {name} is off: {error}", file=sys.stderr)  # noqa: T201 - not data
