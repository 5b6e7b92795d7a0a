"""Boxes of C-ordered tensors in files: only the bytes that are needed are read."""

import os
from io import FileIO
from itertools import product
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtcli.core.checkpoint.safetensors_file import damaged
from mtcli.core.mesh.sharding import Box

# A run of at least this many bytes is read by itself; shorter ones are read with the gaps between
# them where the gaps are no longer than GAP_RATIO runs, in windows of WINDOW_BYTES.
RUN_BYTES = 256 << 10
GAP_RATIO = 16
WINDOW_BYTES = 1 << 20

# Elements are moved as integers of their size, by numpy: it knows no bfloat16, and torch's copies
# wake OpenMP threads that spin.
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Numbers = NDArray[np.signedinteger]


def intersection(a: Box, b: Box) -> Box | None:
    """The part of two rectangles of one tensor that they share, or None."""
    start = tuple(map(max, a.start, b.start))
    ends = [min(p + n, q + m) for p, n, q, m in zip(a.start, a.size, b.start, b.size, strict=True)]
    size = tuple(end - at for end, at in zip(ends, start, strict=True))
    return Box(start, size) if all(n > 0 for n in size) else None


def read_box(file: FileIO, offset: int, shape: tuple[int, ...], box: Box, into: Tensor) -> None:
    """Fills `into` [box.size] with a box of the tensor `shape` stored at a byte of a file.

    `into` may have any strides; its dtype is that of the stored tensor. Raises MtcliError that
    names the file where it ends early or cannot be read.
    """
    if prod(box.size) == 0:
        return
    integers = INTEGERS[into.element_size()]
    target = into.view(integers).numpy()
    direct = into.is_contiguous()
    out = target if direct else np.empty(box.size, dtype=target.dtype)
    _read_runs(file, offset, _Runs(shape, box, into.element_size()), out)
    if not direct:
        np.copyto(target, out)


class _Runs:
    """A box as contiguous runs: `rows` of `run` elements, `stride` apart, from each of `starts`."""

    def __init__(self, shape: tuple[int, ...], box: Box, item: int) -> None:
        dim = len(shape)  # the run spans dims dim.. of the box
        while dim > 0 and (dim == len(shape) or box.size[dim] == shape[dim]):
            dim -= 1
        self.item, self.run = item, prod(box.size[dim:])
        self.rows = box.size[dim - 1] if dim else 1
        self.stride = prod(shape[dim:])
        strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
        first = sum(a * s for a, s in zip(box.start, strides, strict=True))
        outer = [range(n) for n in box.size[: dim - 1]] if dim else []
        self.starts = [
            first + sum(i * s for i, s in zip(index, strides, strict=False))
            for index in product(*outer)
        ]


def _read_runs(file: FileIO, offset: int, runs: _Runs, out: Numbers) -> None:
    blocks = out.reshape(len(runs.starts), runs.rows, runs.run)
    run_bytes, stride_bytes = runs.run * runs.item, runs.stride * runs.item
    alone = run_bytes >= RUN_BYTES or stride_bytes > (GAP_RATIO + 1) * run_bytes
    for start, block in zip(runs.starts, blocks, strict=True):
        at = offset + start * runs.item
        if runs.rows == 1 or runs.run == runs.stride:
            _read_exactly(file, at, block.reshape(-1))
        elif alone:
            for row in range(runs.rows):
                _read_exactly(file, at + row * stride_bytes, block[row])
        else:
            _read_windows(file, at, runs, block)


def _read_windows(file: FileIO, at: int, runs: _Runs, block: Numbers) -> None:
    rows = max(1, WINDOW_BYTES // (runs.stride * runs.item))
    window = np.empty((min(rows, runs.rows), runs.stride), dtype=block.dtype)
    for first in range(0, runs.rows, rows):
        count = min(rows, runs.rows - first)
        span = (count - 1) * runs.stride + runs.run
        _read_exactly(file, at + first * runs.stride * runs.item, window.reshape(-1)[:span])
        np.copyto(block[first : first + count], window[:count, : runs.run])


def _read_exactly(file: FileIO, at: int, into: Numbers) -> None:
    path, view = Path(file.name), memoryview(into.view(np.uint8))
    done = 0
    while done < len(view):
        try:
            got = os.preadv(file.fileno(), [view[done:]], at + done)
        except OSError as error:
            raise damaged(path, f"byte {at + done} cannot be read ({error.strerror})") from None
        if got == 0:
            raise damaged(path, f"it ends at byte {at + done} and {at + len(view)} are needed")
        done += got
