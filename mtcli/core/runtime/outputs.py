"""Checks output files ahead of the work: that they can be written, and are not inputs."""

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from mtcli.core.config.errors import wrong


def require_writable(target: str, flag: str, suffixes: tuple[str, ...] = ()) -> None:
    """Raises MtcliError where a flag's file cannot be written."""
    path = Path(target)
    if target == "-":
        raise wrong("- is stdout, and this is written to a file", "name a file", flag)
    if suffixes and path.suffix not in suffixes:
        message = f"it does not write {path.suffix or 'files without a suffix'}"
        raise wrong(message, f"a name that ends in {' or '.join(suffixes)}", flag)
    if os.path.isfile(path.parent):
        raise wrong(f"{path.parent} is a file, and no folder", "name another folder", flag)
    if not os.path.isdir(path.parent):
        raise wrong(f"there is no folder {str(path.parent)!r}", "create it first", flag)
    if os.path.isdir(path):
        raise wrong(f"{target} is a folder", "name a file", flag)
    # A file is replaced in its folder; what `aside` writes through is written itself.
    written = path if path.exists() and not path.is_file() else path.parent
    if not os.access(written, os.W_OK):
        message = f"{written} cannot be written: it is read-only, or another user's"
        raise wrong(message, "name another folder", flag)


def require_picture(target: str, flag: str) -> None:
    """As `require_writable`, for a picture, whose suffix is its format."""
    require_writable(target, flag, (".png", ".svg", ".pdf"))
    require_extra("matplotlib", flag)


def require_extra(module: str, flag: str) -> None:
    """Raises MtcliError where the `report` extra is not installed."""
    if find_spec(module) is None:
        message = f"{flag} needs {module}, which is not installed"
        raise wrong(message, "pip install 'mtcli[report]'", flag)


def require_apart(inputs: Iterable[str | Path], outputs: Iterable[str | Path], flag: str) -> None:
    """Raises MtcliError where an input is an output, or lies in an output folder, by any name or
    link: it would be replaced or removed. Ignores names that do not exist."""
    places = [Path(output).resolve() for output in outputs]
    files = {(status.st_dev, status.st_ino) for status in map(_status, places) if status}
    for path in inputs:
        status = _status(path)
        if status is None:
            continue
        real = Path(path).resolve()
        same = (status.st_dev, status.st_ino) in files
        if same or any(real.is_relative_to(place) for place in places):
            message = f"the input {path} would be replaced by what this writes"
            raise wrong(message, "write to another name", flag)


def require_no_link(path: Path, flag: str) -> None:
    """Raises MtcliError where a name that a command derives is a link, by which the folder's owner
    could have any file of the user's overwritten."""
    if path.is_symlink():
        message = f"{path} is a link, and nothing is written through one that no flag names"
        raise wrong(message, "remove it, or name another output", flag)


def _status(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (OSError, ValueError):  # there is none, or no name at all
        return None
