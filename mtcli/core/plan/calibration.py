"""Seconds per unit of work of this machine's processor, measured once for each kind of run.

`measure_cpu.py` measures them, one process at a time. What it found is a file in the user's cache
folder, named by all that it depends on; so is a measurement that failed, with its reason, which is
tried again after RETRY seconds.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from mtcli.core.config.errors import wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.exchange.arithmetic import Kind
from mtcli.core.runtime.atomic_writes import atomic_file
from mtcli.core.runtime.launch import ALLOCATOR, cores
from mtcli.core.runtime.private_folder import private_folder, user_cache

VERSION = 8  # of the file, of what its numbers multiply, and of how steps are made
BUDGET = 20.0  # seconds of processor time that a calibration takes at most, over all processes
FIXED = "MTCLI_CALIBRATION"  # names a file to take instead of measuring
RETRY = 3600.0  # seconds after which what failed is tried again
PATIENCE = 600.0  # seconds to wait for another process that measures
POLL = 0.2
MOST_LETTERS = 200  # of a reason
INSTEAD = "a roofline takes its place"

Facts = dict[str, Any]
Measure = Callable[[Facts], str]
Exchange = Literal["gather", "scatter", "reduce", "exchange", "hop"]


class Amounts(NamedTuple):
    """Counts of the work of one pass on a rank; a calibration prices each in seconds."""

    launches: float = 0.0  # blocks; an end of the model counts as half a one
    flops: float = 0.0  # of matrix products
    residual: float = 0.0  # elements of the residual stream
    inner: float = 0.0  # elements of the MLP's inner layer
    logits: float = 0.0
    weights: float = 0.0  # elements read, or given a gradient
    copies: float = 0.0  # elements of token copies that go to experts
    experts: float = 0.0  # experts that are called

    def __add__(self, other: tuple[float, ...]) -> "Amounts":  # type: ignore[override]
        return Amounts(*(a + b for a, b in zip(self, other, strict=True)))


class AttentionRow(NamedTuple):
    """Seconds per attention score at one length n of rows: [n, n], and a ring's [n, n / 2]."""

    length: float
    forward: float
    backward: float
    square_forward: float
    square_backward: float
    part_forward: float
    part_backward: float


Prices = Annotated[tuple[float, ...], Field(min_length=8, max_length=8)]  # of each of Amounts


@dataclass(frozen=True)
class Calibration:
    """Seconds per unit of a rank's work, measured with `ranks` of them busy on this machine."""

    ranks: Annotated[int, Field(ge=1)]
    widens: bool  # makes bfloat16's products in float32
    flops: float  # FLOP/s of a large product on one rank, by which MFU divides
    memory_bandwidth: float  # bytes/s of a copy on one rank
    forward: Prices
    backward: Prices
    attention: Annotated[tuple[AttentionRow, ...], Field(min_length=1)]  # ascending lengths
    update: tuple[float, float]  # seconds per block, and per element of norm and optimizer
    overhead: float  # seconds of a step outside of its micro-batches
    # of each: seconds, and seconds per byte that crosses
    links: Annotated[dict[Exchange, tuple[float, float]], Field(min_length=5)]
    socket: float  # processor seconds of a byte by TCP over loopback, of both its ends
    # of each: seconds of a call, and seconds per element
    arithmetic: Annotated[dict[Kind, tuple[float, float]], Field(min_length=11)]

    def crowd(self, world: int) -> float:
        """Slowdown of a world with more ranks than were measured: world / ranks, at least 1."""
        return max(1.0, world / self.ranks)

    def as_json(self) -> dict[str, Any]:
        """The JSON of a calibration's file."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Calibration":
        """Reads the JSON of a calibration's file. Raises ValueError where it is damaged."""
        return _CALIBRATION.validate_python(data)


_CALIBRATION = TypeAdapter(Calibration)


def calibrated(config: RunConfig, world: int) -> Calibration | None:
    """Finds this machine's calibration for a kind of run, or measures it, which takes seconds.

    None, with a line on stderr that says why, where there are none. Raises MtcliError where the
    file that MTCLI_CALIBRATION names holds none.
    """
    if fixed := os.environ.get(FIXED):
        try:
            return Calibration.of(json.loads(read_untrusted(fixed)))
        except (OSError, ValueError):
            hint = "a file that plan has left in ~/.cache/mtcli; or leave it unset"
            raise wrong(f"{fixed} holds no calibration", hint, FIXED) from None
    return kept_or_measured(facts_of(config, world), cache_folders(), _measure)


def facts_of(config: RunConfig, world: int) -> Facts:
    """Facts on which a calibration depends, for a config on `world` ranks."""
    model = config.model
    flags = ("activation", "norm", "position", "bias", "qkv_bias", "causal", "head_dim")
    scaled, rule = config.train.precision == "fp8", config.optimizer.name
    return {
        "version": VERSION,
        "processor": _processor(),
        "cores": cores(),
        "torch": _torch_version(),
        "ranks": min(world, cores()),
        "precision": config.train.precision,
        "matmul": config.train.matmul,
        "kind": {name: getattr(model, name) for name in flags}
        | {"dropout": model.dropout > 0.0, "routed": model.num_experts > 0},
        **({"fp8_scaling": config.train.fp8_scaling} if scaled else {}),
        **({"optimizer": rule} if rule != "adamw" else {}),
    }


