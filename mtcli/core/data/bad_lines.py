"""Says what is wrong with lines of data, all at once, or counts them where they are left out."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtcli.core.config.errors import MtcliError, Problem

NAMED = 10  # bad lines in an error or a report; the others are counted
SKIP = "; --skip-bad leaves such lines out and counts them"


class BadLine(Exception):
    """Says what is wrong with a line; `kind` is a few words that lines are counted by."""

    def __init__(self, kind: str, reason: str, hint: str = "mend it") -> None:
        super().__init__(reason)
        self.kind, self.reason, self.hint = kind, reason, hint


def refusal(faults: Sequence[tuple[str, BadLine]], source: Path, field: str = "") -> MtcliError:
    """The error of bad lines, each with where it is: FILE:LINE."""
    more = "" if field.startswith("--") else SKIP
    problems = [
        Problem(f"{where}: {fault.reason}", fault.hint + more, field)
        for where, fault in faults[:NAMED]
    ]
    if len(faults) > NAMED:
        problems.append(Problem(f"{source}: {len(faults) - NAMED} more lines are bad", "", field))
    return MtcliError(*problems)


def shown_skipped(kinds: Mapping[str, Sequence[str]]) -> str:
    """What was left out: how many of each kind, and where the first ones are."""
    return "; ".join(
        f"{len(places)} {kind}, {', '.join(places[:NAMED])}{', ...' * (len(places) > NAMED)}"
        for kind, places in kinds.items()
    )
