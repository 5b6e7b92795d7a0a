"""Writes files and folders atomically: under a temporary name, then fsync and rename."""

import ctypes
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mtcli.core.config.errors import failed, wrong
from mtcli.core.runtime.work_folder import WorkFolder

PARTIAL = ".partial"  # a folder being written, or left by a process that was killed


@contextmanager
def aside(target: str | Path) -> Iterator[Path]:
    """As `atomic_file`, for a file that the user named. Raises MtcliError (exit 1) where writing
    fails.

    A link, a device or a pipe (`/dev/stdout`, `>(jq .)`) is not replaced: the content is copied
    into it.
    """
    named = Path(target)
    try:
        if named.is_symlink() or (named.exists() and not named.is_file()):
            with TemporaryDirectory() as folder:
                yield (partial_file := Path(folder) / named.name)
                with named.open("wb") as file:
                    file.write(partial_file.read_bytes())
        else:
            with atomic_file(named) as path:
                yield path
    except OSError as error:
        raise failed(f"{target} cannot be written: {error.strerror}", "name another file") from None


@contextmanager
def folder_of(field: str, folder: Path) -> Iterator[None]:
    """Raises MtcliError (exit 2) where the system refuses a folder that the user named, or a parent
    of it is a file."""
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
    """Yields a new empty file, which is renamed to `path` at the end, or removed after an error.

    Its name is random, so that nobody can place a link there. Raises OSError where the disk fails.
    """
    temporary = path.with_name(f".{path.stem[:32]}.{secrets.token_hex(8)}{path.suffix}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a file in UTF-8 atomically, replacing a link or pipe of that name.

    Raises OSError where the disk fails.
    """
    with atomic_file(path) as partial_file:
        partial_file.write_text(text, encoding="utf-8")


@contextmanager
def atomic_folder(final: Path, needed_bytes: int) -> Iterator[Path]:
    """Yields a folder to write in, which is renamed to `final` at the end, replacing a folder
    there.

    After an error it is removed. Raises MtcliError (exit 2) where another run writes it or the name
    of its work folder is taken, and (exit 1) where the disk is too small or fails.
    """
    with ExitStack() as cleanup:
        try:
            make_folder(final.absolute().parent)
            work = WorkFolder(partial_name(final), final)
            cleanup.callback(work.remove)
            work.clear()
            partial_folder = work.path / final.name
            make_partial(partial_folder, final, needed_bytes)
            yield partial_folder
            replace_folder(partial_folder, final)
        except OSError as error:
            message = f"{final} was not written: {error.strerror or error}"
            raise failed(message, "is the disk full or read-only?") from None


def partial_name(final: Path) -> Path:
    """The temporary name under which a folder or file is written."""
    return final.with_name(final.name + PARTIAL)


def make_partial(partial: Path, final: Path, needed_bytes: int) -> None:
    """Creates the folder to write `final` in, and its parents.

    Raises MtcliError (exit 1) where its disk has less than `needed_bytes` free.
    """
    make_folder(partial.parent)
    partial.mkdir()
    free = shutil.disk_usage(partial).free
    if needed_bytes > free:
        message = f"{final} takes {needed_bytes} bytes and the disk has {free}"
        hint = "free some space, or write elsewhere"
        raise failed(f"No space left on device: {message} free", hint)


def replace_folder(partial: Path, final: Path) -> None:
    """Renames a finished folder to its name, replacing a folder there.

    Where the system can swap two names, a folder of that name exists at all times. Raises OSError
    where renaming fails; the old folder then keeps its name.
    """
    for folder in (path for path in (partial, *partial.iterdir()) if path.is_dir()):
        sync_folder(folder)
    if final.exists() and _swap(partial, final):
        sync_folder(final.parent)
        shutil.rmtree(partial, ignore_errors=True)
        return
    old = partial.with_name(final.name + ".old" + PARTIAL)
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
    """Swaps the names of two folders atomically; returns False where the system or the disk
    cannot."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "renameat2"):  # glibc 2.28 and Linux have it
        return False
    cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(libc.renameat2(cwd, os.fsencode(one), cwd, os.fsencode(other), exchange) == 0)


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents, if missing, and makes their names durable."""
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
