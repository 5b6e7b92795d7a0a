"""Files that are written whole: known to be writable before the work, and never half there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from mtcli.core.config.errors import failed, wrong


def require_writable(target: str, flag: str, suffixes: tuple[str, ...] = ()) -> None:
    """Raises MtcliError where a flag's file could not be written, before any work is done."""
    path = Path(target)
    if target == "-":
        raise wrong("- is stdout, and this is written to a file", "name a file", flag)
    if suffixes and path.suffix not in suffixes:
        message = f"it does not write {path.suffix or 'files without a suffix'}"
        raise wrong(message, f"a name that ends in {' or '.join(suffixes)}", flag)
    if not os.path.isdir(path.parent):
        raise wrong(f"there is no folder {str(path.parent)!r}", "create it first", flag)
    if os.path.isdir(path):
        raise wrong(f"{target} is a folder", "name a file", flag)


def require_picture(target: str, flag: str) -> None:
    """As `require_writable`, of a picture: its suffix says which kind."""
    require_writable(target, flag, (".png", ".svg", ".pdf"))
    require_extra("matplotlib", flag)


def require_extra(module: str, flag: str) -> None:
    """Raises MtcliError where the `report` extra is not installed."""
    if find_spec(module) is None:
        message = f"{flag} needs {module}, which is not installed"
        raise wrong(message, "pip install 'mtcli[report]'", flag)


@contextmanager
def aside(target: str | Path) -> Iterator[Path]:
    """As `whole`, of a file that the user named. Raises MtcliError (exit 1) where it fails.

    A link, a device or a pipe (`/dev/stdout`, `>(jq .)`) stays what it is: it is written through.
    """
    named = Path(target)
    try:
        if named.is_symlink() or (named.exists() and not named.is_file()):
            with TemporaryDirectory() as folder:
                yield (made := Path(folder) / named.name)
                with named.open("wb") as file:
                    file.write(made.read_bytes())
        else:
            with whole(named) as path:
                yield path
    except OSError as error:
        raise failed(f"{target} cannot be written: {error.strerror}", "name another file") from None


@contextmanager
def folder_of(field: str, folder: Path) -> Iterator[None]:
    """Raises MtcliError (exit 2) where the system refuses a folder that the user named."""
    try:
        yield
    except OSError as error:
        message = f"{folder} cannot be written: {error.strerror}"
        raise wrong(message, "name another folder", field) from None


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name to write to; it becomes `path` when all is written, and vanishes otherwise.

    Raises OSError where the disk does not take it.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file in UTF-8; a link or a pipe of its name is replaced, and not written through.

    Raises OSError where the disk does not take it.
    """
    with whole(path) as made:
        made.write_text(text, encoding="utf-8")


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it, their names durable; it may be there already."""
    try:
        folder.mkdir()
    except FileNotFoundError:
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
