"""What `mtcli shard` does with checkpoints that are open: convert, prove, compare, in numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from mtcli.core.checkpoint.aside import require_free
from mtcli.core.checkpoint.names import is_optimizer
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.config.errors import wrong
from mtcli.core.config.schema import ParallelConfig
from mtcli.core.convert.inspect import describe, tensor_bytes
from mtcli.core.convert.layout import output_config
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.upcycle import rounding
from mtcli.core.convert.upcycle_recipe import UpcycleRecipe
from mtcli.core.convert.verify import (
    optimizer_kinds,
    require_same,
    require_same_logits,
    verify_hashes,
)
from mtcli.core.runtime.process_pool import MemoryWatch, ProcessMemory, Progress

Facts = dict[str, Any]


class ConversionPlan(NamedTuple):
    """What a conversion will do; `nproc` processes share its files and its tensors."""

    to: str
    layout: tuple[ParallelConfig, int]
    dtype: torch.dtype | None
    max_shard_bytes: int
    verify: bool
    force: bool
    recipe: UpcycleRecipe | None
    nproc: int


def left_out(source: Checkpoint, plan: ConversionPlan) -> list[str]:
    """The optimizer state that has no place in what is written."""
    return optimizer_kinds(source) if plan.to == "hf" or plan.recipe else []


def require_target(source: Checkpoint, target: Path, plan: ConversionPlan) -> None:
    """Raises MtcliError where the folder's name is taken, or the model cannot be cut so."""
    require_free(target, plan.force)
    if plan.to == "mtcli":
        output_config(source, *plan.layout)


def convert(dense: Checkpoint, source: Checkpoint, target: Path, plan: ConversionPlan) -> Facts:
    """Writes `source` to a folder; `dense` is the same, or what it was upcycled from.

    Returns the result in numbers. Raises MtcliError where the input, the disk or a proof fails.
    """
    if dense.folder.resolve().is_relative_to(target.resolve()):
        message = f"{target} holds {dense.folder}, and would be replaced before all is proved"
        raise wrong(message, "write to another folder, and remove this one afterwards")
    start, watch = perf_counter(), MemoryWatch()
    memory = verify_hashes(dense, plan.nproc, lambda _: None)  # else damage would get new hashes
    memory = memory.or_more(_write(source, target, plan))
    after = open_checkpoint(target)
    seen = describe(after)
    facts = {name: seen[name] for name in ("format", "step", "layout", "bytes", "dtype")}
    facts["step"] = describe(dense)["step"] if facts["step"] is None else facts["step"]
    facts |= {"source": str(source.folder), "output": str(target), "dropped": left_out(dense, plan)}
    facts |= {"parameters": seen["parameters"]}
    if plan.recipe:
        sizes = {name: seen["model"][name] for name in ("num_experts", "top_k")}
        facts["upcycled"] = sizes | {"granularity": plan.recipe.granularity}
    if plan.verify:
        same, taken = _same(source, after, plan.dtype, plan.nproc)
        facts, memory = facts | same, memory.or_more(taken)
    facts |= _spent(source, memory.or_more(watch.read()))
    if plan.verify:  # whose logits take a whole model
        facts |= _logits(dense, after, plan)
    return facts | {"seconds": perf_counter() - start}


def compare(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, logits: bool, nproc: int
) -> Facts:
    """Proves that two checkpoints are the same, in numbers.

    Raises MtcliError (exit 1) that names the first tensor that differs, or a damaged file.
    """
    start, watch = perf_counter(), MemoryWatch()
    facts: Facts = {"a": str(a.folder), "b": str(b.folder)}
    memory = verify_hashes(a, nproc, lambda _: None)
    same, taken = _same(a, b, dtype, nproc)
    facts |= same | _spent(a, memory.or_more(taken).or_more(watch.read()))
    if logits:
        facts |= require_same_logits(a, b, dtype)
    return facts | {"seconds": perf_counter() - start}


def _write(source: Checkpoint, target: Path, plan: ConversionPlan) -> ProcessMemory:
    names = [name for name in source.names() if plan.to == "mtcli" or not is_optimizer(name)]
    with _bar("shard", sum(tensor_bytes(source, name) for name in names)) as progress:
        options = WriteOptions(plan.dtype, plan.force, progress, plan.nproc)
        if plan.to == "hf":
            return to_hf(source, target, plan.max_shard_bytes, options)
        return to_mtcli(source, target, *plan.layout, options)


def _same(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, nproc: int
) -> tuple[Facts, ProcessMemory]:
    with _bar("verify", sum(tensor_bytes(a, name) for name in a.names())) as progress:
        return require_same(a, b, dtype, nproc, progress)


def _logits(dense: Checkpoint, after: Checkpoint, plan: ConversionPlan) -> Facts:
    """Proves that `after` is the function of `dense`."""
    if plan.recipe is None:
        return require_same_logits(dense, after, plan.dtype)
    dtype = rounding(dense, plan.recipe, plan.dtype)
    return require_same_logits(dense, after, dtype, dense.model.num_layers)


def _spent(source: Checkpoint, memory: ProcessMemory) -> Facts:
    """The most memory that a process took, and what it is to be measured against."""
    return {
        "largest_tensor_bytes": max(tensor_bytes(source, name) for name in source.names()),
        "peak_memory_bytes": memory.peak,
        "working_memory_bytes": memory.working,
    }


@contextmanager
def _bar(what: str, total: int) -> Iterator[Progress]:
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=None) as bar:
        yield bar.update
