"""A calibration of this machine for each kind of run: measured once, by one process at a time.

What was found is a file in the user's cache folder, named by all that it depends on; so is a
measurement that failed, with its reason, which is tried again after RETRY seconds.
"""

import fcntl
import hashlib
import json
import os
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.errors import wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.plan.calibration import BUDGET, Calibration, Facts, facts_of
from mtcli.core.runtime.atomic_writes import atomic_file
from mtcli.core.runtime.machine import ALLOCATOR

FIXED = "MTCLI_CALIBRATION"  # names a file to take instead of measuring
RETRY = 3600.0  # seconds after which what failed is tried again
PATIENCE = 600.0  # seconds to wait for another process that measures
POLL = 0.2
MOST_LETTERS = 200  # of a reason
INSTEAD = "a roofline takes its place"

Measure = Callable[[Facts], str]


class Failure(NamedTuple):
    """A measurement that failed, and when by the clock of the machine."""

    reason: str
    at: float  # seconds since 1970
    file: Path

    @property
    def holds(self) -> bool:
        """Whether it is too early to try again."""
        return 0.0 <= time.time() - self.at < RETRY

    @property
    def told(self) -> str:
        """The failure in a line, with when it is tried again."""
        again = time.strftime("%H:%M", time.localtime(self.at + RETRY))
        when = f"tried again after {again}, or when {self.file} is deleted"
        return f"this CPU could not be measured ({self.reason}): {INSTEAD}; {when}"


def calibrated(config: RunConfig, world: int) -> Calibration | None:
    """This machine's numbers for a kind of run: those kept, or measured now, which takes seconds.

    None, with a line on stderr that says why, where there are none. Raises MtcliError where the
    file that MTCLI_CALIBRATION names holds none.
    """
    if fixed := os.environ.get(FIXED):
        return _named(fixed)
    return kept_or_measured(facts_of(config, world), cache_folders(), _measure)


def _named(path: str) -> Calibration:
    try:
        return Calibration.of(json.loads(read_untrusted(path)))
    except (OSError, KeyError, TypeError, ValueError):
        hint = "a file that plan has left in ~/.cache/mtcli; or leave it unset"
        raise wrong(f"{path} holds no calibration", hint, FIXED) from None


def kept_or_measured(facts: Facts, folders: Sequence[Path], measure: Measure) -> Calibration | None:
    """As `calibrated`: what one of the folders holds, else what `measure` prints.

    That is kept in the first folder that can be written; where none can, nothing is measured, as
    every plan would pay for it again.
    """
    text = json.dumps(facts, sort_keys=True)
    name = f"cpu-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    found = _read_any(name, facts, folders)
    if found is None:
        folder = next(filter(_takes_files, folders), None)
        if folder is None:
            places = " or ".join(map(str, folders))
            _say(
                f"no calibration can be kept in {places}: {INSTEAD}; XDG_CACHE_HOME names a folder"
            )
            return None
        with _alone() as alone:
            if not alone:
                _say(f"another process has measured this CPU for {PATIENCE:g} s: {INSTEAD}")
                return None
            found = _read_any(name, facts, folders) or _measured(folder / name, facts, measure)
    if isinstance(found, Failure):
        _say(found.told)
        return None
    return found


