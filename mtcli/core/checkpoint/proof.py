"""The proof of a conversion: the same tensors, and the same logits on seeded tokens."""

from itertools import filterfalse
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.compare import (
    first_difference,
    optimizer_kinds,
    shared_names,
    verify_hashes,
)
from mtcli.core.checkpoint.hfconfig import differing_fields
from mtcli.core.checkpoint.names import is_optimizer
from mtcli.core.checkpoint.workers import Memory, Progress
from mtcli.core.engine import Engine, open_engine
from mtcli.core.model.inputs import Cache
from mtcli.core.runtime import Runtime
from mtcli.core.spec.errors import MtcliError, failed
from mtcli.core.spec.sharding import SLAB_BYTES, slabs

SEQUENCES, TOKENS = 2, 32
ROUNDINGS = 16  # of the weights, that logits may be apart after a change of dtype


def logits_of(checkpoint: Checkpoint) -> Tensor:
    """Float32 logits [SEQUENCES, positions, vocabulary] of a checkpoint on tokens of seed 0."""
    runtime = Runtime(0, 1, 0, 1, torch.device("cpu"))
    engine = open_engine(checkpoint, (), runtime)
    count = min(TOKENS, engine.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(engine.vocab_size, (SEQUENCES, count), generator=generator)
    return torch.stack([_last_logits(engine, tokens[:, :end]) for end in _ends(count)], 1)


def logit_difference(a: Checkpoint, b: Checkpoint) -> tuple[float, float]:
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


def require_same(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, nproc: int, progress: Progress
) -> tuple[dict[str, Any], Memory]:
    """What was compared: every tensor of either, those of `a` converted to `dtype` first, and the
    memory that `nproc` processes took for it.

    Raises MtcliError (exit 1) that names the first tensor that differs, the fields by which the
    models do where no tensor does, or a damaged file of `b`.
    """
    hashing = verify_hashes(b, nproc, progress)
    difference, memory = first_difference(a, b, dtype, nproc, progress)
    sides = f"{a.folder} and {b.folder} are not the same"
    if difference is not None:
        hint = "where the second was rounded, --dtype rounds the first as well"
        raise failed(f"{sides}: {difference.name} {difference.what}", hint)
    if fields := differing_fields(a.model, b.model):
        hint = "one of the folders has the config of another model"
        raise failed(f"{sides}: their tensors are, and {', '.join(fields)}", hint)
    facts = {"tensors_equal": len(shared_names(a, b)), "optimizer": _optimizer(a, b)}
    return facts, memory.or_more(hashing)


def _optimizer(a: Checkpoint, b: Checkpoint) -> str:
    """Whether optimizer state was compared, in words."""
    with_some = [side for side in (a, b) if optimizer_kinds(side)]
    if len(with_some) == 1:
        kinds = ", ".join(optimizer_kinds(with_some[0]))
        return f"not compared: only {with_some[0].folder} has {kinds}"
    return "the same" if with_some else "none"


def require_same_logits(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, resummed: int = 0
) -> dict[str, Any]:
    """How far the logits of two folders are apart.

    Raises MtcliError (exit 1) where that is more than `tolerance` takes for rounding, and where
    logits of NaN or infinity prove nothing.
    """
    apart, largest = logit_difference(a, b)
    if not isfinite(apart):
        raise _no_logits(b if isfinite(largest) else a)
    limit = tolerance(largest, dtype, resummed)
    if apart > limit:
        message = f"the logits of {a.folder} and {b.folder} are {apart:g} apart"
        raise failed(f"{message}, and {limit:g} at most is rounding", "trust neither of them")
    return {"logits_apart": apart}


def _no_logits(checkpoint: Checkpoint) -> MtcliError:
    """The error of logits that are not finite, with the first weight that is not."""
    for name in filterfalse(is_optimizer, checkpoint.names()):
        shape, step = checkpoint.shape(name), SLAB_BYTES // checkpoint.dtype(name).itemsize
        if not all(
            bool(checkpoint.read(name, slab).isfinite().all()) for slab in slabs(shape, step)
        ):
            why = f"{name} holds NaN or infinity"
            break
    else:
        why = "its weights are finite, and overflow"
    message = f"the logits of {checkpoint.folder} are not finite and prove nothing: {why}"
    return failed(message, "`mtcli shard verify A B` compares the tensors alone, bit for bit")


def _ends(count: int) -> list[int]:
    return sorted({1, count // 2 + 1, count})


def _last_logits(engine: Engine, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return engine.next_logits(tokens, positions, Cache())