def _torch_version() -> str:
    """Reads torch's version file: importing torch, or all packages' metadata, takes longer."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    return match[1] if match else ""


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def kept_or_measured(facts: Facts, folders: Sequence[Path], measure: Measure) -> Calibration | None:
    """Reads the calibration that a folder holds, or takes it from what `measure` prints.

    That is kept in the first folder that can be written; where none can, nothing is measured, as
    every plan would pay for it again.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    files = [folder / f"cpu-{digest[:16]}.json" for folder in folders]
    outcome = _read_any(files, facts)
    if outcome is None:
        file = next((file for file in files if _takes_files(file.parent)), None)
        if file is None:
            tried = " or ".join(map(str, folders))
            _say(f"no calibration can be kept in {tried}: {INSTEAD}; XDG_CACHE_HOME names a folder")
            return None
        with _alone() as alone:
            if not alone:
                _say(f"another process has measured this CPU for {PATIENCE:g} s: {INSTEAD}")
                return None
            outcome = _read_any(files, facts) or _measured(file, facts, measure)
    if isinstance(outcome, Failure):
        again = time.strftime("%H:%M", time.localtime(outcome.at + RETRY))
        when = f"tried again after {again}, or when {outcome.file} is deleted"
        _say(f"this CPU could not be measured ({outcome.reason}): {INSTEAD}; {when}")
        return None
    return outcome


class Failure(NamedTuple):
    """A measurement that failed, and when by the clock of the machine."""

    reason: str
    at: float  # seconds since 1970
    file: Path


def cache_folders() -> list[Path]:
    """Folders to keep calibrations in: the user's cache, and a private one that lasts until the
    next boot, for where the first cannot be written."""
    folders = [folder] if (folder := user_cache()).is_absolute() else []
    with suppress(OSError):
        folders.append(private_folder())
    return folders


def _takes_files(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _read_any(files: Sequence[Path], facts: Facts) -> Calibration | Failure | None:
    """Reads the first calibration, or failure of the last hour, skipping damaged files and those of
    other facts."""
    for file in files:
        with suppress(OSError, KeyError, TypeError, ValueError):
            data = json.loads(read_untrusted(file))
            if data["facts"] != facts:
                continue
            if "failed" not in data:
                return Calibration.of(data)
            failed = Failure(str(data["failed"]["reason"]), float(data["failed"]["at"]), file)
            if 0.0 <= time.time() - failed.at < RETRY:
                return failed
    return None


def _measured(file: Path, facts: Facts, measure: Measure) -> Calibration | Failure:
    """Measures this machine and keeps the result in the file."""
    ranks = f"{facts['ranks']} rank{'s' if facts['ranks'] > 1 else ''}"
    cost = f"at most {BUDGET:g} s of processor time"
    _say(f"measuring this CPU for {ranks} of {facts['precision']}, once: {cost}")
    outcome: Calibration | Failure
    try:
        data: dict[str, Any] = json.loads(measure(facts))
        outcome = Calibration.of(data)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        outcome = Failure(str(error), time.time(), file)
        data = {"failed": {"reason": outcome.reason, "at": outcome.at}}
    try:
        with atomic_file(file) as path:
            path.write_text(json.dumps({"facts": facts, **data}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        _say(f"what was measured is not kept: {file}: {error.strerror}")
    return outcome


@contextmanager
def _alone() -> Iterator[bool]:
    """Holds this user's lock: of two that measure at once, each would see the other's load.

    False where another process holds it for longer than PATIENCE. The system frees it when its
    holder dies. A machine on which no such file can be made has no lock.
    """
    if (file := _lock_file()) is None:
        yield True
        return
    try:
        yield _locked(file)
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    deadline = 0.0
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if not deadline:
            _say("another process measures this CPU: waiting for it (--no-calibrate does not)")
            deadline = time.monotonic() + PATIENCE
        elif time.monotonic() > deadline:
            return False
        time.sleep(POLL)


def _lock_file() -> int | None:
    """Opens a lock file of this user's on this machine, which no other user can hold."""
    with suppress(OSError):
        path = private_folder() / "calibration.lock"
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    return None


def _measure(facts: Facts) -> str:
    """Runs `python -m mtcli.core.plan.measure_cpu` and returns its stdout. Raises RuntimeError.

    It ends when this process does: that holds the one write end of its stdin.
    """
    import subprocess  # not above: a plan that reads what is kept starts sooner
    from socket import if_nameindex

    threads = max(1, facts["cores"] // facts["ranks"])
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",  # a thread that waits takes no processor time
        # the interface that no other machine reaches: lo, or lo0
        "GLOO_SOCKET_IFNAME": next((n for _, n in if_nameindex() if n.startswith("lo")), "lo"),
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
    """The reason why a measurement ended with an exit code: its last words, where it has any."""
    if code in (-signal.SIGPROF, -signal.SIGXCPU):
        return f"{BUDGET:g} s of processor time were not enough"
    if code < 0:
        return f"it was killed by {signal.Signals(-code).name}"
    lines = [line for line in errors.splitlines() if line.strip()]
    last = "".join(letter for letter in lines[-1] if letter.isprintable()) if lines else ""
    return last[:MOST_LETTERS] or f"it ended with exit code {code}"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
