"""The lock on a run folder: one run at a time writes there, and an error names the one that does.

The file `run.lock` names its holder and is locked by `flock` for as long as the holder lives, so
that a lock that can be taken has a dead holder. Where a file system has no locks, or its locks may
not reach other machines, the holder is looked up by process id and start time: on this machine that
proves its death, and on another nothing does. Imports no torch: a refusal comes before that.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

from mtcli.core.checkpoint.folder import CHECKPOINTS, step_folders
from mtcli.core.config.errors import MtcliError, wrong
from mtcli.core.config.untrusted import QUIETLY, open_untrusted, parse_json
from mtcli.core.runtime.atomic_writes import folder_of, make_folder
from mtcli.core.runtime.attempts import Attempt
from mtcli.core.training.run_folder import (
    FACTS,
    METRICS,
    holds_run,
    last_step,
    require_own_folders,
)

LOCK = "run.lock"
FIELD = "train.output"
# Of train.timeout, to wait for an earlier attempt's rank to end: watchdogs of who waits have more.
PATIENCE = 0.5
DYING = 15.0  # seconds to wait for a rank whose launcher was killed, which ends within 3 s
ATTEMPTS = 100  # to open a lock that other runs remove as they end
MAX_BYTES = 4096
# File systems whose flock is seen by every machine that can mount them; the options that undo it
EVERYWHERE = {"ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "nfs", "nfs4", "lustre", "ceph"}
LOCAL_OPTIONS = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}


class Holder(NamedTuple):
    """A process that holds a run folder."""

    host: str
    boot: str  # the kernel's id since it started; the host's name where there is none
    namespace: str  # in which `pid` is a number
    pid: int
    started: int  # clock ticks after the boot; 0 where the system does not say
    since: str  # UTC, ISO 8601
    launcher: int  # the process that started it as a rank; 0 where none did

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def require_startable(folder: Path, resume: bool, anew: bool = False) -> None:
    """Raises MtcliError where a run could not start in a folder now; takes nothing.

    Only a holder that is known to live is refused: `lock_folder` decides on any other.
    """
    with folder_of(FIELD, folder):
        end = monotonic() + DYING
        while (holder := _read(folder / LOCK)) and _lives(holder) is True:
            if not _is_dying(holder) or monotonic() > end:
                raise _refusal(folder, holder)
            sleep(0.05)
        _require_beginning(folder, resume, anew)


@contextmanager
def lock_folder(
    folder: Path,
    resume: bool,
    attempt: Attempt | None = None,
    patience: float = 0.0,
    anew: bool = False,
) -> Iterator[str]:
    """Locks a run folder, and makes it where there is none.

    Yields a sentence about the previous holder where that has died, else "". Raises MtcliError
    where another run holds the folder, or may; without `resume`, where the folder holds a run that
    has ended; without `anew`, where that run has made steps and saved none. An attempt goes on from
    earlier ones of its launch, and waits `patience` seconds for their ranks to end: a node that has
    lost its launcher ends its ranks when their peers have gone.
    """
    path = folder / LOCK
    with folder_of(FIELD, folder):
        is_new = not folder.exists()
        continues = attempt is not None and is_continued(folder, attempt)
        file, previous = _take_in_turn(path, patience if continues else 0.0)
    try:
        _require_beginning(folder, resume or continues, anew or continues)
        yield f"took over {folder} from {previous}, which has died" if previous else ""
    finally:
        with suppress(OSError):  # the folder has gone, or its disk
            if _is_file_of(file, path):
                path.unlink()
            if is_new:
                folder.rmdir()  # only where nothing was written
        os.close(file)


def lock_holder(folder: Path) -> tuple[Holder | None, bool | None] | None:
    """Returns the holder that a run folder's lock names, and whether it lives: None where that is
    not known. Returns None where the folder is not locked. Takes no lock."""
    path = folder / LOCK
    if not path.exists():
        return None
    with suppress(OSError):  # it is no file, or another user's
        holder = _read(path)
        return holder, _lives(holder) if holder else None
    return None, None


def is_continued(folder: Path, attempt: Attempt) -> bool:
    """Whether an earlier attempt of the same launch trained the run of a folder."""
    return attempt.continues(_record(folder))


def _require_beginning(folder: Path, resume: bool, anew: bool) -> None:
    """Raises MtcliError where a folder has a run that may not go on, or not begin anew, or links in
    the place of its folders."""
    require_own_folders(folder)
    if not holds_run(folder):
        return
    other = "or set train.output to another folder"
    saved = bool(step_folders(folder / CHECKPOINTS))
    done = 0 if saved else last_step(folder / METRICS)
    if done and not anew:
        message = f"{folder} holds a run that has come to step {done:,} and saved no checkpoint"
        hint = f"--start-over begins it anew, and keeps its records; {other}"
        raise wrong(message, hint, FIELD)
    if not resume and (saved or not anew):
        raise wrong(f"{folder} already holds a run", f"--resume goes on from it; {other}", FIELD)


def _record(folder: Path) -> Mapping[str, Any]:
    """Reads the run.json of a folder's last run; empty where it is missing or damaged."""
    with suppress(OSError, ValueError), open_untrusted(folder / FACTS) as file:
        record = parse_json(file.read(MAX_BYTES))
        return record if isinstance(record, dict) else {}
    return {}


