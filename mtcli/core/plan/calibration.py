"""Measures and caches the rates of this machine's processor, for plans of CPU runs.

`measure_cpu.py` measures them in a subprocess, as a plan imports no torch. A cache file in the
user's cache folder is named by a hash of all facts that the rates depend on.
"""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from mtcli.core.config.errors import wrong
from mtcli.core.config.schema import RunConfig
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.runtime.atomic_writes import atomic_file
from mtcli.core.runtime.launch import ALLOCATOR, cores
from mtcli.core.runtime.private_folder import adds_to_caches, private_folder, user_cache

VERSION = 9  # of the file, and of what is measured
FIXED = "MTCLI_CALIBRATION"  # names a file to take instead of measuring
MOST_LETTERS = 200  # of a reason

Facts = dict[str, Any]
Measure = Callable[[Facts], str]
Rate = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Calibration:
    """The rates of one rank's share of this machine, divided among as many ranks as it has
    cores."""

    flops: Rate  # FLOP/s of a large GEMM
    memory_bandwidth: Rate  # bytes/s that a copy reads and writes
    element: Rate  # seconds of an element of GELU
    call: Rate  # seconds of the host for an operation on a tensor that takes no time itself
    socket: Rate  # bytes/s through a socket, by one thread to another
    widens: bool  # makes bfloat16's GEMMs in float32

    def as_json(self) -> dict[str, Any]:
        """The JSON of a calibration's file."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Calibration":
        """Reads the JSON of a calibration's file. Raises ValueError where it is damaged."""
        return _CALIBRATION.validate_python(data)


_CALIBRATION = TypeAdapter(Calibration)


def calibrated(config: RunConfig, world: int) -> Calibration | None:
    """This machine's rates for a kind of run, from the cache or measured, which takes seconds.

    None, with the reason on stderr, where measuring fails. Raises MtcliError where the file that
    MTCLI_CALIBRATION names has no valid rates.
    """
    if fixed := os.environ.get(FIXED):
        try:
            return Calibration.of(json.loads(read_untrusted(fixed)))
        except (OSError, ValueError):
            hint = "a file that plan has left in ~/.cache/mtcli; or leave it unset"
            raise wrong(f"{fixed} holds no calibration", hint, FIXED) from None
    return kept_or_measured(facts_of(config, world), cache_folders(), _measure)


def facts_of(config: RunConfig, world: int) -> Facts:
    """The facts of a config on `world` ranks that the rates depend on."""
    return {
        "version": VERSION,
        "processor": _processor(),
        "cores": cores(),
        "torch": _torch_version(),
        "ranks": min(world, cores()),
        "precision": config.train.precision,
        "matmul": config.train.matmul,
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
    """The calibration cached in one of `folders`, or else parsed from the output of `measure`.

    A measured one is cached in the first folder that can be written, if any.
    """
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    files = [folder / f"cpu-{digest[:16]}.json" for folder in folders]
    for file in files:
        with suppress(OSError, KeyError, TypeError, ValueError):
            data = json.loads(read_untrusted(file))
            if data.pop("facts") == facts:
                return Calibration.of(data)
    ranks = f"{facts['ranks']} rank{'s' if facts['ranks'] > 1 else ''}"
    _say(f"measuring this CPU for {ranks} of {facts['precision']}, once: it takes seconds")
    try:
        rates = Calibration.of(json.loads(measure(facts)))
    except (OSError, RuntimeError, ValueError) as error:
        _say(f"this CPU could not be measured ({error}): a roofline takes its place")
        return None
    if adds_to_caches():
        _keep(files, {"facts": facts, **rates.as_json()})
    return rates


def _keep(files: Sequence[Path], data: dict[str, Any]) -> None:
    for file in files:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(file) as path:
                path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            return
    tried = " or ".join(str(file.parent) for file in files)
    _say(f"no calibration can be kept in {tried}; XDG_CACHE_HOME names a folder")


def cache_folders() -> list[Path]:
    """Folders for cached calibrations: the user's cache, and a private temporary one that lasts
    until the next boot, in case the first cannot be written."""
    folders = [folder] if (folder := user_cache()).is_absolute() else []
    if adds_to_caches():  # which makes the second
        with suppress(OSError):
            folders.append(private_folder())
    return folders


def _measure(facts: Facts) -> str:
    """Runs `python -m mtcli.core.plan.measure_cpu` and returns its stdout. Raises RuntimeError.

    The subprocess ends with this process, which has the only write end of its stdin.
    """
    import subprocess  # not above: a plan that reads what is kept starts sooner

    settings = {
        "OMP_NUM_THREADS": str(max(1, facts["cores"] // facts["ranks"])),
        "OMP_WAIT_POLICY": "passive",  # a thread that waits leaves its core to other programs
    }
    stdin, lifeline = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mtcli.core.plan.measure_cpu", json.dumps(facts)],
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
    """The reason why a measurement failed: the last line of its stderr, or its exit code."""
    lines = [line for line in errors.splitlines() if line.strip()]
    last = "".join(letter for letter in lines[-1] if letter.isprintable()) if lines else ""
    return last[:MOST_LETTERS] or f"it ended with exit code {code}"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
