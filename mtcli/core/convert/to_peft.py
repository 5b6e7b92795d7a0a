"""Converts adapters to peft's folder: adapter_config.json, adapter_model.safetensors, tokenizer."""

import json
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from mtcli.core.checkpoint.blocks import write_bytes, write_tensors
from mtcli.core.checkpoint.folder import ADAPTER_CONFIG, require_free
from mtcli.core.checkpoint.huggingface.peft import (
    WEIGHTS,
    peft_config,
    peft_metadata,
    peft_modules,
    peft_tensors,
    saved_of,
)
from mtcli.core.checkpoint.huggingface.peft_saved import read_saved
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.resharding import code_of, dtype_name
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.convert.to_mtcli import tokenizer_of
from mtcli.core.runtime.atomic_writes import atomic_folder, partial_name
from mtcli.core.runtime.outputs import require_apart


def to_peft(source: Checkpoint, final: Path, force: bool) -> dict[str, Any]:
    """Writes the adapters of `source` as a folder that peft loads; returns the result in numbers.

    Raises MtcliError for a model that no Hugging Face family has, and where the name is taken.
    """
    assert source.adapters is not None, f"{source.folder} holds no adapters"
    adapters, base, lora = source.adapters
    if source.config and (count := len(source.config.train.new_tokens)):
        message = f"{source.folder} has {count} new tokens, whose rows its base lacks"
        raise wrong(message, "--to hf --merge-lora writes the whole model")
    modules = peft_modules(source)
    dtype = adapters.dtype(next(name for name in adapters.names() if ".adapter." in name))
    boxes = [side[0] for module in modules for side in (module.a, module.b)]
    saved = saved_of(source)
    written = [*boxes, *(tensor.box for tensor in saved)]
    plan = [(box.key, code_of(dtype), box.shape) for box in written]
    numbers = sum(prod(box.shape) for box in written)
    size = numbers * dtype.itemsize
    require_free(final, force)
    require_apart(source.folders, [final, partial_name(final)], "DST")
    with atomic_folder(final, size) as partial:
        tensors = (
            tensor.to(dtype) for module in modules for _, tensor in peft_tensors(source, module)
        )
        of_saved = (tensor.to(dtype) for tensor in read_saved(adapters, saved))
        metadata = peft_metadata(source, modules)
        write_tensors(partial / WEIGHTS, plan, chain(tensors, of_saved), metadata)
        text = json.dumps(peft_config(source, modules), indent=2) + "\n"
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
        "parameters": numbers,
        "bytes": size,
        "dtype": dtype_name(dtype),
    }