def _take_in_turn(path: Path, patience: float) -> tuple[int, Holder | None]:
    """Takes the lock: tries for `patience` seconds where another process has it, and for DYING
    where that process is about to end."""
    start = monotonic()
    while True:
        try:
            return _take(path)
        except MtcliError:
            holder = _read(path)
            dying = holder is not None and _is_dying(holder)
            if monotonic() - start > (max(patience, DYING) if dying else patience):
                raise
        sleep(0.05)


def _take(path: Path) -> tuple[int, Holder | None]:
    """(the lock as an open file, the previous holder where that has died)."""
    for _ in range(ATTEMPTS):
        make_folder(path.parent)
        with suppress(FileNotFoundError):  # a run that ended has removed the folder, or the lock
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | QUIETLY, 0o644)
            try:
                previous = _write_holder(file, path)
            except BaseException:
                os.close(file)
                raise
            return file, previous
    raise FileNotFoundError(2, "it vanishes as it is made", str(path))


def _write_holder(file: int, path: Path) -> Holder | None:
    """Makes this process the holder; returns the one before where that has died.

    Raises FileNotFoundError where the file is no longer the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _replace_holder(file, path, locked=True)
    except BlockingIOError:
        raise _refusal(path.parent, _read(path)) from None
    except FileNotFoundError:
        raise
    except OSError:  # the file system has no locks
        with _alone(path):
            return _replace_holder(file, path, locked=False)


def _replace_holder(file: int, path: Path, locked: bool) -> Holder | None:
    if not _is_file_of(file, path):
        raise FileNotFoundError(2, "it was replaced", str(path))
    previous = _read(path)
    is_proof = locked and previous is not None and _would_be_seen(path, previous)
    if previous is not None and not is_proof and _lives(previous) is not False:
        raise _refusal(path.parent, previous)
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(_this_process()._asdict()).encode(), 0)
    os.fsync(file)
    return previous


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lets one process at a time look at a lock, where files cannot be locked."""
    guard = path.with_name(path.name + ".taking")
    try:
        os.close(os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        hint = f"wait a second; where no run is starting, remove {guard}"
        raise wrong(f"another run is taking {path.parent}", hint, FIELD) from None
    try:
        yield
    finally:
        guard.unlink()


def _is_file_of(file: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    return os.path.samestat(os.fstat(file), path.stat())


def _refusal(folder: Path, holder: Holder | None) -> MtcliError:
    who = f" ({holder})" if holder else ""
    other = "set train.output to another folder"
    if holder is None or _lives(holder):
        hint = f"wait until it ends, or stop it; or {other}"
    else:
        hint = f"{other}; or, where that process has ended, remove {folder / LOCK}"
    return wrong(f"{folder} is held by another run{who}", hint, FIELD)


def _read(path: Path) -> Holder | None:
    """The holder that a lock names; None where it names none."""
    try:
        with open_untrusted(path) as file:
            holder = Holder(**parse_json(file.read(MAX_BYTES)))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    kinds = [type(value) for value in holder]
    return holder if kinds == [str, str, str, int, int, str, int] else None


def _this_process() -> Holder:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    host, pid = socket.gethostname(), os.getpid()
    launcher = os.getppid() if "LOCAL_RANK" in os.environ else 0  # as torchrun sets it
    return Holder(host, _boot(), _namespace(), pid, _start_time(pid) or 0, since, launcher)


def _lives(holder: Holder) -> bool | None:
    """Whether a holder's process lives; None where that cannot be known from here."""
    boot = _boot()
    if holder.boot == boot and holder.namespace == _namespace():
        return _start_time(holder.pid) == holder.started
    restarted = holder.host == socket.gethostname() and holder.boot != boot
    return False if restarted else None


def _is_dying(holder: Holder) -> bool:
    """Whether a holder of this machine has lost its launcher, and so will end by itself."""
    lives = bool(holder.launcher) and _lives(holder) is True
    return lives and _start_time(holder.launcher) is None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_time(pid: int) -> int | None:
    """When a process was started, 0 where the system does not say; None where there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else int(fields[18])
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0


def _would_be_seen(path: Path, holder: Holder) -> bool:
    """Whether a lock of this holder would be seen from here, so that there being none is proof."""
    if holder.boot == _boot():
        return True
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for line in mounts:
        fields, _, source = line.partition(" - ")
        kind, _, options = source.split()[:3]
        if fields.split()[2] == number:
            return kind in EVERYWHERE and not LOCAL_OPTIONS & set(options.split(","))
    return False
