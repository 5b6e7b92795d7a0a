"""Decodes weights that folders hold in float8, with a factor for each block of 128 x 128
(arXiv:2412.19437, section 3.3.1).

A weight [out, in] of E4M3 has `<name>_scale_inv` float32 [ceil(out / 128), ceil(in / 128)], which
multiply its blocks; the last ones may be smaller. What is written is bfloat16.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mtcli.core.checkpoint.huggingface.deepseek import BLOCK
from mtcli.core.checkpoint.reader import StoredTensor
from mtcli.core.checkpoint.resharding import OpenFiles, read_box
from mtcli.core.checkpoint.safetensors_file import StoredBox, TensorEntry
from mtcli.core.config.errors import wrong
from mtcli.core.mesh.sharding import Box, flat_index, intersection

SCALES = "_scale_inv"


def decode(numbers: Tensor, factors: Tensor, first: int) -> Tensor:
    """Returns the bfloat16 weights of rows `first` and after: numbers [rows, in] of float8 times
    the factors [.., ceil(in / 128)] of their blocks, from the block of row `first` on."""
    rows = (torch.arange(len(numbers)) + first) // BLOCK - first // BLOCK
    columns = torch.arange(numbers.shape[1]) // BLOCK
    return (numbers.float() * factors[rows][:, columns]).to(torch.bfloat16)


@dataclass(frozen=True)
class Float8Weight:
    """A stored weight [out, in] and its factors; the inputs are the last dimension of its view."""

    box: StoredBox
    paths: tuple[Path, Path]
    offsets: tuple[int, int]
    files: OpenFiles

    def read(self, part: Box) -> Tensor:
        """Returns a box of the view, of which the rows from its first to its last are read."""
        *leading, inputs = self.box.view
        last = tuple(a + n - 1 for a, n in zip(*part, strict=True))
        first = flat_index(part.start[:-1], tuple(leading))
        end = flat_index(last[:-1], tuple(leading)) + 1
        numbers = torch.empty(end - first, inputs, dtype=torch.uint8)
        self._fill(0, (prod(leading), inputs), Box((first, 0), (end - first, inputs)), numbers)
        blocks, width = -(-prod(leading) // BLOCK), -(-inputs // BLOCK)
        low, high = first // BLOCK, -(-end // BLOCK)
        factors = torch.empty(high - low, width)
        self._fill(1, (blocks, width), Box((low, 0), (high - low, width)), factors)
        weights = torch.zeros(prod(leading), inputs, dtype=torch.bfloat16)
        weights[first:end] = decode(numbers.view(torch.float8_e4m3fn), factors, first)
        return weights.view(self.box.view)[part.slices]

    def _fill(self, index: int, shape: tuple[int, ...], box: Box, into: Tensor) -> None:
        read_box(self.files.get(self.paths[index]), self.offsets[index], shape, box, into)


def in_blocks(
    shape: tuple[int, ...],
    stored: list[tuple[StoredBox, tuple[Path, TensorEntry], tuple[Path, TensorEntry]]],
    files: OpenFiles,
) -> StoredTensor:
    """Describes a parameter of `shape` by its weights in float8, each with that of its factors.

    Raises MtcliError where they are not of its shape.
    """
    weights = []
    for box, (path, entry), (scale_path, scales) in stored:
        expected = tuple(-(-size // BLOCK) for size in box.shape)
        if entry.shape != box.shape or (scales.code, scales.shape) != ("F32", expected):
            found = f"{list(entry.shape)} with {scales.code} {list(scales.shape)}"
            message = f"{box.key} is {found} in {path}, and {list(box.shape)} with F32"
            raise wrong(f"{message} {list(expected)} by its config.json", "is it of this model?")
        offsets = entry.offset, scales.offset
        weights.append(Float8Weight(box, (path, scale_path), offsets, files))

    def read(box: Box) -> Tensor:
        out = torch.empty(box.size, dtype=torch.bfloat16)
        for weight in weights:
            if shared := intersection(weight.box.box, box):
                part = shared.moved(tuple(-start for start in weight.box.start))
                out[shared.moved(tuple(-start for start in box.start)).slices] = weight.read(part)
        return out

    return StoredTensor(torch.bfloat16, shape, (), read)
