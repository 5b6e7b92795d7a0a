"""Checks the files of a checkpoint: hashes, sizes and headers.

Ranks share the files, so that each file is read by one rank.
"""

from collections.abc import Iterable

import numpy as np

from mtcli.core.checkpoint.blocks import verify_file
from mtcli.core.checkpoint.manifest import is_optimizer
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.safetensors_file import StoredBox, damaged
from mtcli.core.checkpoint.shard_index import StoredShards


def verify_hashes(checkpoint: Checkpoint, rank: int = 0, world: int = 1) -> None:
    """Checks the hashes of a rank's share of the files. Hugging Face folders have none.

    Raises MtcliError that names the first damaged file.
    """
    for name in _share(checkpoint, rank, world):
        verify_file(checkpoint.folder / name, checkpoint.files[name])


def verify_weights(checkpoint: Checkpoint, rank: int = 0, world: int = 1) -> None:
    """Checks the hashes of the blocks that hold weights; see `verify_hashes`."""
    if checkpoint.adapters is not None:
        verify_weights(checkpoint.adapters.own, rank, world)
        return verify_weights(checkpoint.adapters.base, rank, world)
    blocks: dict[str, set[int]] = {}
    for tensor, box in _boxes_in(checkpoint, rank, world):
        of_file, size = blocks.setdefault(box.file, set()), checkpoint.files[box.file].block_bytes
        entry = checkpoint.entry(box)
        if entry.bytes and not is_optimizer(tensor):
            last = (entry.offset + entry.bytes - 1) // size
            of_file.update(range(entry.offset // size, last + 1))
    for name in _share(checkpoint, rank, world):
        verify_file(checkpoint.folder / name, checkpoint.files[name], blocks.get(name))


def check_sizes(checkpoint: Checkpoint, rank: int = 0, world: int = 1) -> None:
    """Raises MtcliError that names the first file of a rank's share that is missing or has another
    size."""
    for name in _share(checkpoint, rank, world):
        path, record = checkpoint.folder / name, checkpoint.files[name]
        try:
            size = path.stat().st_size
        except OSError as error:
            raise damaged(path, f"it cannot be opened ({error.strerror})") from None
        if size != record.bytes:
            raise damaged(path, f"it has {size} bytes and the manifest says {record.bytes}")


def check_headers(checkpoint: Checkpoint, rank: int = 0, world: int = 1) -> None:
    """Raises MtcliError where a header, in a rank's share of the files, lacks a tensor with the
    expected dtype and shape."""
    for _, box in _boxes_in(checkpoint, rank, world):
        checkpoint.entry(box)


def _share(checkpoint: Checkpoint, rank: int, world: int) -> list[str]:
    """Selects the files that a rank checks: its own, where the layout is the one that wrote
    them."""
    return list(checkpoint.files)[rank::world]


def _boxes_in(checkpoint: Checkpoint, rank: int, world: int) -> Iterable[tuple[str, StoredBox]]:
    """Yields tensors and their boxes in a rank's share of the files."""
    share = set(_share(checkpoint, rank, world))
    chosen = np.array([name in share for name in checkpoint.files])  # as tables count them
    for name, stored in checkpoint.tensors.items():
        if isinstance(stored.boxes, StoredShards):
            yield from ((name, box) for box in stored.boxes.in_files(chosen))
