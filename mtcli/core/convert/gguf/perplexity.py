"""Measures what rounding costs: a text's perplexity by a checkpoint's weights, and by a file's.

The same model computes both, so nothing but the weights differs. Rows are rounded as they are read.
The text's tokens are predicted in disjoint windows, each from the window's own beginning.
"""

from dataclasses import replace
from functools import partial
from math import exp
from pathlib import Path

import torch
from torch import Tensor

from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.config.errors import wrong
from mtcli.core.convert.gguf.write import GgufPlan, require_package
from mtcli.core.data.text_files import read_text
from mtcli.core.data.tokenize import load_tokenizer
from mtcli.core.inference.model import open_inference_model
from mtcli.core.inference.scoring import ScoreBatch
from mtcli.core.mesh.sharding import Box
from mtcli.core.runtime.launch import Runtime
from mtcli.core.runtime.progress import progress_bar

MAX_WINDOW = 1024  # inputs, or the model's context where that is shorter


def read_tokens(source: Checkpoint, path: Path) -> Tensor:
    """Reads a text as tokens [T] by a checkpoint's tokenizer. Raises MtcliError where it has none,
    or the text has fewer than two."""
    if source.tokenizer_folder is None:
        raise wrong(f"{source.folder} has no tokenizer", "leave --text out", "--text")
    tokenizer = load_tokenizer(source.tokenizer_folder)
    tokens = torch.tensor(tokenizer.encode(read_text(path, "--text")), dtype=torch.int64)
    if len(tokens) < 2:
        raise wrong(f"{path} has {len(tokens)} tokens", "give a text of 2 or more", "--text")
    return tokens


def perplexities(source: Checkpoint, plan: GgufPlan, tokens: Tensor) -> dict[str, float]:
    """Computes exp of the mean loss of tokens [T], by the weights and by those rounded to a file's
    types, in float32."""
    exact, coarse = (_perplexity(one, tokens) for one in (source, rounded(source, plan)))
    names = ("perplexity", "perplexity_rounded", "perplexity_difference")
    return dict(zip(names, (exact, coarse, coarse - exact), strict=True))


def rounded(source: Checkpoint, plan: GgufPlan) -> Checkpoint:
    """Views a checkpoint with the weights that a file of the plan holds."""
    kinds = {name: kind for tensor, kind in plan.tensors for name, _ in tensor.boxes}
    tensors = {
        name: stored._replace(
            dtype=torch.float32, computed=partial(_rounded, source, name, kinds[name])
        )
        for name, stored in source.tensors.items()
        if kinds.get(name, "F32") != "F32"
    }
    return replace(source, tensors=source.tensors | tensors)


def _rounded(source: Checkpoint, name: str, kind: str, box: Box) -> Tensor:
    """Reads a box of a parameter, rounded; blocks lie along whole rows."""
    gguf, width = require_package(), source.shape(name)[-1]
    rows = Box((*box.start[:-1], 0), (*box.size[:-1], width))
    values = source.read(name, rows).float().numpy().reshape(-1, width)
    quantised = getattr(gguf.GGMLQuantizationType, kind)
    decoded = gguf.dequantize(gguf.quantize(values, quantised), quantised).reshape(rows.size)
    return torch.from_numpy(decoded)[..., box.start[-1] : box.start[-1] + box.size[-1]]


def _perplexity(source: Checkpoint, tokens: Tensor) -> float:
    model = open_inference_model(source, (), Runtime(0, 1, 0, 1, torch.device("cpu")))
    size, loss = min(model.max_seq_len, MAX_WINDOW), 0.0
    with progress_bar("perplexity", len(tokens) - 1, " tokens") as bar:
        for start in range(0, len(tokens) - 1, size):
            window = tokens[start : start + size + 1]
            count = len(window) - 1
            slots = torch.arange(count)
            batch = ScoreBatch(window[None, :-1], slots[None], None, slots, window[1:])
            loss -= float(model.score(batch)[0].double().sum())
            bar.update(count)
    return exp(loss / (len(tokens) - 1))
