"""Shows progress on stderr: a bar on a terminal, and lines elsewhere.

A line has names and values: `preprocess 512/2048 percent 25.0 B/s 100 left 0:00:15`.
"""

import sys
from collections.abc import Callable
from time import monotonic
from typing import Any

from tqdm import tqdm

from mtcli.core.config.counts import duration
from mtcli.core.config.errors import visible

LINE_SECONDS = 5.0  # between two lines of progress, at least


def progress_bar(
    name: str,
    total: float | None,
    unit: str = "it",
    done: int = 0,
    leave: bool = True,
    quiet: bool = False,
) -> "tqdm[Any] | ProgressLines":
    """Opens the progress of `total` units (None: unknown), of which `done` are done.

    A bar that is removed at the end (not `leave`) appears after half a second.
    """
    if not (quiet or sys.stderr.isatty()):
        return ProgressLines(name, total, unit.strip(), done)
    return tqdm(
        total=total, desc=name, unit=unit, initial=done, unit_scale=unit == "B", file=sys.stderr,
        leave=leave, delay=0.0 if leave else 0.5, disable=quiet,
    )  # fmt: skip


def write_line(text: str) -> None:
    """Writes a line to stderr, above an open bar."""
    tqdm.write(visible(text), file=sys.stderr)


class ProgressLines:
    """Progress as plain lines, with the methods of tqdm's bars that mtcli uses.

    A line is written at an update, at least `LINE_SECONDS` after the last one or the start, and at
    the end of work that took longer.
    """

    def __init__(
        self,
        name: str,
        total: float | None,
        unit: str,
        done: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.name, self.total, self.unit, self.clock = name, total, unit, clock
        self.first = self.done = self.written = done
        self.begun_at = self.line_at = clock()
        self.postfix = ""

    def __enter__(self) -> "ProgressLines":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, count: float = 1) -> None:
        """Counts units that are done."""
        self.done += count
        if self.clock() - self.line_at >= LINE_SECONDS:
            self._write()

    def set_postfix_str(self, text: str, refresh: bool = False) -> None:
        """Sets the text at the end of each line."""
        self.postfix = text

    def close(self) -> None:
        """Writes the last line, if the work was long and has advanced since the last one."""
        if self.clock() - self.begun_at >= LINE_SECONDS and self.done != self.written:
            self._write()

    def _write(self) -> None:
        self.line_at, self.written = self.clock(), self.done
        rate = (self.done - self.first) / (self.line_at - self.begun_at)
        words = [self.name, f"{self.done:.0f}"]
        if self.total:
            words[1] += f"/{self.total:.0f}"
            words.append(f"percent {100 * self.done / self.total:.1f}")
        words.append(f"{self.unit}/s {rate:.4g}")
        if self.total and rate:
            words.append(f"left {duration((self.total - self.done) / rate)}")
        write_line(" ".join([*words, self.postfix]).rstrip())
