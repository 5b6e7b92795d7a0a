"""The proof of a conversion: both sides' logits on the same seeded tokens."""

from pathlib import Path

import torch
from torch import Tensor

from mtcli.core.engine import Engine, open_model
from mtcli.core.model.inputs import Cache
from mtcli.core.runtime import Runtime

SEQUENCES, TOKENS = 2, 32
ROUNDINGS = 16  # of the weights, that logits may be apart after a change of dtype


def logits_of(folder: Path) -> Tensor:
    """Float32 logits [SEQUENCES, positions, vocabulary] of a checkpoint on tokens of seed 0."""
    runtime = Runtime(0, 1, 0, 1, torch.device("cpu"))
    engine = open_model(str(folder), (), runtime).scorer
    count = min(TOKENS, engine.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(engine.vocab_size, (SEQUENCES, count), generator=generator)
    return torch.stack([_last_logits(engine, tokens[:, :end]) for end in _ends(count)], 1)


def logit_difference(a: Path, b: Path) -> tuple[float, float]:
    """(largest difference of two checkpoints' logits, largest logit of the first)."""
    ours, theirs = logits_of(a), logits_of(b)
    return float((ours - theirs).abs().max()), float(ours.abs().max())


def tolerance(largest: float, dtype: torch.dtype | None) -> float:
    """How far logits may be apart: not at all for the same weights in the same dtype."""
    return 0.0 if dtype is None else ROUNDINGS * torch.finfo(dtype).eps * largest


def _ends(count: int) -> list[int]:
    return sorted({1, count // 2 + 1, count})


def _last_logits(engine: Engine, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return engine.next_logits(tokens, positions, Cache())
