"""Finds what of runs can be freed, and frees it: old checkpoints, leftovers, and caches.

Nothing is touched that a run or a reader uses, that is a link, or that mtcli did not write. A run
that is pruned is locked meanwhile.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mtcli.core.checkpoint.folder import CHECKPOINTS, step_folders, step_of, unrelated_files
from mtcli.core.checkpoint.retention import Best, remove_checkpoint, steps_to_remove
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.nameable import TOKENIZED
from mtcli.core.config.untrusted import listed
from mtcli.core.runs.disk_size import size_of
from mtcli.core.runs.records_tail import number
from mtcli.core.runs.run_summary import fields_of
from mtcli.core.runtime.atomic_writes import PARTIAL
from mtcli.core.runtime.private_folder import user_cache
from mtcli.core.runtime.work_folder import MARK, WorkFolder, lock_output
from mtcli.core.training.run_folder import METRICS, SUBSETS, require_own_folders, step_records
from mtcli.core.training.run_lock import lock_folder, lock_holder

Kind = Literal["checkpoint", "leftover", "cache"]
# Of mtcli's folder in the user's cache.
CACHES = ("eval", "inputs", "rehearsals", "searches", "tokenizers")
UNUSED_SECONDS = 7 * 86_400.0  # after which a cache's entry counts as unused
TOKENS = re.compile(r"([0-9a-f]{16})\.(bin|idx|json|tokenizer)")  # of a text, by its key
# A file of a run folder that a killed process has not renamed to its name.
UNRENAMED = re.compile(r"\.(config|run|metrics|events|trackers)\.[0-9a-f]{16}\.(toml|jsonl?)")


class Prunable(NamedTuple):
    """A file or folder that can be removed, why, and the run it is of, if any."""

    path: Path
    kind: Kind
    size_bytes: int
    why: str
    run: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns it by name, without its run."""
        return {
            "path": str(self.path), "kind": self.kind, "bytes": self.size_bytes, "why": self.why
        }  # fmt: skip


def find_prunable(
    folder: Path, runs: Sequence[Path], keep: int | None, note: Callable[[str], None]
) -> list[Prunable]:
    """Lists what can be freed of some runs, and of unfinished work in their folder.

    The newest `keep` checkpoints of a run stay, by default as many as its config says. `note` is
    called with what is left as it is, and why.
    """
    bases = {
        Path(str(base)).resolve() for run in runs if (base := fields_of(run).get("train.init"))
    }
    found = [*_leftovers(folder)] if folder not in runs else []
    for run in runs:
        if (locked := lock_holder(run)) and locked[1] is not False:
            note(f"{run} is left as it is: {locked[0] or 'an unknown process'} holds it")
            continue
        try:
            require_own_folders(run)
        except MtcliError as error:
            note(f"{run} is left as it is: {error.problems[0].message}")
            continue
        found += _old_checkpoints(run, keep, bases, note)
        for part in (run, run / CHECKPOINTS, run / SUBSETS):
            found += (one._replace(run=run) for one in _leftovers(part))
    return found


def find_caches(now: float | None = None) -> list[Prunable]:
    """Lists the entries of the user's caches that no command has used for a week."""
    moment = time.time() if now is None else now
    return [
        Prunable(entry, "cache", size_of(entry), "not used for a week")
        for name in CACHES
        for entry in _entries(user_cache() / name)
        if not entry.is_symlink() and moment - _used_at(entry) > UNUSED_SECONDS
    ]


def find_tokens(runs: Sequence[Path], now: float | None = None) -> list[Prunable]:
    """Lists tokens of the texts of some runs, in PATH.tokenized/, that no command has used for a
    week and none of the runs names: those of another tokenizer, or of the text as it was."""
    moment = time.time() if now is None else now
    words = {Path(word).resolve() for run in runs for word in _words_of_data(fields_of(run))}
    folders = {word.parent for word in words if word.parent.suffix == TOKENIZED}
    found = []
    for folder in sorted(folder for folder in folders if (folder / MARK).is_file()):
        for entry in _entries(folder):
            key = TOKENS.fullmatch(entry.name)
            if key is None or entry.is_symlink() or folder / key[1] in words:
                continue
            if moment - _used_at(entry) > UNUSED_SECONDS:
                why = "tokens that no run listed names, not used for a week"
                found.append(Prunable(entry, "cache", size_of(entry), why))
    return found


