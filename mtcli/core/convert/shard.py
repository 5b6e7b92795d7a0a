"""Converts, verifies and compares open checkpoints for `mtcli shard`, and reports in numbers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from mtcli.core.checkpoint.adapters import with_adapters
from mtcli.core.checkpoint.folder import require_free
from mtcli.core.checkpoint.manifest import is_optimizer
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.config.schema import ParallelConfig
from mtcli.core.convert.inspect import describe, optimizer_kinds
from mtcli.core.convert.layout import output_config
from mtcli.core.convert.to_huggingface import to_hf
from mtcli.core.convert.to_mtcli import WriteOptions, to_mtcli
from mtcli.core.convert.upcycle import rounding, upcycled
from mtcli.core.convert.upcycle_recipe import UpcycleRecipe
from mtcli.core.convert.verify import require_same, require_same_logits, verify_in_processes
from mtcli.core.runtime.atomic_writes import partial_name
from mtcli.core.runtime.outputs import require_apart
from mtcli.core.runtime.process_pool import MemoryWatch, ProcessMemory, Progress

Json = dict[str, Any]


class ConversionPlan(NamedTuple):
    """The plan of a conversion; `nproc` processes share its files and tensors."""

    to: str
    layout: tuple[ParallelConfig, int]
    dtype: torch.dtype | None
    max_shard_bytes: int
    verify: bool
    force: bool
    recipe: UpcycleRecipe | None
    nproc: int
    family: str | None = None  # of a Hugging Face folder; None is the first that fits


def left_out(source: Checkpoint, plan: ConversionPlan) -> list[str]:
    """Lists the kinds of optimizer state that the conversion leaves out."""
    is_kept = plan.to == "mtcli" and not plan.recipe and not source.adapters
    return [] if is_kept else optimizer_kinds(source)


def require_target(source: Checkpoint, target: Path, plan: ConversionPlan) -> None:
    """Raises MtcliError where the folder's name is taken, or the layout cannot shard the model."""
    require_free(target, plan.force)
    if plan.to != "hf":
        output_config(_new_model(source, plan), *plan.layout)


def convert(source: Checkpoint, target: Path, plan: ConversionPlan) -> Json:
    """Writes `source`, or the model it is upcycled to, to a folder.

    Returns the result in numbers. Raises MtcliError where the input, the disk or a verification
    fails.
    """
    require_apart(source.folders, [target, partial_name(target)], "DST")  # all is proved last
    start, watch, source = perf_counter(), MemoryWatch(), replicas_kept(source, plan)
    new = _new_model(source, plan)
    memory = verify_in_processes(
        source, plan.nproc, lambda _: None
    )  # else damage would get new hashes
    memory = memory.or_more(_write(new, target, plan))
    after = open_checkpoint(target)
    described = describe(after)
    facts = {name: described[name] for name in ("format", "step", "layout", "bytes", "dtype")}
    facts["step"] = describe(source)["step"] if facts["step"] is None else facts["step"]
    facts |= {"source": str(source.folder), "output": str(target)}
    facts |= {"averaged_replicas": source.averages} if source.averages else {}
    facts |= {"dropped": left_out(source, plan), "parameters": described["parameters"]}
    if plan.recipe:
        sizes = {name: described["model"][name] for name in ("num_experts", "top_k")}
        facts["upcycled"] = sizes | {"granularity": plan.recipe.granularity}
    if plan.verify:
        same, taken = _same(new, after, plan.dtype, plan.nproc)
        facts, memory = facts | same, memory.or_more(taken)
    facts |= _spent(new, memory.or_more(watch.read()))
    if plan.verify and plan.recipe is not None:  # last: logits take memory for the model
        dtype = rounding(source, plan.recipe, plan.dtype)
        facts |= require_same_logits(source, after, dtype, source.model.num_layers)
    elif plan.verify:
        facts |= require_same_logits(source, after, plan.dtype)
    return facts | {"seconds": perf_counter() - start}


def replicas_kept(source: Checkpoint, plan: ConversionPlan) -> Checkpoint:
    """Returns the source with its replicas, where a run on the target's layout has as many or there
    is one for each data rank; else their average."""
    if source.replicas == 1 or plan.to != "mtcli" or plan.recipe is not None:
        return source.averaged()
    config = output_config(source, *plan.layout)
    parallel, world = plan.layout
    dp = world // (parallel.tp * parallel.cp * parallel.pp)
    return source if source.replicas in (dp, config.num_replicas(world)) else source.averaged()


def _new_model(source: Checkpoint, plan: ConversionPlan) -> Checkpoint:
    return source if plan.recipe is None else upcycled(source, plan.recipe)


def compare(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, logits: bool, nproc: int
) -> Json:
    """Verifies that two checkpoints are the same, in numbers; where they have different numbers of
    replicas, by their average.

    Raises MtcliError (exit 1) with the first tensor that differs, or a damaged file.
    """
    start, watch = perf_counter(), MemoryWatch()
    facts: Json = {"a": str(a.folder), "b": str(b.folder)}
    memory = verify_in_processes(a, nproc, lambda _: None)
    if a.replicas != b.replicas:
        a, b = a.averaged(), b.averaged()
        facts["averaged_replicas"] = max(a.averages, b.averages)
    if a.adapters and b.adapters:
        a, b = with_adapters(a), with_adapters(b)
    same, taken = _same(a, b, dtype, nproc)
    facts |= same | _spent(a, memory.or_more(taken).or_more(watch.read()))
    if logits:
        facts |= require_same_logits(a, b, dtype)
    return facts | {"seconds": perf_counter() - start}


def _write(source: Checkpoint, target: Path, plan: ConversionPlan) -> ProcessMemory:
    names = [name for name in source.names() if plan.to == "mtcli" or not is_optimizer(name)]
    with _bar("shard", sum(source.num_bytes(name) for name in names)) as progress:
        options = WriteOptions(plan.dtype, plan.force, progress, plan.nproc, plan.family)
        if plan.to == "hf":
            return to_hf(source, target, plan.max_shard_bytes, options)
        return to_mtcli(source, target, *plan.layout, options)


def _same(
    a: Checkpoint, b: Checkpoint, dtype: torch.dtype | None, nproc: int
) -> tuple[Json, ProcessMemory]:
    with _bar("verify", sum(map(a.num_bytes, a.names()))) as progress:
        return require_same(a, b, dtype, nproc, progress)


def _spent(source: Checkpoint, memory: ProcessMemory) -> Json:
    """Reports a process's peak memory, next to the largest tensor's bytes."""
    return {
        "largest_tensor_bytes": max(map(source.num_bytes, source.names())),
        "peak_memory_bytes": memory.peak,
        "working_memory_bytes": memory.working,
    }


@contextmanager
def _bar(what: str, total: int) -> Iterator[Progress]:
    from mtcli.core.runtime.progress import progress_bar

    with progress_bar(what, total, "B") as bar:
        yield bar.update
