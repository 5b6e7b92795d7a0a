"""Adds up the bytes of files. Imports no torch."""

import os
from pathlib import Path


def size_of(path: Path) -> int:
    """Returns the bytes of a file, or of all files in a folder; a link counts as itself."""
    try:
        if not path.is_dir() or path.is_symlink():
            return path.lstat().st_size
    except OSError:
        return 0
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # a run has removed it meanwhile
                continue
    return total


def size_words(size: float) -> str:
    """Words a number of bytes, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
