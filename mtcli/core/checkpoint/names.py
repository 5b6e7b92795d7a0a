"""Names inside run and checkpoint folders."""

import re
from pathlib import Path

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


def is_optimizer(name: str) -> bool:
    """Whether a tensor is optimizer state."""
    return name.startswith(OPTIMIZER)


def parameter_of(name: str) -> str:
    """The parameter that a tensor belongs to: itself, or what follows `optimizer.<kind>/`."""
    return name.partition("/")[2] if is_optimizer(name) else name
