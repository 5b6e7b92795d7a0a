"""The proof of a conversion: the same tensors, and the same logits on seeded tokens."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.compare import differences, shared_names
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.engine import Engine, open_engine
from mtcli.core.model.inputs import Cache
from mtcli.core.runtime import Runtime
from mtcli.core.spec.errors import failed

SEQUENCES, TOKENS = 2, 32
ROUNDINGS = 16  # of the weights, that logits may be apart after a change of dtype


def logits_of(folder: Path) -> Tensor:
    """Float32 logits [SEQUENCES, positions, vocabulary] of a checkpoint on tokens of seed 0."""
    runtime = Runtime(0, 1, 0, 1, torch.device("cpu"))
    engine = open_engine(open_checkpoint(folder), (), runtime)
    count = min(TOKENS, engine.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(engine.vocab_size, (SEQUENCES, count), generator=generator)
    return torch.stack([_last_logits(engine, tokens[:, :end]) for end in _ends(count)], 1)


def logit_difference(a: Path, b: Path) -> tuple[float, float]:
    """(largest difference of two checkpoints' logits, largest logit of the first)."""
    ours, theirs = logits_of(a), logits_of(b)
    return float((ours - theirs).abs().max()), float(ours.abs().max())


def tolerance(largest: float, dtype: torch.dtype | None, resummed: int = 0) -> float:
    """How far logits may be apart: not at all for the same weights in the same dtype.

    `dtype` is the one that weights were rounded to; `resummed` is the number of layers that add up
    their MLP in another order, in float32.
    """
    weights = 0.0 if dtype is None else torch.finfo(dtype).eps
    return ROUNDINGS * max(weights, resummed * torch.finfo(torch.float32).eps) * largest


def require_same(a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None) -> dict[str, Any]:
    """What was compared: every tensor of either, those of `a` converted to `dtype` first.

    Raises MtcliError (exit 1) that names the first tensor that differs, or a damaged file of `b`.
    """
    b.verify_hashes()
    difference = next(differences(a, b, dtype), None)
    if difference is not None:
        message = f"{difference.name} {difference.what}"
        raise failed(f"{a.folder} and {b.folder} are not the same: {message}")
    return {"tensors_equal": len(shared_names(a, b))}


def require_same_logits(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, resummed: int = 0
) -> dict[str, Any]:
    """How far the logits of two folders are apart.

    Raises MtcliError (exit 1) where that is more than `tolerance` takes for rounding.
    """
    apart, largest = logit_difference(a.folder, b.folder)
    limit = tolerance(largest, dtype, resummed)
    if not apart <= limit:  # nor where it is NaN
        message = f"the logits of {a.folder} and {b.folder} are {apart:g} apart"
        raise failed(f"{message}, and {limit:g} at most is rounding")
    return {"logits_apart": apart}


def _ends(count: int) -> list[int]:
    return sorted({1, count // 2 + 1, count})


def _last_logits(engine: Engine, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return engine.next_logits(tokens, positions, Cache())
