"""What a checkpoint is, in numbers that a user can read or a machine can parse."""

from collections import Counter
from math import prod
from typing import Any

from mtcli.core.checkpoint.checkpoint import Checkpoint
from mtcli.core.checkpoint.dtypes import dtype_name
from mtcli.core.checkpoint.names import is_optimizer
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.model import count_parameters


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Format, step, layout, parameters, bytes, dtypes, optimizer state, files and tensors."""
    names = checkpoint.names()
    return {
        "path": str(checkpoint.folder),
        "format": "hf" if checkpoint.config is None else "mtcli",
        "step": checkpoint.step,
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
        "tensors": {
            name: {
                "shape": list(checkpoint.shape(name)),
                "dtype": dtype_name(checkpoint.dtype(name)),
                "pieces": len(checkpoint.tensors[name].regions),
            }
            for name in names
        },
    }


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
