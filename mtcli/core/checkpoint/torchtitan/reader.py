"""Opens torchtitan's checkpoints of Llama 3 and Qwen3 in place: folders of torch's DCP.

Their pickles are read as data, as Megatron's are (megatron/torch_save.py). The architecture is in
none of their files, so the user names it. A fused parameter is computed from their tensors when it
is read; each is a box of rows of a chunk.
"""

import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mtcli.core.checkpoint.megatron.reader import ChunkReader, read_metadata
from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.checkpoint.torchtitan.names import TitanTensor, titan_tensors
from mtcli.core.config.errors import wrong
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.untrusted import listed
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import BOX_BYTES, Box, Parameter, boxes_of_at_most

# What a run keeps besides weights: the optimizer's groups, schedules, the loader, buffers.
OF_RUN = re.compile(r"(optimizer|lr_scheduler|train_state|dataloader)\b.*|freqs_cis|rope_cache")
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = re.compile(r"step-(\d{1,15})")
HINT = "name it: --config FILE, a TOML file, a run or a preset with the [model] of these weights"


def open_titan(folder: Path, model: ModelConfig | None) -> Checkpoint:
    """Opens a checkpoint whose architecture is `model`, with Adam's moments where they are
    complete.

    Raises MtcliError where no architecture is named, or torchtitan has it not, for damaged files,
    and for tensors that are missing, unknown or of another shape.
    """
    if model is None:
        raise wrong(f"{folder} does not say its architecture", HINT)
    table, saved = titan_tensors(model), read_metadata(folder)
    prefix = "model." if "model.tok_embeddings.weight" in saved else ""
    with ExitStack() as files:
        reader = ChunkReader(folder, saved, files)
        theirs = _Theirs(reader, folder, model)
        tensors = {
            name: theirs.parameter(parameter, table[name], f"{prefix}{{}}")
            for name, parameter in parameters(model).items()
        }
        for kind in MOMENTS:
            form = f"optimizer.state.{{}}.{kind}"
            if all(form.format(one.name) in saved for parts in table.values() for one in parts):
                for name, parameter in parameters(model).items():
                    moment = theirs.parameter(parameter, table[name], form)
                    tensors[f"optimizer.{kind}/{name}"] = moment
        if model.tie_embeddings and f"{prefix}output.weight" in saved:
            theirs.require_tied(f"{prefix}tok_embeddings.weight", f"{prefix}output.weight")
    unknown = [n for n in sorted(saved.keys() - reader.used) if not OF_RUN.fullmatch(n)]
    if unknown:
        message = f"{folder} has tensors that this architecture has not: {listed(unknown)}"
        raise wrong(message, "nothing is left out silently; does --config say what it is?")
    step = STEP.fullmatch(folder.absolute().name)
    has_moments = any(name.startswith("optimizer.") for name in tensors)
    unread = any(name.startswith("optimizer.") for name in saved) and not has_moments
    return Checkpoint(
        folder=folder,
        model=model,
        step=int(step[1]) if step else 0,
        tensors=tensors,
        tokenizer_folder=None,
        headers=reader.headers,
        open_files=theirs.inner.open_files,
        format="dcp",
        unread=("the optimizer's state",) * unread,
    )


class _Theirs:
    """Their tensors, by their names, and how a parameter of ours is read from them."""

    def __init__(self, reader: ChunkReader, folder: Path, model: ModelConfig) -> None:
        self.reader = reader
        self.inner = Checkpoint(
            folder=folder, model=model, tensors={}, tokenizer_folder=None, headers=reader.headers,
            format="dcp",
        )  # fmt: skip

    def parameter(self, ours: Parameter, parts: list[TitanTensor], form: str) -> StoredTensor:
        """Maps a parameter to tensors whose names `form` completes. Raises MtcliError where one is
        missing or of another shape."""
        parts = [part._replace(name=form.format(part.name)) for part in parts]
        stored = [self._stored(part.name, part.shape, ours.name) for part in parts]
        if not parts[0].slots:
            return stored[0]
        if len(ours.shape) == 3:  # gate and up
            boxes = tuple(
                box._replace(
                    view=(1, *box.view),
                    axes=(0, *(axis + 1 for axis in box.axes)),
                    start=(part.first, *box.start),
                )
                for part, one in zip(parts, stored, strict=True)
                for box in one.boxes
            )
            return StoredTensor(stored[0].dtype, ours.shape, boxes)
        return StoredTensor(
            stored[0].dtype, ours.shape, (), partial(_heads, self.inner, parts, ours.shape[2])
        )

    def require_tied(self, embedding: str, head: str) -> None:
        """Raises MtcliError where the saved head is another matrix than the embedding."""
        shape = self.inner.shape(embedding)
        self._stored(head, shape, "embedding.weight")
        for box in boxes_of_at_most(shape, BOX_BYTES // 4):
            pair = (self.inner.read(name, box) for name in (embedding, head))
            if not torch.equal(*pair):
                message = f"{self.inner.folder}: {head} differs from the embedding it is tied to"
                raise wrong(message, "does --config say what it is? tie_embeddings is true there")

    def _stored(self, name: str, shape: tuple[int, ...], ours: str) -> StoredTensor:
        if name not in self.reader.saved:
            message = f"{self.inner.folder} has no tensor {name}, which {ours} is made of"
            raise wrong(message, "is the folder complete, and does --config say what it is?")
        stored = self.reader.unstacked(name)
        if stored.shape != shape:
            message = f"{name} is {list(stored.shape)} in {self.inner.folder}"
            raise wrong(f"{message} and {list(shape)} in the model", "is it of this model?")
        self.inner.tensors[name] = stored
        return stored


def _heads(inner: Checkpoint, parts: list[TitanTensor], dim: int, box: Box) -> Tensor:
    """Reads a box of query, key and value [K, Q + 2, D, H] from rows of their tensors."""
    out = torch.empty(box.size, dtype=inner.dtype(parts[0].name))
    (group, slot, row, column), (groups, slots, rows, columns) = box
    for g in range(groups):
        for s in range(slots):
            part = next(p for p in parts if p.first <= slot + s < p.first + p.slots)
            head = (group + g) * part.slots + slot + s - part.first
            values = inner.read(part.name, Box((head * dim, column), (dim, columns)))
            if part.turned:
                values = torch.cat([values[::2], values[1::2]])
            out[g, s] = values[row : row + rows]
    return out
