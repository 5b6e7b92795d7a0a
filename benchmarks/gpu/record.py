"""The file of a measurement: on which device, with which versions, when, and its rows.

Every row is written as soon as it is measured, so that a run that is cut short keeps what it has,
and the next one goes on after it: the newest file of the same device and versions is continued.
Versions count mtcli's own source, so that no row is kept that other code would have.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from datetime import date, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ONLY_REHEARSED = "a CPU measures nothing that is asked here; add --tiny to rehearse it"
PACKAGES = ("torch", "triton", "transformers", "megatron-core", "torchtitan", "liger-kernel")
Row = dict[str, Any]


class Record:
    """A file of rows under the facts of a device; `add` writes it."""

    def __init__(self, path: Path, facts: Row, rows: list[Row]) -> None:
        self.path, self.facts, self.rows = path, facts, rows

    def add(self, row: Row) -> None:
        """Adds a row, with the time it was measured at, and writes the file."""
        self.rows.append(row | {"at": datetime.now().isoformat(timespec="seconds")})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(self.facts | {"rows": self.rows}, indent=1) + "\n")
        partial.replace(self.path)

    def drop(self, unwanted: Callable[[Row], bool]) -> None:
        """Forgets rows, in memory until the next is added."""
        self.rows = [row for row in self.rows if not unwanted(row)]

    def has(self, **key: Any) -> bool:
        """Whether there is a row with these values."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)


def open_record(folder: Path, what: str, device: str, afresh: bool = False) -> Record:
    """The newest record of this device and these versions, or one that begins today."""
    facts = {"what": what, "device": device, "versions": versions(), "date": str(date.today())}
    slug = device.replace(" ", "-")
    for path in sorted(folder.glob(f"{what}-{slug}-*.json"), reverse=True):
        known = json.loads(path.read_text())
        rows = known.pop("rows")
        if not afresh and all(known.get(k) == facts[k] for k in ("device", "versions")):
            return Record(path, known, rows)
    path, number = folder / f"{what}-{slug}-{facts['date']}.json", 2
    while path.exists():
        path = folder / f"{what}-{slug}-{facts['date']}.{number}.json"
        number += 1
    return Record(path, facts, [])


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Of Python, of mtcli's source, and of every package that is compared; None: not installed."""
    found = {name: _version(name) for name in packages}
    return {"python": platform.python_version(), "mtcli": _source(), **found}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _source() -> str:
    """The start of a digest of mtcli's source: the same files, the same code."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "mtcli").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
