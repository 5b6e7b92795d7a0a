"""What a checkpoint is, in numbers that a user can read or a machine can parse."""

from collections import Counter
from math import prod
from typing import Any

from mtcli.core.checkpoint.dtypes import dtype_name
from mtcli.core.checkpoint.names import is_optimizer
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import count_parameters
from mtcli.core.training.state import progress_of

SHOWN = 8  # steps of skipped batches


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Format, step, layout, parameters, bytes, dtypes, optimizer, files, progress and tensors."""
    names = checkpoint.names()
    return {
        "path": str(checkpoint.folder),
        "format": checkpoint.format,
        "step": None if checkpoint.format == "hf" else checkpoint.step,  # its folders keep none
        "layout": layout_of(checkpoint),
        "model": checkpoint.model.model_dump(mode="json"),
        "parameters": count_parameters(checkpoint.model),
        "bytes": sum(tensor_bytes(checkpoint, name) for name in names),
        "dtype": _most(dtype_name(checkpoint.dtype(n)) for n in names if not is_optimizer(n)),
        "optimizer": sorted({name.partition("/")[0] for name in names if is_optimizer(name)}),
        "largest_tensor": max(names, key=lambda name: tensor_bytes(checkpoint, name)),
        "largest_tensor_bytes": max(tensor_bytes(checkpoint, name) for name in names),
        "tokenizer": checkpoint.tokenizer_folder is not None,
        "files": {name: (checkpoint.folder / name).stat().st_size for name in _files(checkpoint)},
        "progress": checkpoint.extra,
        "tensors": {
            name: {
                "shape": list(checkpoint.shape(name)),
                "dtype": dtype_name(checkpoint.dtype(name)),
                "pieces": len(checkpoint.tensors[name].regions),
            }
            for name in names
        },
    }


def progress_rows(checkpoint: Checkpoint) -> dict[str, str]:
    """The sample ledger and the random state in words; nothing where a checkpoint has none."""
    done = progress_of(checkpoint)
    rows = {"consumed samples": f"{done.consumed_samples:,}"} if checkpoint.extra else {}
    if done.random:
        rows["random state"] = f"counters of seed {done.random.seed}, step {done.random.step:,}"
    if done.samples is None:
        return rows
    rows["trained tokens"] = f"{done.samples.tokens:,}"
    for source in done.samples.sources:
        found = f"sha256 {source.sha256}" if source.sha256 else f"hash {source.sampled}"
        share = "" if source.weight is None else f"share {source.weight:g}, "
        text = f"{share}{source.samples:,} samples, epoch {source.epoch:,}, {found}"
        rows[f"data {source.prefix}"] = text
    steps = [str(batch.step) for batch in done.samples.skipped]
    some = ", ".join(steps[:SHOWN]) + (", ..." if len(steps) > SHOWN else "")
    rows["skipped batches"] = f"{len(steps):,} (steps {some})" if steps else "none"
    return rows


def layout_of(checkpoint: Checkpoint) -> dict[str, int]:
    """The world and the axes of the layout that wrote it; a Hugging Face folder has one rank."""
    if checkpoint.config is None:
        return {"world": 1}
    layout = ParallelLayout.of(checkpoint.config.parallel, checkpoint.world)
    axes = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp")
    sizes = {axis: getattr(layout, axis) for axis in axes}
    return {"world": layout.world} | sizes | {"zero": checkpoint.config.parallel.zero}


def tensor_bytes(checkpoint: Checkpoint, name: str) -> int:
    """The size of a tensor."""
    return prod(checkpoint.shape(name)) * checkpoint.dtype(name).itemsize


def _files(checkpoint: Checkpoint) -> list[str]:
    regions = (region for tensor in checkpoint.tensors.values() for region in tensor.regions)
    return sorted({region.file for region in regions})


def _most(names: Any) -> str:
    return Counter(names).most_common(1)[0][0]
