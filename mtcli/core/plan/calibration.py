"""Seconds per unit of work of this machine's processor, and all that they depend on.

`mtcli.core.plan.measure_cpu` measures it; `calibration_cache.py` has it measured once and keeps it.
"""

import platform
import re
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mtcli.core.config.schema import RunConfig
from mtcli.core.runtime.machine import cores

VERSION = 5  # of the file, of what its numbers multiply, and of how steps are made
BUDGET = 20.0  # seconds of processor time that a calibration takes at most, over all processes

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


class AttentionRow(NamedTuple):
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
    attention: tuple[AttentionRow, ...]  # ascending lengths
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
        rows = tuple(AttentionRow(*map(float, row)) for row in kept["attention"])
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
