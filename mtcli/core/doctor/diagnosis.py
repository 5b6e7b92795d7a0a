"""Defines what a check of `doctor` found, and turns a check that raises into a diagnosis too."""

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from mtcli.core.config.errors import MtcliError


class Diagnosis(NamedTuple):
    """The result of a check: a state, words, numbers, and the command or hint that mends it."""

    state: Literal["ok", "warn", "broken"]
    found: str
    numbers: dict[str, Any]
    fix: str = ""


def ok(found: str, **numbers: Any) -> Diagnosis:
    """Builds the diagnosis of what needs no mending."""
    return Diagnosis("ok", found, numbers)


def warn(found: str, fix: str, **numbers: Any) -> Diagnosis:
    """Builds the diagnosis of what slows some runs down, or stops some."""
    return Diagnosis("warn", found, numbers, fix)


def broken(found: str, fix: str, **numbers: Any) -> Diagnosis:
    """Builds the diagnosis of what stops every run of its kind."""
    return Diagnosis("broken", found, numbers, fix)


def least(
    value: float, low: float, stops: float, found: str, fix: str, **numbers: Any
) -> Diagnosis:
    """Warns below `low`, and is broken below `stops`."""
    if value < low:
        return (broken if value < stops else warn)(found, fix, **numbers)
    return ok(found, **numbers)


Check = Callable[[], Diagnosis]


def examine(checks: Mapping[str, Check]) -> dict[str, Diagnosis]:
    """Runs every check; returns the diagnoses by the checks' names."""
    return {name: _examined(name, check) for name, check in checks.items()}


def _examined(name: str, check: Check) -> Diagnosis:
    try:
        return check()
    except MtcliError as error:
        problem = error.problems[0]
        return broken(problem.message, problem.hint)
    # Whatever is wrong with a machine, the other checks are still worth reading.
    except Exception as error:
        if os.environ.get("MTCLI_TRACEBACK") == "1":
            raise
        found = f"the check itself failed: {type(error).__name__}: {error}".splitlines()[0]
        return broken(found, f"MTCLI_TRACEBACK=1 mtcli doctor --only {name}")
