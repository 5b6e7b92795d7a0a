"""Reads a finished run from its folder (config, metrics, events, run.json), and its figures.

Curves have each step once, in order, thinned for drawing.
"""

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.config.loading import load_config
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import is_number, parse_json, read_untrusted, shown
from mtcli.core.mesh.parameters import count_parameters
from mtcli.core.plan.tables import rank_map
from mtcli.core.plan.workload import Workload
from mtcli.core.profile.curves import TASKS, Row, curves_of, quantiles
from mtcli.core.schedule.timeline import Timeline, simulate
from mtcli.core.training.run_folder import EVENTS, FACTS, METRICS

FIGURES = {"loss", "grad_norm", "step_seconds", "tokens_per_second", "mfu"}  # of every step
OF_RANKS = {
    f"{kind}_{what}"
    for kind in ("computing", "waiting")
    for what in ("seconds_max", "seconds_median", "rank_max")
}
MORE_FIGURES = {"lr", "valid_loss", "expert_load_max_over_mean", *OF_RANKS}
OF_SAVES = {"stall_seconds", "write_seconds", "bytes"}
MAX_WORLD = 1 << 20
SHOWN_RANKS = 4
MAX_FACTS_BYTES = 16 << 20


class FinishedRun(NamedTuple):
    """A finished run's records; `world` is None where the run did not say."""

    folder: Path
    config: RunConfig
    rows: list[dict[str, Any]]  # metrics.jsonl, each step once; NaN where it says null
    world: int | None
    events: list[dict[str, Any]] = []  # events.jsonl, in order
    resumed: list[int] = []  # the steps at which it took up again


def is_run(source: str) -> bool:
    """Whether a CONFIG argument is the folder of a run that has trained."""
    return (Path(source) / METRICS).exists()


def read_run(source: str) -> FinishedRun:
    """Reads the run of a folder. Raises MtcliError where it holds no steps or a damaged line.

    The last line of a killed run may be cut short; it is left out.
    """
    folder = Path(source)
    lines = _lines(folder / METRICS)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_row(line))
        except ValueError:
            if number == len(lines):
                break
            where = f"{folder / METRICS}:{number}"
            raise wrong(f"{where} is no record of a step", "remove that line") from None
    if not rows:
        hint = f"profile {folder / 'config.toml'} to measure its config"
        raise wrong(f"{folder / METRICS} holds no steps", hint)
    events = _events(folder)
    rows, again = once(rows)
    again += [event["step"] for event in events if event.get("event") == "resumed"]
    resumed = sorted(set(again))
    config = load_config(source)
    return FinishedRun(folder, config, rows, _world(folder, config), events, resumed)


