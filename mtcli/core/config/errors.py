"""Defines the error that users see: what is wrong with both numbers, a hint, and an exit code."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

_CODES = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def visible(text: str) -> str:
    """Replaces control characters other than tabs and line ends by their codes, so that untrusted
    names and texts move no cursor, ring no bell and hide nothing."""
    return text.translate(_CODES)


class Exit(IntEnum):
    """The exit codes of every command."""

    DONE = 0
    FAILED = 1  # the work failed: a check did not hold, a run died
    WRONG_INPUT = 2  # the user's input is wrong
    INTERRUPTED = 130  # stopped by a signal, after saving


class Problem(NamedTuple):
    """A single fault: `message` has both numbers, `hint` names legal values."""

    message: str
    hint: str = ""
    field: str = ""  # the config field or flag, e.g. "parallel.tp"

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return f"error: {where}{self.message}" + (f"\n\nhint: {self.hint}" if self.hint else "")


class MtcliError(Exception):
    """Wrong input (exit 2) or failed work (exit 1), as a list of all problems.

    `hint` ends the text: a cure for several of them. A hint that problems in a row share is said
    once, after the last of them.
    """

    def __init__(self, *problems: Problem, code: Exit = Exit.WRONG_INPUT, hint: str = "") -> None:
        assert problems, "an error needs at least one problem"
        super().__init__(*problems)  # by which a process unpickles it
        self.problems = problems
        self.hint = hint
        self.code = code

    def __str__(self) -> str:
        hints_after = [*(problem.hint for problem in self.problems[1:]), None]
        texts = [
            str(problem._replace(hint="") if problem.hint == after else problem)
            for problem, after in zip(self.problems, hints_after, strict=True)
        ]
        return "\n\n".join([*texts, *([f"hint: {self.hint}"] if self.hint else [])])

    def about(self, field: str) -> "MtcliError":
        """Sets the field of the problems that name none; returns the error."""
        problems = (p if p.field else p._replace(field=field) for p in self.problems)
        return MtcliError(*problems, code=self.code, hint=self.hint)

    def as_json(self) -> dict[str, Any]:
        """Returns the problems as a command's JSON."""
        entries = [{"field": p.field, "message": p.message, "hint": p.hint} for p in self.problems]
        return {"ok": False, "problems": entries}

    def dump(self) -> dict[str, Any]:
        """Serialises the error as JSON, for another rank."""
        problems = [list(problem) for problem in self.problems]
        return {"code": int(self.code), "problems": problems, "hint": self.hint}

    @staticmethod
    def load(fields: dict[str, Any]) -> "MtcliError":
        """Reads an error that `dump` serialised."""
        problems = (Problem(*problem) for problem in fields["problems"])
        return MtcliError(*problems, code=Exit(fields["code"]), hint=fields["hint"])


def wrong(message: str, hint: str = "", field: str = "") -> MtcliError:
    """Builds the error of one fault in the user's input (exit 2)."""
    return MtcliError(Problem(message, hint, field))


def failed(message: str, hint: str = "") -> MtcliError:
    """Builds the error of legal work that did not succeed (exit 1)."""
    return MtcliError(Problem(message, hint), code=Exit.FAILED)


def collect_errors(
    *steps: Callable[[], Any], otherwise: Callable[[], Any] | None = None
) -> list[Any]:
    """Runs every step and returns the results, or raises the problems of all steps, each once.

    `otherwise` is a further step that runs only where another has failed: a check that would come
    later in any case.
    """
    results: list[Any] = []
    errors: list[MtcliError] = []

    def take(step: Callable[[], Any]) -> None:
        try:
            results.append(step())
        except MtcliError as error:
            errors.append(error)

    for step in steps:
        take(step)
    if not errors:
        return results
    if otherwise:
        take(otherwise)
    problems = dict.fromkeys(problem for error in errors for problem in error.problems)
    hints = dict.fromkeys(error.hint for error in errors if error.hint)
    code = max(error.code for error in errors)
    raise MtcliError(*problems, code=code, hint="\n\nhint: ".join(hints))
