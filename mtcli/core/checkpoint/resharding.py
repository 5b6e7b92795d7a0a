"""Reads any box of a global tensor from stored boxes of any layout.

Only the needed bytes are read. The part of a stored box is a set of contiguous runs of a C-ordered
tensor. Files stay open between reads, as the kernel reads ahead in an open file and forgets the
position of a closed one (16 MiB tensors load a fifth faster).
"""

import os
from collections import OrderedDict
from itertools import product
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtcli.core.checkpoint.safetensors_file import CODES, damaged
from mtcli.core.config.errors import wrong
from mtcli.core.config.untrusted import open_untrusted
from mtcli.core.mesh.sharding import Box

# A run of at least this many bytes is read by itself; shorter ones are read with the gaps between
# them where the gaps are no longer than GAP_RATIO runs, in windows of WINDOW_BYTES.
RUN_BYTES = 256 << 10
GAP_RATIO = 16
WINDOW_BYTES = 1 << 20

# Elements are moved as integers of their size, by numpy: it knows no bfloat16, and torch's copies
# wake OpenMP threads that spin.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Numbers = NDArray[np.signedinteger]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in CODES}
DTYPE_OF_CODE = {code: DTYPES[name] for name, code in CODES.items()}  # of those that can be read
MAX_OPEN = 32  # files: far from a process's limit, and more than those that hold one tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Returns our name of a torch dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def code_of(dtype: torch.dtype) -> str:
    """Returns the safetensors code of a dtype.

    Raises MtcliError for one that checkpoints do not support.
    """
    name = dtype_name(dtype)
    if name not in CODES:
        raise wrong(f"a checkpoint cannot hold {name} tensors", f"one of {', '.join(CODES)}")
    return CODES[name]


class OpenFiles:
    """A cache of open files, at most MAX_OPEN of them, closed with this object."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, IO[bytes]] = OrderedDict()

    def get(self, path: Path) -> IO[bytes]:
        """Opens a file unless it is open. Raises MtcliError where that fails."""
        if path not in self._files:
            try:
                self._files[path] = open_untrusted(path, 0)
            except OSError as error:
                raise damaged(path, f"it cannot be opened ({error.strerror})") from None
            if len(self._files) > MAX_OPEN:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(path)
        return self._files[path]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return OpenFiles, ()  # another process opens its own

    def close(self) -> None:
        """Closes all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __del__(self) -> None:
        self.close()


def read_box(file: IO[bytes], offset: int, shape: tuple[int, ...], box: Box, into: Tensor) -> None:
    """Fills `into` [box.size] with a box of the tensor `shape` stored at a byte offset of a file.

    `into` may have any strides; its dtype is that of the stored tensor. Raises MtcliError that
    names the file where it ends early or cannot be read.
    """
    if prod(box.size) == 0:
        return
    integers = INTEGERS[into.element_size()]
    target = into.view(integers).numpy()
    direct = into.is_contiguous()
    out = target if direct else np.empty(box.size, dtype=target.dtype)
    runs = _Runs(shape, box, into.element_size())
    run_bytes, stride_bytes = runs.run * runs.item, runs.stride * runs.item
    alone = run_bytes >= RUN_BYTES or stride_bytes > (GAP_RATIO + 1) * run_bytes
    blocks = out.reshape(len(runs.starts), runs.rows, runs.run)
    for start, block in zip(runs.starts, blocks, strict=True):
        at = offset + start * runs.item
        if runs.rows == 1 or runs.run == runs.stride:
            _read_exactly(file, at, block.reshape(-1))
        elif alone:
            for row in range(runs.rows):
                _read_exactly(file, at + row * stride_bytes, block[row])
        else:
            _read_windows(file, at, runs, block)
    if not direct:
        np.copyto(target, out)


class _Runs:
    """The contiguous runs of a box: from each of `starts`, `rows` runs of `run` elements, `stride`
    apart."""

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


def _read_windows(file: IO[bytes], at: int, runs: _Runs, block: Numbers) -> None:
    rows = max(1, WINDOW_BYTES // (runs.stride * runs.item))
    window = np.empty((min(rows, runs.rows), runs.stride), dtype=block.dtype)
    for first in range(0, runs.rows, rows):
        count = min(rows, runs.rows - first)
        span = (count - 1) * runs.stride + runs.run
        _read_exactly(file, at + first * runs.stride * runs.item, window.reshape(-1)[:span])
        np.copyto(block[first : first + count], window[:count, : runs.run])


def _read_exactly(file: IO[bytes], at: int, into: Numbers) -> None:
    path, view = Path(file.name), into.view(np.uint8).data
    done = 0
    while done < len(view):
        try:
            got = os.preadv(file.fileno(), [view[done:]], at + done)
        except OSError as error:
            raise damaged(path, f"byte {at + done} cannot be read ({error.strerror})") from None
        if got == 0:
            raise damaged(path, f"it ends at byte {at + done} and {at + len(view)} are needed")
        done += got
