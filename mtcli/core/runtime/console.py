"""Prints tables on stdout that stay readable in narrow terminals and in files.

Numbers are never truncated or broken. Longer words wrap; where even that is too wide, each row
becomes a block of lines, one per cell.
"""

import os
import re
import sys
import textwrap
from collections.abc import Sequence
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mtcli.core.config.errors import visible

PROSE = 24  # letters beyond which a cell may go on in the next line
WORD = 40  # letters of a word, such as a path, beyond which it is broken
UNITS = "[KMGT]?i?B|ms|us|s"
HARD_SPACE = "\ue000"  # of no word: rich wraps at every blank of Unicode
UNBOUNDED = 100_000  # columns of a pipe, whose reader wraps as it likes

Rows = Sequence[Sequence[str]]


def width(most: int = UNBOUNDED) -> int:
    """The width of output in columns: COLUMNS if set, else the terminal's; unbounded (at most
    `most`) for a pipe or file."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and 0 < int(columns) < UNBOUNDED:
        return min(most, int(columns))
    console = Console(file=sys.stdout)
    return min(most, console.width) if console.is_terminal else most


def print_table(title: str, columns: Sequence[str], rows: Rows, *, right: bool = False) -> None:
    """Prints rows under their headings, without headings that are all empty, or columns without a
    cell.

    With `right`, all cells of a row but the first are right-aligned.
    """
    used = [at for at in range(len(columns)) if not rows or any(row[at] for row in rows)]
    columns, rows = [columns[at] for at in used], [[row[at] for at in used] for row in rows]
    room, table = width(), _table(columns, rows, right)
    if title:
        _print(Text(visible(title), style="italic"), room)
    if _least(table) <= room or len(columns) < 3:
        _print(table, max(room, _least(table)))
        return
    names = [name.replace("\n", " ") for name in columns]
    for number, row in enumerate(rows):
        if number:
            _write("")
        _print(_table(("", ""), list(zip(names, row, strict=True)), right=False), room)


def print_line(text: str, indent: str | None = None) -> None:
    """Prints text as it is; with an `indent`, wraps it and indents the lines after the first."""
    if indent is not None:
        text = textwrap.fill(text, width(), subsequent_indent=indent, break_long_words=False)
    _write(visible(text))


def _table(columns: Sequence[str], rows: Rows, right: bool) -> Table:
    table = Table(show_header=any(columns), box=None, pad_edge=False)
    for index, column in enumerate(columns):
        cells = [_joined(row[index]) for row in rows]
        words = max((len(word) for cell in cells for word in cell.split(" ")), default=0)
        table.add_column(
            column,
            justify="right" if right and index else "left",
            overflow="fold",
            no_wrap=max(map(len, cells), default=0) <= PROSE,
            min_width=min(words, WORD),
        )
    for row in rows:
        table.add_row(*(Text(_joined(cell)) for cell in row))  # [brackets] are no markup
    return table


def _joined(cell: str) -> str:
    """The cell with its numbers and units joined by spaces that do not break."""
    return re.sub(rf"(?<=\d) (?=(?:{UNITS})\b)", HARD_SPACE, visible(cell))


def _least(table: Table) -> int:
    console = Console(file=StringIO(), width=UNBOUNDED)
    return console.measure(table, options=console.options.update(max_width=UNBOUNDED)).minimum


def _print(shown: Table | Text, columns: int) -> None:
    """Prints without trailing blanks."""
    console = Console(file=sys.stdout, width=columns)
    with console.capture() as captured:
        console.print(shown)
    for line in captured.get().splitlines():
        _write(line.rstrip().replace(HARD_SPACE, " "))


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
