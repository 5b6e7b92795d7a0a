"""Joins the micro-batches of an array's models; models that share a loader read it once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mtcli.core.model.inputs import Inputs, Sentences
from mtcli.core.model.rope import RotaryTable
from mtcli.core.parallel.attention_mask import Documents
from mtcli.core.training.loader import MicroBatchLoader, StepBatch


class ArrayBatch(NamedTuple):
    """This rank's part of every model's global batch."""

    load: Callable[[int], Inputs]  # gives micro-batch m of all models
    labels: list[float]  # labels with a weight, of each model's global batch
    tokens: list[float]  # without padding


class ArrayLoader:
    """The loaders of an array's models; models of the same order of data have one together."""

    def __init__(self, loaders: Sequence[MicroBatchLoader]) -> None:
        self.loaders = list(loaders)

    def step(self, step: int, scales: Sequence[float] | None) -> ArrayBatch:
        """The micro-batches of step 0, 1, ...; `scales` are those of the models' losses, or None
        where there is no backward."""
        batches: dict[int, StepBatch] = {}
        for loader in self.loaders:
            if id(loader) not in batches:
                batches[id(loader)] = loader.step(step, 1.0 if scales else 0.0)
        model_batches = [batches[id(loader)] for loader in self.loaders]

        def load(m: int) -> Inputs:
            read = {key: batch.load(m) for key, batch in batches.items()}
            inputs = stacked([read[id(loader)] for loader in self.loaders])
            if scales is None:
                return inputs
            factors = torch.tensor(scales, dtype=torch.float64, device=inputs.tokens.device)
            return replace(inputs, aux_scale=factors * inputs.aux_scale)

        return ArrayBatch(
            load,
            [batch.labels for batch in model_batches],
            [batch.tokens for batch in model_batches],
        )

    def compact(self, keep: Sequence[int]) -> None:
        """Keeps the loaders of some models."""
        loaders = [self.loaders[i] for i in keep]
        dropped = {id(loader): loader for loader in self.loaders if loader not in loaders}
        for loader in dropped.values():
            loader.close()
        self.loaders = loaders

    def close(self) -> None:
        """Ends the readers."""
        for loader in self.loaders:
            loader.close()


def stacked(parts: Sequence[Inputs]) -> Inputs:
    """Concatenates the micro-batches of B models, model after model."""
    first = parts[0]

    def joined(name: str) -> Tensor | None:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors)

    documents = [part.documents.rows for part in parts if part.documents is not None]
    tables = zip(*(part.rotations for part in parts), strict=True)
    pairs = (zip(*of_models, strict=True) for of_models in tables)
    rotations = tuple(RotaryTable(*(torch.cat(xs) for xs in pair)) for pair in pairs)
    names = ("tokens", "positions", "labels", "weights", "padding", "numbers", "token_types")
    rows: dict[str, Any] = {name: joined(name) for name in names}
    return replace(
        first,
        **rows,
        documents=Documents(torch.cat(documents)) if documents else None,
        rotations=rotations,
        sentences=_sentences(parts),
    )


def _sentences(parts: Sequence[Inputs]) -> Sentences | None:
    """Joins the sequences that B models classify, padded to equal numbers by row -1, weight 0."""
    sentences = [part.sentences for part in parts if part.sentences is not None]
    if not sentences:
        return None
    labels = max(1, *(len(one.labels) for one in sentences))
    choices = max(
        (len(one.rows) // len(one.labels) for one in sentences if len(one.labels)), default=1
    )
    tokens = parts[0].tokens.numel()

    def joined(tensors: Sequence[Tensor], size: int, filler: int) -> Tensor:
        return torch.cat([F.pad(x[:size], (0, size - len(x)), value=filler) for x in tensors])

    rows = [torch.where(x.rows < 0, -1, x.rows + b * tokens) for b, x in enumerate(sentences)]
    return Sentences(
        joined(rows, labels * choices, -1),
        joined([one.labels for one in sentences], labels, 0),
        joined([one.weights for one in sentences], labels, 0),
    )
