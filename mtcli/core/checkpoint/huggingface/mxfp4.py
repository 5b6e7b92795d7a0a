"""Decodes tensors that folders hold as MXFP4: blocks of 32 numbers of 4 bits with a common exponent
(OCP Microscaling Formats 1.0, section 5.3).

A tensor [.., n] is two of bytes: `<name>_blocks` [.., n / 32, 16], two numbers in a byte with the
first in its low bits, and `<name>_scales` [.., n / 32], exponents of 2 plus 127. A number is a sign
and one of MAGNITUDES, which bfloat16 holds exactly with any exponent. What is written is bfloat16.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mtcli.core.checkpoint.reader import StoredTensor
from mtcli.core.checkpoint.resharding import OpenFiles, read_box
from mtcli.core.checkpoint.safetensors_file import StoredBox, TensorEntry
from mtcli.core.config.errors import wrong
from mtcli.core.mesh.sharding import Box

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIGNED = (*MAGNITUDES, *(-x for x in MAGNITUDES))
PAIRS = torch.tensor([(SIGNED[byte & 15], SIGNED[byte >> 4]) for byte in range(256)])
POWERS = torch.tensor([2.0 ** (byte - 127) for byte in range(256)], dtype=torch.float64).float()


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the bfloat16 numbers [.., B * 32] of bytes [.., B, 16] and [.., B]."""
    values = PAIRS[blocks.int()].flatten(-2)
    return (values * POWERS[scales.int()][..., None]).flatten(-2).to(torch.bfloat16)


@dataclass(frozen=True)
class PackedTensor:
    """The blocks and scales of a parameter: where each is stored, and where the decoded numbers
    belong."""

    box: StoredBox
    """the decoded tensor, whose last dimension is that of blocks"""
    paths: tuple[Path, Path]
    offsets: tuple[int, int]
    files: OpenFiles

    def read(self, box: Box) -> Tensor:
        """Returns a box of the parameter, whose blocks alone are read."""
        order = self.box.order
        start, size = (tuple(numbers[d] for d in order) for numbers in box)
        first, end = start[-1] // BLOCK, -(-(start[-1] + size[-1]) // BLOCK)
        rows, at, count = self.box.view[:-1], (*start[:-1], first), (*size[:-1], end - first)
        shape = (*rows, self.box.view[-1] // BLOCK)
        blocks = self._bytes(0, (*shape, BLOCK // 2), Box((*at, 0), (*count, BLOCK // 2)))
        scales = self._bytes(1, shape, Box(at, count))
        skipped = start[-1] - first * BLOCK
        return decode(blocks, scales)[..., skipped : skipped + size[-1]].permute(self.box.axes)

    def _bytes(self, index: int, shape: tuple[int, ...], box: Box) -> Tensor:
        into = torch.empty(box.size, dtype=torch.uint8)
        read_box(self.files.get(self.paths[index]), self.offsets[index], shape, box, into)
        return into


def packed(
    shape: tuple[int, ...],
    box: StoredBox,
    entries: tuple[tuple[Path, TensorEntry], tuple[Path, TensorEntry]],
    files: OpenFiles,
) -> StoredTensor:
    """Describes a parameter of `shape` that is made of the two `entries` of a decoded tensor.

    Raises MtcliError where they are no bytes of its shape.
    """
    *rows, inner = box.shape
    scales = (*rows, -(-inner // BLOCK))
    expected = {BLOCKS: (*scales, BLOCK // 2), SCALES: scales}
    for (kind, sizes), (path, entry) in zip(expected.items(), entries, strict=True):
        if (entry.code, entry.shape) != ("U8", sizes) or inner % BLOCK:
            message = f"{box.key}{kind} is {entry.code} {list(entry.shape)} in {path}"
            hint = "is it of this model, in blocks of 32?"
            raise wrong(f"{message} and U8 {list(sizes)} by its config.json", hint)
    (path, entry), (scale_path, scale_entry) = entries
    paths, offsets = (path, scale_path), (entry.offset, scale_entry.offset)
    read = PackedTensor(box, paths, offsets, files).read
    return StoredTensor(torch.bfloat16, shape, (), read)
