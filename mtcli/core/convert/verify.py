"""Verifies a conversion: the same tensors, and the same logits on seeded tokens, for checkpoints of
any layouts and formats."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import filterfalse, product
from math import inf, isfinite, nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtcli.core.checkpoint.compatibility import keeps_dtype
from mtcli.core.checkpoint.huggingface.config_json import differing_fields
from mtcli.core.checkpoint.integrity import verify_hashes
from mtcli.core.checkpoint.manifest import is_optimizer
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.resharding import dtype_name
from mtcli.core.config.errors import MtcliError, failed
from mtcli.core.config.model import CLASSIFIERS
from mtcli.core.convert.inspect import optimizer_kinds
from mtcli.core.inference.bert_heads import class_logits
from mtcli.core.inference.model import open_inference_model
from mtcli.core.mesh.sharding import BOX_BYTES, boxes_of_at_most
from mtcli.core.model.inputs import KVCache
from mtcli.core.runtime.launch import Runtime
from mtcli.core.runtime.process_pool import ProcessMemory, Progress, run_parts, shares

SEQUENCES, TOKENS = 2, 32
ROUNDINGS = 16  # of the weights, that logits may be apart after a change of dtype


class Difference(NamedTuple):
    """A tensor that differs between two checkpoints, and how."""

    name: str
    what: str


def shared_names(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Returns the tensors to compare: all of both. Optimizer state is left out where one checkpoint
    has none, or one has state of adapters and the other of weights."""
    both = all(any(map(is_optimizer, side.names())) for side in (a, b))
    names = dict.fromkeys([*a.names(), *b.names()])
    return [name for name in names if both or not is_optimizer(name)]


def differences(
    a: Checkpoint,
    b: Checkpoint,
    dtype: torch.dtype | None = None,
    names: Iterable[str] | None = None,
    progress: Progress = lambda _: None,
) -> Iterator[Difference]:
    """Yields every tensor, of all or `names`, that differs in shape, dtype or any bit, in order.

    With `dtype`, weights of `a` are first converted to it. A box of each is in memory at a time.
    """
    for name in shared_names(a, b) if names is None else names:
        if what := _difference(a, b, name, None if keeps_dtype(a, name) else dtype):
            yield Difference(name, what)
        if name in a.tensors:
            progress(a.num_bytes(name))


def first_difference(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, nproc: int, progress: Progress
) -> tuple[Difference | None, ProcessMemory]:
    """Finds the first of `differences` with `nproc` processes; returns it and their peak memory."""
    names = shared_names(a, b)
    weights = [(a if name in a.tensors else b).num_bytes(name) for name in names]
    parts = [[names[i] for i in part] for part in shares(weights, nproc)]
    firsts, memory = run_parts(partial(_first, a, b, dtype), parts, progress)
    order = {name: index for index, name in enumerate(names)}
    return min(filter(None, firsts), key=lambda first: order[first.name], default=None), memory


def _first(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, names: list[str], progress: Progress
) -> Difference | None:
    return next(differences(a, b, dtype, names, progress), None)


def verify_in_processes(a: Checkpoint, nproc: int, progress: Progress) -> ProcessMemory:
    """Runs `verify_hashes` in `nproc` processes; returns their peak memory."""
    weights = [record.bytes for _, record in sorted(a.files.items())]
    return run_parts(partial(_verify, a), shares(weights, nproc), progress)[1]


def _verify(a: Checkpoint, files: list[int], progress: Progress) -> None:
    for index in files:
        verify_hashes(a, index, len(a.files))
        progress(0)


