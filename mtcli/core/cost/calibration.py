"""What this machine's processor does in a training step: measured once, kept, and read again.

`mtcli.core.calibrate` trains small models of the same kind in processes of their own, as many as
the plan has ranks and the machine cores, all busy at once. What it finds is a file in the user's
cache folder, by all that it depends on: processor, cores, torch, ranks, precision, update rule and
kind of model.
"""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.errors import wrong
from mtcli.core.spec.machine import ALLOCATOR, cores
from mtcli.core.spec.outputs import whole
from mtcli.core.spec.untrusted import read_untrusted

VERSION = 4  # of the file, of what its numbers multiply, and of how steps are made
LIMIT = 180.0  # seconds after which measuring is given up
FIXED = "MTCLI_CALIBRATION"  # names a file to take instead of measuring

Facts = dict[str, Any]
LINKS = ("gather", "scatter", "reduce", "exchange", "hop")


class Amounts(NamedTuple):
    """What a part of a pass does on a rank; each field is a count that costs so many seconds."""

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


class Row(NamedTuple):
    """Seconds per score of attention at one length of rows: [n, n], and [n, n / 2] of a ring."""

    length: float
    forward: float
    backward: float
    square_forward: float
    square_backward: float
    part_forward: float
    part_backward: float


@dataclass(frozen=True)
class Calibration:
    """Seconds per unit of what a rank does, with `ranks` of them busy on this machine."""

    ranks: int
    widens: bool  # makes bfloat16's products in float32
    flops: float  # FLOP/s of a large product on one rank, by which MFU divides
    memory_bandwidth: float  # bytes/s of a copy on one rank
    forward: tuple[float, ...]  # seconds per unit of each of Amounts
    backward: tuple[float, ...]
    attention: tuple[Row, ...]  # ascending lengths
    update: tuple[float, float]  # seconds per block, and per element of norm and optimizer
    overhead: float  # seconds of a step outside of its micro-batches
    links: dict[str, tuple[float, float]]  # of LINKS: seconds, and seconds per byte that crosses

    def crowd(self, world: int) -> float:
        """Ranks of a world that share what one had to itself while it was measured."""
        return max(1.0, world / self.ranks)

    def as_json(self) -> dict[str, Any]:
        """What the file holds."""
        return asdict(self)

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Calibration":
        """What a file held. Raises KeyError, TypeError or ValueError where it is damaged."""
        kept = {field.name: data[field.name] for field in fields(cls)}
        rows = tuple(Row(*map(float, row)) for row in kept["attention"])
        forward, backward = (Amounts(*map(float, kept[way])) for way in ("forward", "backward"))
        per_block, per_element = map(float, kept["update"])
        links = {name: (float(kept["links"][name][0]), float(kept["links"][name][1]))
                 for name in LINKS}  # fmt: skip
        counts = {len(kept[way]) for way in ("forward", "backward")}
        if not rows or kept["ranks"] < 1 or counts != {len(Amounts._fields)}:
            raise ValueError("a count has no cost")
        return cls(
            int(kept["ranks"]), bool(kept["widens"]),
            float(kept["flops"]), float(kept["memory_bandwidth"]),
            forward, backward, rows, (per_block, per_element), float(kept["overhead"]), links,
        )  # fmt: skip


def facts_of(config: RunConfig, world: int) -> Facts:
    """All that the measured numbers of a config on `world` ranks depend on."""
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


def calibrated(config: RunConfig, world: int) -> Calibration | None:
    """This machine's numbers for a kind of run: those kept, or measured now, which takes seconds.

    None, with a line on stderr that says why, where they cannot be measured.
    """
    if fixed := os.environ.get(FIXED):
        return _named(fixed)
    return kept_or_measured(facts_of(config, world), _folder(), _measure)


def _named(path: str) -> Calibration:
    try:
        return Calibration.of(json.loads(read_untrusted(path)))
    except (OSError, KeyError, TypeError, ValueError):
        hint = "a file that plan has left in ~/.cache/mtcli; or leave it unset"
        raise wrong(f"{path} holds no calibration", hint, FIXED) from None


def kept_or_measured(
    facts: Facts, folder: Path, measure: Callable[[Facts], str]
) -> Calibration | None:
    """As `calibrated`: the numbers in the folder, else what `measure` prints, which is kept."""
    text = json.dumps(facts, sort_keys=True)
    file = folder / f"cpu-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    if found := _read(file, facts):
        return found
    ranks = f"{facts['ranks']} rank{'s' if facts['ranks'] > 1 else ''}"
    _say(f"measuring this CPU for {ranks} of {facts['precision']}, once: about 20 s")
    try:
        data = json.loads(measure(facts))
        found = Calibration.of(data)
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        _say(f"this CPU could not be measured ({error}); numpy's rates are used")
        return None
    _keep(file, {"facts": facts, **data})
    return found


def _read(file: Path, facts: Facts) -> Calibration | None:
    """What a file holds, where it is whole and of these facts."""
    try:
        data = json.loads(read_untrusted(file))
        return Calibration.of(data) if data["facts"] == facts else None
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _keep(file: Path, data: dict[str, Any]) -> None:
    """Writes a file; a folder that cannot be written is told of."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole(file) as path:
            path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        _say(f"what was measured is not kept: {file.parent}: {error.strerror}")


def _measure(facts: Facts) -> str:
    """What rank 0 of `python -m mtcli.core.calibrate` prints. Raises RuntimeError."""
    import subprocess  # not above: a plan that reads what is kept starts sooner
    import tempfile

    ranks = facts["ranks"]
    threads = max(1, facts["cores"] // ranks)
    settings = ALLOCATOR | os.environ | {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory(prefix="mtcli-cpu-") as folder:
        command = [sys.executable, "-m", "mtcli.core.calibrate", json.dumps(facts), folder]
        started = [
            subprocess.Popen([*command, str(rank)], env=settings, stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, text=True)
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=LIMIT)[0] for process in started]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no answer after {LIMIT:g} s") from None
        finally:
            for process in started:
                process.kill()
                process.wait()
    codes = [process.returncode for process in started]
    if any(codes):
        raise RuntimeError(f"its processes ended with {codes}")
    return said[0]


def _torch_version() -> str:
    """As torch's own file says it: importing torch, or all packages' metadata, takes longer."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    return found[1] if found else ""


def _processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mtcli"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
