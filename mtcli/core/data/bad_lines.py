"""Reports the bad lines of a data file: all at once, or as counts where they are skipped."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, TypeVar

from mtcli.core.config.errors import MtcliError, Problem, wrong
from mtcli.core.config.untrusted import open_untrusted, parse_json
from mtcli.core.runtime.sandbox import OverLimit

Read = TypeVar("Read")

MAX_LINE_BYTES = 16 << 20
AHEAD_BYTES = 64 << 10  # of lines that are begun and not finished, besides the last one
NAMED = 10  # bad lines in an error or a report; the others are counted
SKIP = "; --skip-bad leaves such lines out and counts them"


class BadLine(Exception):
    """A fault of a line. `kind` is a short phrase by which faults are counted; `setting` is a
    further cure, for a file that a config names."""

    def __init__(self, kind: str, reason: str, hint: str = "mend it", setting: str = "") -> None:
        super().__init__(reason)
        self.kind, self.reason, self.hint, self.setting = kind, reason, hint, setting

    def hint_of(self, field: str, others_are_good: bool) -> str:
        """Returns the hint for the flag or config field that names the file.

        `--skip-bad` is offered only where other lines are good.
        """
        if field.startswith("--"):
            return self.hint
        return f"{self.hint}{', or ' * bool(self.setting)}{self.setting}{SKIP * others_are_good}"


def read_lines(
    path: Path, begin: Callable[[bytes], Callable[[], Read]], field: str
) -> tuple[list[tuple[int, Read]], list[tuple[int, BadLine]]]:
    """Reads a JSONL file into (number, record) of each good line and (number, fault) of each bad
    one. Numbers start at 1; blank lines are skipped.

    `begin` is called some lines ahead, so that another process may work on them; it returns a
    function that returns the record. Both may raise BadLine.

    Raises MtcliError where the file, which `field` names, cannot be read, and OverLimit.
    """
    records: list[tuple[int, Read]] = []
    faults: list[tuple[int, BadLine]] = []
    begun: deque[tuple[int, int, Callable[[], Read]]] = deque()
    ahead = 0  # bytes of the lines that are begun

    def finish(most: int) -> None:
        nonlocal ahead
        while ahead > most:
            number, size, end = begun.popleft()
            ahead -= size
            try:
                records.append((number, end()))
            except BadLine as fault:
                faults.append((number, fault))
            except OverLimit as limit:
                raise OverLimit(f"{path}:{number}: {limit}") from None

    try:
        with open_untrusted(path) as file:
            for number, line in enumerate(_lines(file), start=1):
                if line.isspace():
                    continue
                try:
                    begun.append((number, len(line), begin(line)))
                    ahead += len(line)
                except BadLine as fault:
                    faults.append((number, fault))
                finish(AHEAD_BYTES)
            finish(0)
    except OSError as error:
        raise wrong(
            f"{path} cannot be read: {error.strerror}", "name a JSONL file", field
        ) from None
    return records, sorted(faults, key=itemgetter(0))


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines of a file; only the first MAX_LINE_BYTES + 1 bytes of a longer one."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        chunk = line
        while len(chunk) > MAX_LINE_BYTES and not chunk.endswith(b"\n"):
            chunk = file.readline(MAX_LINE_BYTES + 1)
        yield line


def json_object(line: bytes, hint: str = "mend it") -> dict[str, Any]:
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
