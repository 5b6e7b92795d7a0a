"""Converts adapters to peft's folder: adapter_config.json, adapter_model.safetensors, tokenizer."""

import json
from math import prod
from pathlib import Path
from typing import Any

from mtcli.core.checkpoint.blocks import write_bytes, write_tensors
from mtcli.core.checkpoint.folder import ADAPTER_CONFIG, require_free
from mtcli.core.checkpoint.huggingface.peft import WEIGHTS, peft_boxes, peft_config
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.resharding import code_of, dtype_name
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.convert.to_mtcli import read_stored, tokenizer_of
from mtcli.core.runtime.atomic_writes import atomic_folder, partial_name
from mtcli.core.runtime.outputs import require_apart


def to_peft(source: Checkpoint, final: Path, force: bool) -> dict[str, Any]:
    """Writes the adapters of `source` as a folder that peft loads; returns the result in numbers.

    Raises MtcliError for a model that no Hugging Face family has, and where the name is taken.
    """
    assert source.adapters is not None, f"{source.folder} holds no adapters"
    adapters, base, lora = source.adapters
    boxes = list(peft_boxes(source))
    plan = [(box.key, code_of(adapters.dtype(name)), box.shape) for name, box in boxes]
    size = sum(prod(box.shape) * adapters.dtype(name).itemsize for name, box in boxes)
    require_free(final, force)
    require_apart(source.folders, [final, partial_name(final)], "DST")
    with atomic_folder(final, size) as partial:
        tensors = (
            tensor
            for name, box in boxes
            for tensor in read_stored(adapters, name, box, adapters.dtype(name), lambda _: None)
        )
        write_tensors(partial / WEIGHTS, plan, tensors, {"format": "pt"})
        text = json.dumps(peft_config(source), indent=2) + "\n"
        write_bytes(partial / ADAPTER_CONFIG, text.encode())
        for name, path in tokenizer_of(source).items():
            write_bytes(partial / name, read_untrusted(path))
    return {
        "format": "peft",
        "source": str(source.folder),
        "base": str(base.folder),
        "output": str(final),
        "rank": lora.rank,
        "adapters": len(boxes) // 2,
        "parameters": sum(prod(box.shape) for _, box in boxes),
        "bytes": size,
        "dtype": dtype_name(adapters.dtype(boxes[0][0])),
    }