def once(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
    """(each step's last row, in order; the steps at which the run resumed).

    A run that resumes from a checkpoint runs the steps since then a second time.
    """
    steps = [row["step"] for row in rows]
    again = [b for a, b in zip(steps, steps[1:], strict=False) if b <= a]
    last = {row["step"]: row for row in rows}
    return [last[step] for step in sorted(last)], again


def _events(folder: Path) -> list[dict[str, Any]]:
    """Reads events.jsonl, if there is one, without a last line that was truncated."""
    path, events = folder / EVENTS, []
    for line in _lines(path) if path.exists() else []:
        with suppress(ValueError):
            events.append(parse_json(line))
    return [event for event in events if _is_event(event)]


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or type(event.get("step")) is not int:
        return False
    numbers = {"stall_seconds", *(event.keys() & OF_SAVES)}
    return event.get("event") != "saved" or all(is_number(event.get(name)) for name in numbers)


def _lines(path: Path) -> list[bytes]:
    try:
        return read_untrusted(path).splitlines()
    except OSError as error:
        raise wrong(f"{path} cannot be read: {error.strerror}", "is it a run's?") from None


def _row(line: bytes) -> dict[str, Any]:
    """Reads a step's record. Raises ValueError where it lacks a figure, or one is no number."""
    row = parse_json(line)
    if not isinstance(row, dict) or type(row.get("step")) is not int or row["step"] >= 2**63:
        raise ValueError("no step")
    row = {key: math.nan if value is None else value for key, value in row.items()}
    named = {name for name in row if name.startswith(("valid_", TASKS))}
    for name in FIGURES | (row.keys() & MORE_FIGURES) | named:
        if not is_number(row.get(name)):
            raise ValueError(f"no {name}")
        row[name] = float(row[name])
    if not math.isfinite(row["step_seconds"]):
        raise ValueError("no seconds")
    return row


def _world(folder: Path, config: RunConfig) -> int | None:
    path = folder / FACTS
    if not path.exists():
        return None
    try:
        facts = parse_json(read_untrusted(path, MAX_FACTS_BYTES))
    except (OSError, ValueError) as error:
        raise wrong(f"{path} is not JSON: {error}", "remove it: it is not needed") from None
    world = facts.get("world") if isinstance(facts, dict) else None
    if type(world) is not int or not 0 < world <= MAX_WORLD:
        raise wrong(f"{path}: world={shown(world)} is no number of ranks", "remove it")
    if world % (fewest := config.parallel.smallest_world):
        raise wrong(f"{path}: world={world} is no multiple of the layout's {fewest}", "remove it")
    return world


def summary_of(run: FinishedRun) -> dict[str, Any]:
    """The figures of a finished run, named as those of a profile: medians over its steps.

    `loss` is of the steps whose loss is finite, and is left out where none is.
    """
    seconds = [row["step_seconds"] for row in run.rows]
    losses = [row["loss"] for row in run.rows if math.isfinite(row["loss"])]
    ends = {"first": losses[0], "last": losses[-1], "min": min(losses)} if losses else None
    figures = {
        "run": str(run.folder),
        "steps": len(run.rows),
        "step_seconds": {"min": min(seconds), "median": median(seconds), "max": max(seconds)},
        "tokens_per_second": median(row["tokens_per_second"] for row in run.rows),
        "mfu": median(row["mfu"] for row in run.rows),
        "step_quantiles": quantiles(seconds),
        "tokens": sum(row.get("tokens", run.config.batch.tokens_per_step) for row in run.rows),
        "parameters": count_parameters(run.config.model),
        "world": run.world,
        "resumed_at": run.resumed,
        "saves": [event for event in run.events if event.get("event") == "saved"],
        "saves_failed": [event for event in run.events if event.get("event") == "save_failed"],
        "curves": curves_of(run.rows),
        "rank_map": rank_map(Workload.of(run.config, run.world)) if run.world else [],
    }
    ranks = ranks_of(run.rows)
    return figures | ({"loss": ends} if ends else {}) | ({"rank_times": ranks} if ranks else {})


def ranks_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Summarises how long ranks computed and waited; {} where no row has these keys.

    For each kind: medians over steps of the largest and of the median rank's seconds, and the ranks
    that were the largest most often.
    """
    timed_rows = [row for row in rows if row.keys() >= OF_RANKS]
    if not timed_rows:
        return {}

    def of(kind: str) -> dict[str, Any]:
        counts = Counter(int(row[f"{kind}_rank_max"]) for row in timed_rows)
        return {
            "max": median(row[f"{kind}_seconds_max"] for row in timed_rows),
            "median": median(row[f"{kind}_seconds_median"] for row in timed_rows),
            "ranks": [{"rank": rank, "steps": n} for rank, n in counts.most_common(SHOWN_RANKS)],
        }

    return {
        "steps": len(timed_rows),
        "computing_seconds": of("computing"),
        "waiting_seconds": of("waiting"),
    }


def planned_of(run: FinishedRun, step_seconds: float) -> Timeline:
    """Simulates the run's schedule, with backward = 2 * forward, scaled to a step's seconds."""
    assert run.world, "a schedule needs the number of ranks"
    work = Workload.of(run.config, run.world)
    schedule = work.schedule(work.num_micro_batches)
    timeline = simulate(schedule, {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})
    return timeline.scaled(step_seconds / timeline.end)
