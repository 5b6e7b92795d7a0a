"""Describes a checkpoint, for `mtcli shard inspect` and for the results of conversions."""

from collections import Counter
from typing import Any

from mtcli.core.checkpoint.adapters import own_of
from mtcli.core.checkpoint.manifest import is_optimizer
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.resharding import dtype_name
from mtcli.core.checkpoint.run_progress import progress_of
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import count_adapters, count_parameters

SHOWN = 8  # steps of skipped batches


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Lists format, step, layout, sizes, dtypes, optimizer, files, progress and tensors.

    For a merged model, the tensors and files are those of its adapters.
    """
    source = own_of(checkpoint)
    names, stored = source.names(), source.tensors
    dtypes = Counter(dtype_name(source.dtype(n)) for n in names if not is_optimizer(n))
    largest = max(names, key=source.num_bytes)
    files = sorted({box.file for tensor in stored.values() for box in tensor.boxes})
    return {
        "path": str(checkpoint.folder),
        "format": checkpoint.format,
        "step": None if checkpoint.format == "hf" else checkpoint.step,  # its folders keep none
        "layout": layout_of(checkpoint),
        "replicas": checkpoint.replicas,
        "model": checkpoint.model.model_dump(mode="json"),
        "parameters": count_parameters(checkpoint.model),
        "adapters": _adapters(checkpoint),
        "bytes": sum(source.num_bytes(name) for name in names),
        "dtype": dtypes.most_common(1)[0][0],
        "optimizer": optimizer_kinds(checkpoint),
        "largest_tensor": largest,
        "largest_tensor_bytes": source.num_bytes(largest),
        "tokenizer": checkpoint.tokenizer_folder is not None,
        "files": {file: (checkpoint.folder / file).stat().st_size for file in files},
        "progress": checkpoint.extra,
        "tensors": {
            name: {
                "shape": list(source.shape(name)),
                "dtype": dtype_name(source.dtype(name)),
                "pieces": len(stored[name].boxes),
            }
            for name in names
        },
    }


def _adapters(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Describes the adapters of a merged model: their scale, targets and base."""
    if checkpoint.adapters is None:
        return None
    lora, base = checkpoint.adapters.lora, checkpoint.adapters.base
    number = count_adapters(checkpoint.model, lora)
    return lora.model_dump(mode="json") | {"parameters": number, "base": str(base.folder)}


def optimizer_kinds(checkpoint: Checkpoint) -> list[str]:
    """Lists the kinds of optimizer state in a checkpoint, such as optimizer.exp_avg; for a merged
    model, in its adapters'."""
    names = own_of(checkpoint).names()
    return sorted({name.partition("/")[0] for name in names if is_optimizer(name)})


def progress_rows(checkpoint: Checkpoint) -> dict[str, str]:
    """Lists rows of consumed samples and random state; none where a checkpoint has neither."""
    done = progress_of(checkpoint)
    rows = {"consumed samples": f"{done.consumed_samples:,}"} if checkpoint.extra else {}
    if done.random:
        rows["random state"] = f"counters of seed {done.random.seed}, step {done.random.step:,}"
    if done.samples is None:
        return rows
    rows["trained tokens"] = f"{done.samples.tokens:,}"
    for source in done.samples.sources:
        digest = f"sha256 {source.sha256}" if source.sha256 else f"hash {source.sampled}"
        share = "" if source.weight is None else f"share {source.weight:g}, "
        text = f"{share}{source.samples:,} samples, epoch {source.epoch:,}, {digest}"
        rows[f"data {source.prefix}"] = text
    steps = [str(batch.step) for batch in done.samples.skipped]
    some = ", ".join(steps[:SHOWN]) + (", ..." if len(steps) > SHOWN else "")
    rows["skipped batches"] = f"{len(steps):,} (steps {some})" if steps else "none"
    return rows


def layout_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Returns the world size and the axes of the layout that wrote a checkpoint; a Hugging Face
    folder has one rank."""
    if checkpoint.config is None:
        return {"world": 1}
    layout = ParallelLayout.of(checkpoint.config.parallel, checkpoint.world)
    axes = ("dp", "cp", "tp", "pp", "vpp", "ep", "etp")
    sizes = {axis: getattr(layout, axis) for axis in axes}
    return {"world": layout.world} | sizes | {"zero": checkpoint.config.parallel.zero}
