"""Atomic writes: a file or folder is written aside, fsynced and renamed, so that nothing
half-written has the final name. Outputs that a user names are checked, and locked, before the work.
"""

import ctypes
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from mtcli.core.config.errors import failed, wrong
from mtcli.core.config.untrusted import append_untrusted

PARTIAL = ".partial"  # a folder being written, or left by a process that was killed


def require_writable(target: str, flag: str, suffixes: tuple[str, ...] = ()) -> None:
    """Raises MtcliError where a flag's file could not be written, before any work is done."""
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
    """As `require_writable`, of a picture: its suffix says which kind."""
    require_writable(target, flag, (".png", ".svg", ".pdf"))
    require_extra("matplotlib", flag)


def require_extra(module: str, flag: str) -> None:
    """Raises MtcliError where the `report` extra is not installed."""
    if find_spec(module) is None:
        message = f"{flag} needs {module}, which is not installed"
        raise wrong(message, "pip install 'mtcli[report]'", flag)


def lock_output(path: Path, output: Path) -> IO[bytes]:
    """The open file that locks an output until it is closed or its process ends.

    Raises MtcliError where another run has it.
    """
    lock = append_untrusted(path)
    try:
        # lockf, not flock: workers forked later must not hold it when we are killed.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise wrong(f"another run is writing {output}", "wait for it, or end it") from None
    return lock


def clear_folder(folder: Path) -> None:
    """Empties a run's work folder, but for its `lock`."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


@contextmanager
def aside(target: str | Path) -> Iterator[Path]:
    """As `atomic_file`, of a file that the user named. Raises MtcliError (exit 1) where it fails.

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
            with atomic_file(named) as path:
                yield path
    except OSError as error:
        raise failed(f"{target} cannot be written: {error.strerror}", "name another file") from None


@contextmanager
def folder_of(field: str, folder: Path) -> Iterator[None]:
    """Raises MtcliError (exit 2) where the system refuses a folder that the user named, or a folder
    in it has the name of a file."""
    try:
        yield
    except IsADirectoryError as error:
        message = f"{error.filename2 or error.filename} is a folder, and a file is written there"
        raise wrong(message, "remove it, or name another folder", field) from None
    except OSError as error:
        message = f"{folder} cannot be written: {error.strerror}"
        raise wrong(message, "name another folder", field) from None


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Gives a name to write to, which becomes `path` at the end, and vanishes after a failure.

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


def write_text(path: Path, text: str) -> None:
    """Writes a file in UTF-8; a link or a pipe of its name is replaced, and not written through.

    Raises OSError where the disk does not take it.
    """
    with atomic_file(path) as made:
        made.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(final: Path, needed_bytes: int) -> Iterator[Path]:
    """Gives a folder to write in, which gets the name `final` at the end, over what may be there.

    After a failure nothing is left of it. Raises MtcliError (exit 1) where the disk is too small or
    fails.
    """
    partial = final.with_name(final.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        make_partial(partial, needed_bytes)
        yield partial
        replace_folder(partial, final)
    except OSError as error:
        message = f"{final} was not written: {error.strerror or error}"
        raise failed(message, "is the disk full or read-only?") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make_partial(partial: Path, needed_bytes: int) -> None:
    """Makes a folder to write in, and those above it.

    Raises MtcliError (exit 1) where its disk has not so many bytes free.
    """
    make_folder(partial.parent)
    partial.mkdir()
    free = shutil.disk_usage(partial).free
    if needed_bytes > free:
        message = f"{partial.with_suffix('')} takes {needed_bytes} bytes and the disk has {free}"
        hint = "free some space, or write elsewhere"
        raise failed(f"No space left on device: {message} free", hint)


def replace_folder(partial: Path, final: Path) -> None:
    """Renames a finished folder to its name, over one that may be there.

    Where the system can swap two names there is always a folder of that name. Raises OSError where
    it cannot have the name; what had it before then has it still.
    """
    for folder in (path for path in (partial, *partial.iterdir()) if path.is_dir()):
        sync_folder(folder)
    if final.exists() and _swap(partial, final):
        sync_folder(final.parent)
        shutil.rmtree(partial, ignore_errors=True)
        return
    old = final.with_name(final.name + ".old" + PARTIAL)
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)  # of a replacement that was killed
        final.rename(old)
    try:
        partial.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _swap(one: Path, other: Path) -> bool:
    """Swaps the names of two folders at once; False where the system or its disk cannot."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):  # glibc 2.28 and Linux have it
        return False
    here, swaps = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), swaps) == 0


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
    """Makes the names in a folder durable (fsync)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
