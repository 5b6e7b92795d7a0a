"""Writing a folder aside and renaming it, so that nothing half-written has the final name."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtcli.core.checkpoint import manifest, names
from mtcli.core.config.errors import failed, wrong
from mtcli.core.runtime.atomic_writes import folder_of, make_folder, sync_folder


@contextmanager
def written_aside(final: Path, needed_bytes: int, force: bool) -> Iterator[Path]:
    """Gives a folder to write in; at the end it is made durable and gets its name.

    With `force` it replaces a checkpoint of that name. After a failure nothing is left of it.
    Raises MtcliError where the name is taken (exit 2), or the disk too small or failing (exit 1).
    """
    require_free(final, force)
    partial = final.with_name(final.name + names.PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial.parent)
        partial.mkdir()
        require_space(partial, needed_bytes)
        yield partial
        replace_folder(partial, final)
    except OSError as error:
        message = f"{final} was not written: {error.strerror or error}"
        raise failed(message, "is the disk full or read-only?") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises MtcliError (exit 1) where the disk of a folder has not so many bytes free."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        message = (
            f"{folder.with_suffix('')} takes {needed_bytes} bytes and the disk has {free} free"
        )
        hint = "free some space, or write elsewhere"
        raise failed(f"No space left on device: {message}", hint)


def require_free(final: Path, force: bool) -> None:
    """Raises MtcliError where something has the name already that may not be replaced, or where a
    folder that it would be in is a file."""
    with folder_of("DST", final):
        inside = next(path for path in final.absolute().parents if path.exists())
        if not inside.is_dir():
            message = f"{inside} is a file, and {final} would be inside of it"
            raise wrong(message, "name another folder", "DST")
        if not final.exists() or (final.is_dir() and not any(final.iterdir())):
            return
    if not force:
        raise wrong(f"{final} exists", "name another folder, or give --force to replace it")
    if not any((final / name).is_file() for name in (manifest.NAME, "config.json")):
        message = f"{final} is not a checkpoint, and --force replaces nothing else"
        raise wrong(message, "name another folder, or remove it yourself")


def replace_folder(partial: Path, final: Path) -> None:
    """Renames a finished folder to its name, over one that may be there.

    Raises OSError where it cannot have the name; what had it before then has it still.
    """
    for folder in (path for path in (partial, *partial.iterdir()) if path.is_dir()):
        sync_folder(folder)
    old = final.with_name(final.name + ".old" + names.PARTIAL)
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
