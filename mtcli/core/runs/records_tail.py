"""Reads the last records of a run's files of lines, which grow without bound. Imports no torch."""

import os
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from mtcli.core.config.untrusted import is_number, open_untrusted
from mtcli.core.training.run_folder import records_in

Record = dict[str, Any]
TAIL_BYTES = 1 << 16  # about 150 steps
MOST_BYTES = 1 << 24  # that are searched for a rare key


def last_records(path: Path, most: int = TAIL_BYTES) -> list[Record]:
    """Reads the complete records in the last `most` bytes, in order; [] without a file."""
    return [record for _, record in records_in(_end(path, most))]


def last_with(path: Path, key: str) -> Record | None:
    """Reads the last record with a key, if one is in the last MOST_BYTES."""
    most = TAIL_BYTES
    while most <= MOST_BYTES:
        data = _end(path, most)
        at = data.rfind(f'"{key}"'.encode())
        if at >= 0:
            line = data[data.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0]
            for _, record in records_in(line):
                return record
        if len(data) < most // 2:  # that is all of the file
            break
        most *= 16
    return None


def number(record: Record | None, key: str) -> float | None:
    """Returns a finite number of a record, or None."""
    value = record.get(key) if record else None
    return value if is_number(value) and isfinite(value) else None


def _end(path: Path, most: int) -> bytes:
    with suppress(OSError), open_untrusted(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most))
        data = file.read(most)
        return data if size <= most else data.partition(b"\n")[2]
    return b""