def _difference(a: Checkpoint, b: Checkpoint, name: str, dtype: torch.dtype | None) -> str:
    """Words how a tensor differs; "" where every bit is the same."""
    for side in (a, b):
        if name not in side.tensors:
            return f"is not in {side.folder}"
    if a.shape(name) != b.shape(name):
        return f"is {list(a.shape(name))} and {list(b.shape(name))}"
    counts = [len(side.replicas_of(name)) for side in (a, b)]
    if counts[0] != counts[1]:
        return f"is of {counts[0]} and of {counts[1]} replicas"
    dtype = dtype or a.dtype(name)
    if dtype != b.dtype(name):
        return f"is {dtype_name(dtype)} and {dtype_name(b.dtype(name))}"
    unequal, largest, count = 0, -inf, 0
    boxes = list(boxes_of_at_most(a.shape(name), BOX_BYTES // dtype.itemsize))
    for replica, box in product(a.replicas_of(name), boxes):
        x, y = a.read(name, box, replica).to(dtype), b.read(name, box, replica)
        count += x.numel()
        bits = [z.reshape(-1, 1).view(torch.uint8) for z in (x, y)]  # [elements, bytes of one]
        if not torch.equal(*bits):
            unequal += int((bits[0] != bits[1]).any(1).sum())
            apart = float((x.double() - y.double()).abs().max())
            largest = nan if apart != apart or largest != largest else max(largest, apart)
    if not unequal:
        return ""
    how = f"by at most {largest:g}" if isfinite(largest) else "NaN or infinity among them"
    return f"differs in {unequal} of {count} elements, {how}"


def logits_of(checkpoint: Checkpoint) -> Tensor:
    """Computes float32 logits [SEQUENCES, positions, vocabulary] of a checkpoint on tokens of seed
    0."""
    runtime = Runtime(0, 1, 0, 1, torch.device("cpu"))
    model = open_inference_model(checkpoint, (), runtime)
    count = min(TOKENS, model.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.vocab_size, (SEQUENCES, count), generator=generator)
    ends = sorted({1, count // 2 + 1, count})

    def last_logits(tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        return model.next_logits(tokens, positions, KVCache())

    if checkpoint.model.head in CLASSIFIERS:
        return class_logits(model, tokens)
    return torch.stack([last_logits(tokens[:, :end]) for end in ends], 1)


def logit_difference(a: Checkpoint, b: Checkpoint) -> tuple[float, float]:
    """Compares two checkpoints' logits: (largest difference, largest logit of the first)."""
    ours, theirs = logits_of(a), logits_of(b)
    return float((ours - theirs).abs().max()), float(ours.abs().max())


def tolerance(largest: float, dtype: torch.dtype | None, resummed: int = 0) -> float:
    """Returns the tolerance of logits: 0 for the same weights in the same dtype.

    `dtype` is the one that weights were rounded to; `resummed` is the number of layers that sum
    their MLP in another order, in float32.
    """
    weights = 0.0 if dtype is None else torch.finfo(dtype).eps
    return ROUNDINGS * max(weights, resummed * torch.finfo(torch.float32).eps) * largest


def require_same(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, nproc: int, progress: Progress
) -> tuple[dict[str, Any], ProcessMemory]:
    """Compares every tensor of both, those of `a` converted to `dtype` first; returns what was
    compared, and the peak memory of `nproc` processes.

    Raises MtcliError (exit 1) with the first tensor that differs, with the model fields that differ
    where no tensor does, or with a damaged file of `b`.
    """
    hashing = verify_in_processes(b, nproc, progress)
    difference, memory = first_difference(a, b, dtype, nproc, progress)
    sides = f"{a.folder} and {b.folder} are not the same"
    if difference is not None:
        hint = "where the second was rounded, --dtype rounds the first as well"
        raise failed(f"{sides}: {difference.name} {difference.what}", hint)
    if fields := differing_fields(a.model, b.model):
        hint = "one of the folders has the config of another model"
        raise failed(f"{sides}: their tensors are, and {', '.join(fields)}", hint)
    facts = {"tensors_equal": len(shared_names(a, b)), "optimizer": _optimizer_compared(a, b)}
    return facts, memory.or_more(hashing)


def _optimizer_compared(a: Checkpoint, b: Checkpoint) -> str:
    """Words which of two checkpoints' optimizer state was found equal."""
    with_some = [side for side in (a, b) if optimizer_kinds(side)]
    if not with_some:
        return "none"
    if any(map(is_optimizer, shared_names(a, b))):
        return "the same"
    if len(with_some) == 2:
        of_adapters = next(side for side in with_some if side.adapters)
        return f"not compared: in {of_adapters.folder} it is of adapters"
    kinds = ", ".join(optimizer_kinds(with_some[0]))
    return f"not compared: only {with_some[0].folder} has {kinds}"


def require_same_logits(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, resummed: int = 0
) -> dict[str, Any]:
    """Compares two checkpoints' logits over all replicas; returns the largest difference.

    Raises MtcliError (exit 1) where that exceeds the `tolerance` for rounding, and for logits of
    NaN or infinity, which prove nothing.
    """
    largest_difference = 0.0
    for replica in range(a.replicas):
        ours, theirs = a.replica(replica), b.replica(replica)
        apart, largest = logit_difference(ours, theirs)
        if not isfinite(apart):
            raise _no_logits(theirs if isfinite(largest) else ours)
        limit = tolerance(largest, dtype, resummed)
        if apart > limit:
            message = f"the logits of {a.folder} and {b.folder} are {apart:g} apart"
            raise failed(f"{message}, and {limit:g} at most is rounding", "trust neither of them")
        largest_difference = max(largest_difference, apart)
    return {"logits_apart": largest_difference}


def _no_logits(checkpoint: Checkpoint) -> MtcliError:
    """Builds the error of logits that are not finite, with the first weight that is not finite."""
    for name in filterfalse(is_optimizer, checkpoint.names()):
        shape, step = checkpoint.shape(name), BOX_BYTES // checkpoint.dtype(name).itemsize
        if not all(
            bool(checkpoint.read(name, box).isfinite().all())
            for box in boxes_of_at_most(shape, step)
        ):
            why = f"{name} holds NaN or infinity"
            break
    else:
        why = "its weights are finite, and overflow"
    message = f"the logits of {checkpoint.folder} are not finite and prove nothing: {why}"
    return failed(message, "`mtcli shard verify A B` compares the tensors alone, bit for bit")
