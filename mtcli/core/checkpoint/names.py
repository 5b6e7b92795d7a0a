"""Names inside run and checkpoint folders."""

import re
from pathlib import Path

from mtcli.core.config.errors import wrong

CHECKPOINTS = "checkpoints"  # of a run folder
CONFIG = "config.toml"
TOKENIZER = "tokenizer"
HUGGINGFACE = "huggingface"  # the config.json that converted weights came with
PARTIAL = ".partial"  # a folder being written, or left by a run that was killed
OPTIMIZER = "optimizer."  # tensors "optimizer.<kind>/<parameter>"

_STEP = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """The folder of a step, such as step-00000100."""
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """The tensor file of a rank, such as rank-00003.safetensors."""
    return f"rank-{rank:05d}.safetensors"


def step_folders(root: Path) -> list[Path]:
    """The complete checkpoints under a folder, oldest step first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(folder.name.removeprefix("step-"))


def require_inside(folder: Path, path: Path) -> Path:
    """`path`, a file of `folder` that is to be copied as it is.

    Raises MtcliError where a link leads it out of the folder: a checkpoint from elsewhere could
    else have any file of this machine copied into what its user publishes. Links of the Hugging
    Face cache, from snapshots/<revision>/ to blobs/, are its own.
    """
    root, real = folder.resolve(), path.resolve()
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise wrong(f"{path} is a link out of {folder}, to {real}", "copy the file in its place")
    return path


def is_optimizer(name: str) -> bool:
    """Whether a tensor is optimizer state."""
    return name.startswith(OPTIMIZER)


def parameter_of(name: str) -> str:
    """The parameter that a tensor belongs to: itself, or what follows `optimizer.<kind>/`."""
    return name.partition("/")[2] if is_optimizer(name) else name