def _words_of_data(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yields the words of a config's training and validation data."""
    for field, value in fields.items():
        if re.match(r"(phase\.\d+\.)?data\.(train|valid)\b", field):
            words = value if isinstance(value, list) else [value]
            yield from (word for word in words if isinstance(word, str) and "\0" not in word)


def free(found: Iterable[Prunable], note: Callable[[str], None]) -> int:
    """Removes what was found, and returns the bytes of it. `note` is called with what stays."""
    freed = 0
    for one in found:
        try:
            if one.run is None:
                _remove(one, note)
            else:
                with lock_folder(one.run, resume=True, anew=True):
                    _remove(one, note)
        except BlockingIOError:
            note(f"{one.path} stays: it is being read")
        except MtcliError as error:
            note(f"{one.path} stays: {error.problems[0].message}")
        except OSError as error:
            note(f"{one.path} stays: {error.strerror}")
        else:
            freed += one.size_bytes
    return freed


def _old_checkpoints(
    run: Path, keep: int | None, bases: set[Path], note: Callable[[str], None]
) -> Iterator[Prunable]:
    """Yields the checkpoints beyond those that are kept; never the newest, one of the best, nor
    another run's start."""
    fields = fields_of(run)
    kept_number = fields.get("train.keep", 0) if keep is None else keep
    multiple, num_best = (fields.get(f"train.{name}", 0) for name in ("keep_every", "keep_best"))
    if not all(type(count) is int for count in (kept_number, multiple, num_best)):
        return
    best = Best(num_best, _by_validation_loss(run) if num_best else ())
    folders = {step_of(path): path for path in step_folders(run / CHECKPOINTS)}
    for step in steps_to_remove(list(folders), kept_number, multiple, best):
        path = folders[step]
        if path.is_symlink():
            continue
        if path.resolve() in bases:
            note(f"{path} stays: a run began with it (train.init)")
        elif unrelated := unrelated_files(path):
            note(f"{path} stays: {listed(unrelated)} in it is of no checkpoint")
        else:
            why = f"older than the newest {kept_number}"
            yield Prunable(path, "checkpoint", size_of(path), why, run)


def _by_validation_loss(run: Path) -> tuple[int, ...]:
    """Lists the steps that were evaluated by their validation loss, the lowest first."""
    rows = (row for _, row in step_records(run / METRICS)) if (run / METRICS).is_file() else ()
    losses = {row["step"]: number(row, "valid_loss") for row in rows}
    evaluated = {step: loss for step, loss in losses.items() if loss is not None}
    return tuple(sorted(evaluated, key=lambda step: (evaluated[step], step)))


def _leftovers(folder: Path) -> Iterator[Prunable]:
    """Yields what killed processes have left in a folder, which mtcli's marks or names show."""
    for path in _entries(folder):
        if path.is_symlink():
            continue
        if path.is_dir() and path.name.endswith(PARTIAL):
            is_save = path.parent.name == CHECKPOINTS and not unrelated_files(path)
            if is_save or _is_abandoned(path):
                yield Prunable(path, "leftover", size_of(path), "unfinished, of a killed process")
        elif UNRENAMED.fullmatch(path.name) and path.is_file():
            yield Prunable(path, "leftover", size_of(path), "unfinished, of a killed process")


def _is_abandoned(path: Path) -> bool:
    """Whether a folder is a work folder of mtcli's that no process has locked."""
    mark = path / MARK
    if not mark.is_file() or mark.is_symlink():
        return False
    try:
        lock_output(mark, path).close()
    except (MtcliError, OSError):
        return False
    return True


def _remove(one: Prunable, note: Callable[[str], None]) -> None:
    """Removes a file or folder as its kind is removed: not one that is used meanwhile."""
    if one.kind == "checkpoint":
        remove_checkpoint(one.path, note)
    elif not one.path.is_dir():
        one.path.unlink()
    elif (one.path / MARK).exists():
        WorkFolder(one.path, one.path).remove()
    else:
        shutil.rmtree(one.path)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # there is none, or this user may not read it
        return []


def _used_at(path: Path) -> float:
    """Returns when a file of a cache's entry was last read or written, in Unix seconds."""
    files = [path, *path.rglob("*")] if path.is_dir() else [path]
    return max(max(stat.st_mtime, stat.st_atime) for stat in (file.lstat() for file in files))
