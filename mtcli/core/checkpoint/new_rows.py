"""Presents a checkpoint's vocabulary tables with rows for new tokens, computed when read.

A new row is the mean of the rows of all tokens before it: embedding, head, and the head's bias.
With the mean the next token's distribution changes least: a new token's logit is the mean of the
others, which is at most their log-sum-exp minus log of their number (J. Hewitt, "Initializing New
Word Embeddings for Pretrained Language Models", 2021).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.sharding import BOX_BYTES, Box

TABLES = ("embedding.weight", "head.weight", "head.bias")  # [vocab_size, ...]


def with_new_rows(checkpoint: Checkpoint, vocab_size: int, new_ids: range) -> Checkpoint:
    """Views a checkpoint as a model of `vocab_size` ids, whose rows `new_ids`, and those that it
    does not store, are the mean of rows 0 to new_ids.start, in its dtype. Further spare rows of the
    stored tables stay as they are."""
    source, tensors = checkpoint.averaged(), dict(checkpoint.tensors)
    for name in tensors.keys() & {*TABLES}:
        rows, *columns = source.shape(name)
        mean = cache(partial(_mean, source, name, min(new_ids.start, rows)))
        read = partial(_read, source, name, new_ids, mean)
        shape = (max(rows, vocab_size), *columns)
        tensors[name] = StoredTensor(source.dtype(name), shape, (), read)
    return replace(checkpoint, model=_of_size(checkpoint, vocab_size), tensors=tensors)


def with_trained_tables(base: Checkpoint, adapters: Checkpoint) -> Checkpoint:
    """Views the base of adapters with the vocabulary tables that were trained beside them, which
    have rows for new tokens."""
    trained = adapters.averaged()
    tables = {
        name: StoredTensor(
            trained.dtype(name), trained.shape(name), (), partial(trained.read, name)
        )
        for name in base.tensors.keys() & {*TABLES} & trained.tensors.keys()
    }
    assert adapters.config is not None, "a run has a config"
    model = _of_size(base, adapters.config.model.vocab_size)
    return replace(base, model=model, tensors=base.tensors | tables)


def _of_size(checkpoint: Checkpoint, vocab_size: int) -> ModelConfig:
    return checkpoint.model.model_copy(update={"vocab_size": vocab_size})


def _read(
    source: Checkpoint, name: str, new_ids: range, mean: Callable[[], Tensor], box: Box
) -> Tensor:
    """Reads a box of a table with new rows."""
    (start, *starts), (size, *sizes) = box
    stored = max(0, min(start + size, source.shape(name)[0]) - start)
    out = torch.empty(box.size, dtype=source.dtype(name))
    if stored:
        out[:stored] = source.read(name, Box((start, *starts), (stored, *sizes)))
    ids = torch.arange(start, start + size)
    is_new = (ids >= new_ids.start) & (ids < new_ids.stop)
    is_new[stored:] = True
    if is_new.any():
        out[is_new] = mean()[Box(tuple(starts), tuple(sizes)).slices]
    return out


def _mean(source: Checkpoint, name: str, rows: int) -> Tensor:
    """Returns the mean of a table's first rows, rounded once to its dtype.

    Sums are in float64, row after row over all columns, so that no layout changes a bit.
    """
    _, *columns = source.shape(name)
    total = np.zeros(columns)
    step = max(1, BOX_BYTES // (8 * max(1, total.size)))
    for start in range(0, rows, step):
        box = Box((start, *(0 for _ in columns)), (min(step, rows - start), *columns))
        total += source.read(name, box).double().numpy().sum(axis=0)
    return torch.from_numpy(np.asarray(total / rows)).to(source.dtype(name))
