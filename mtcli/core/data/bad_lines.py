"""Reports the bad lines of a data file: all at once, or as counts where they are skipped."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.untrusted import parse_json

MAX_LINE_BYTES = 16 << 20
AHEAD_BYTES = 64 << 10  # of lines that are begun and not finished, besides the last one
NAMED = 10  # bad lines in an error or a report; the others are counted
SKIP = "; --skip-bad leaves such lines out and counts them"


class BadLine(Exception):
    """A fault of a line. `kind` is a short phrase by which faults are counted; `setting` is a
    further cure, for a file that a config names."""

    def __init__(
        self, kind: str, reason: str, hint: str = "mend the line", setting: str = ""
    ) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.hint, self.setting = kind, reason, hint, setting

    def hint_of(self, field: str, others_are_good: bool) -> str:
        """Returns the hint for the flag or config field that names the file.

        `--skip-bad` is offered only where other lines are good.
        """
        if field.startswith("--"):
            return self.hint
        return f"{self.hint}{', or ' * bool(self.setting)}{self.setting}{SKIP * others_are_good}"


def json_object(line: bytes, hint: str = "mend the line") -> dict[str, Any]:
    """Parses the JSON object of a line. Raises BadLine where the line holds none."""
    if len(line) > MAX_LINE_BYTES:
        raise BadLine("too long a line", f"it is longer than {MAX_LINE_BYTES} bytes", hint)
    try:
        record = parse_json(line.decode("utf-8-sig"))
    except ValueError as error:
        raise BadLine("no JSON", f"it is not JSON: {error}", hint) from None
    if not isinstance(record, dict):
        raise BadLine("no object", "it is no JSON object", hint)
    return record


def refusal(
    faults: Sequence[tuple[str, BadLine]], source: Path, good: int, field: str = ""
) -> MtcliError:
    """Builds the error of bad lines, each with its FILE:LINE; `good` is how many lines are good."""
    problems = [
        Problem(f"{where}: {fault.reason}", fault.hint_of(field, good > 0), field)
        for where, fault in faults[:NAMED]
    ]
    if len(faults) > NAMED:
        problems.append(Problem(f"{source}: {len(faults) - NAMED} more lines are bad", "", field))
    return MtcliError(*problems)


def shown_skipped(kinds: Mapping[str, Sequence[str]]) -> str:
    """Words the skipped lines: how many of each kind, and where the first ones are."""
    return "; ".join(
        f"{len(places)} {kind}, {', '.join(places[:NAMED])}{', ...' * (len(places) > NAMED)}"
        for kind, places in kinds.items()
    )
