"""Says on what rows were measured: the commit, the machine, and the versions of what ran."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGES = ("torch", "numpy", "triton", "transformers", "peft", "lm-eval", "megatron-core")
PACKAGES += (
    "gigatoken",
    "tokenizers",
    "safetensors",
    "datasketch",
    "rensa",
    "justext",
    "datatrove",
)
PACKAGES += ("ray", "apricot-select", "submodlib-py", "scikit-learn", "optuna")
PACKAGES += ("ctranslate2",)


def commit(checkout: Path = HERE) -> str | None:
    """The commit of a checkout, with a plus where files differ from it; None without git."""
    describe = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    if shutil.which("git") is None:
        return None
    done = subprocess.run(describe, cwd=checkout, capture_output=True, text=True)
    return done.stdout.strip() or None


def machine() -> dict[str, Any]:
    """The processor, its cores and memory, and the GPUs."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = []
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.split("\n")
    return {
        "cpu": next(names, platform.processor() or "a CPU"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "gpus": [name for name in gpus if name],
    }


def versions() -> dict[str, str | None]:
    """Of Python, mtcli's source and every package that a script compares; None: not installed."""
    sys.path.append(str(HERE / "gpu"))
    import record

    return record.versions(PACKAGES)