def cache_folders() -> list[Path]:
    """The user's cache folder; and a private one that lasts until the machine starts again, for
    where that cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    found = [Path(base) / "mtcli"] if os.path.isabs(base) else []
    with suppress(OSError):
        private = Path(tempfile.gettempdir()) / f"mtcli-{os.getuid()}"
        private.mkdir(mode=0o700, exist_ok=True)
        if _is_private(private):
            found.append(private)
    return found


def _is_private(folder: Path) -> bool:
    """Whether nobody else can have put files into a folder: anyone may have made one of its name
    in a place that all users share."""
    status = folder.lstat()
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return ours and not status.st_mode & 0o022


def _takes_files(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _read_any(name: str, facts: Facts, folders: Sequence[Path]) -> Calibration | Failure | None:
    found = (_read(folder / name, facts) for folder in folders)
    return next((one for one in found if one is not None), None)


def _read(file: Path, facts: Facts) -> Calibration | Failure | None:
    """Reads a kept calibration; None where the file is damaged or of other facts."""
    try:
        data = json.loads(read_untrusted(file))
        if data["facts"] != facts:
            return None
        if "failed" not in data:
            return Calibration.of(data)
        failure = Failure(str(data["failed"]["reason"]), float(data["failed"]["at"]), file)
        return failure if failure.holds else None
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _measured(file: Path, facts: Facts, measure: Measure) -> Calibration | Failure:
    """Measures this machine and keeps the result in the file."""
    ranks = f"{facts['ranks']} rank{'s' if facts['ranks'] > 1 else ''}"
    cost = f"at most {BUDGET:g} s of processor time"
    _say(f"measuring this CPU for {ranks} of {facts['precision']}, once: {cost}")
    found: Calibration | Failure
    data: dict[str, Any]
    try:
        data = json.loads(measure(facts))
        found = Calibration.of(data)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        found = Failure(str(error), time.time(), file)
        data = {"failed": {"reason": found.reason, "at": found.at}}
    try:
        with atomic_file(file) as path:
            path.write_text(json.dumps({"facts": facts, **data}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        _say(f"what was measured is not kept: {file}: {error.strerror}")
    return found


@contextmanager
def _alone() -> Iterator[bool]:
    """Holds this machine's lock: of two that measure at once, each would see the other's load.

    False where another process holds it for longer than PATIENCE. The system frees it when its
    holder dies. A machine on which no such file can be made has no lock.
    """
    file = _lock_file()
    try:
        yield file is None or _locked(file)
    finally:
        if file is not None:
            os.close(file)


def _locked(file: int) -> bool:
    deadline = time.monotonic() + PATIENCE
    waiting = False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if not waiting:
            _say("another process measures this CPU: waiting for it (--no-calibrate does not)")
        waiting = True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)


def _lock_file() -> int | None:
    """A file that all users of the machine may lock, none may write, and no link leads away."""
    with suppress(OSError):
        path = os.path.join(tempfile.gettempdir(), "mtcli-calibration.lock")
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o444)
            os.fchmod(file, 0o444)  # whatever the umask is
            return file
        except FileExistsError:
            return os.open(path, flags)
    return None


def _measure(facts: Facts) -> str:
    """Runs `python -m mtcli.core.plan.measure_cpu` and returns its stdout. Raises RuntimeError.

    It ends when this process does: that holds the one write end of its stdin.
    """
    import subprocess  # not above: a plan that reads what is kept starts sooner

    threads = max(1, facts["cores"] // facts["ranks"])
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",  # a thread that waits takes no processor time: probes.Watch
        "GLOO_SOCKET_IFNAME": _loopback(),
    }
    stdin, lifeline = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="mtcli-cpu-") as folder:
            done = subprocess.run(
                [sys.executable, "-m", "mtcli.core.plan.measure_cpu", json.dumps(facts), folder],
                env=ALLOCATOR | os.environ | settings, stdin=stdin, capture_output=True,
                text=True, errors="replace",
            )  # fmt: skip
    finally:
        os.close(stdin)
        os.close(lifeline)
    if done.returncode:
        raise RuntimeError(_reason(done.returncode, done.stderr))
    return done.stdout


def _reason(code: int, errors: str) -> str:
    """Why a measurement ended with an exit code: its last words, where it has any."""
    if code in (-signal.SIGPROF, -signal.SIGXCPU):
        return f"{BUDGET:g} s of processor time were not enough"
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    lines = [line for line in errors.splitlines() if line.strip()]
    last = "".join(letter for letter in lines[-1] if letter.isprintable()) if lines else ""
    return last[:MOST_LETTERS] or f"it ended with exit code {code}"


def _loopback() -> str:
    """The name of the interface that no other machine reaches: lo, or lo0."""
    from socket import if_nameindex

    names = [name for _, name in if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
