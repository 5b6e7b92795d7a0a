"""Tiles of [rows, columns]: sizes where nothing was measured, and grids of programs over them.

ROWS and COLUMNS are a kernel's constants; a kernel whose tile is as wide as a row has ROWS alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mtcli.kernels.launch import cdiv, power_of_two

Grid = Callable[[Mapping[str, Any]], tuple[int, ...]]

WHOLE_ROWS = [{"ROWS": rows, "num_warps": warps} for rows in (1, 4) for warps in (2, 4, 8, 16)]


def whole_rows(width: int, elements: int) -> dict[str, int]:
    """Rows for so many elements at least, and 16 elements per thread, with 4 to 16 warps."""
    block = power_of_two(width)
    rows = max(1, elements // block)
    return {"ROWS": rows, "num_warps": min(16, max(4, rows * block // 512))}


def over_rows(rows: int) -> Grid:
    """A program for each ROWS of so many rows."""
    return lambda meta: (cdiv(rows, meta["ROWS"]),)


def over_columns(rows: int, columns: int) -> Grid:
    """A program for each COLUMNS of each row."""
    return lambda meta: (rows, cdiv(columns, meta["COLUMNS"]))


def over_tiles(rows: int, columns: int) -> Grid:
    """A program for each tile of ROWS by COLUMNS."""
    return lambda meta: (cdiv(rows, meta["ROWS"]), cdiv(columns, meta["COLUMNS"]))
