"""Saves a checkpoint: every rank writes the shards that it owns, and a rename completes it.

A folder with its final name is complete: files are written to a temporary folder and fsynced, the
manifest last. A save that fails on any rank fails on all, and leaves earlier checkpoints.
Descriptions of what ranks wrote are merged up a tree to rank 0.
"""

import errno
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial as partial_of
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from mtcli.core.checkpoint.blocks import write_bytes, write_tensors
from mtcli.core.checkpoint.folder import (
    CONFIG,
    MANIFEST,
    TOKENIZER,
    TOKENIZER_FILES,
    rank_file,
    step_name,
    tokenizer_files,
    unrelated_files,
)
from mtcli.core.checkpoint.manifest import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    Manifest,
    RankManifest,
    ShardRecord,
    TensorRecord,
    check_shards,
    index_of,
)
from mtcli.core.checkpoint.resharding import code_of, dtype_name
from mtcli.core.checkpoint.retention import NO_BEST, Best, prune
from mtcli.core.checkpoint.shard_index import IndexedTensor, ShardIndex, merge
from mtcli.core.config.errors import MtcliError, failed
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.mesh.sharding import BOX_BYTES, Box, boxes_of_at_most
from mtcli.core.parallel.tree import Ranks
from mtcli.core.runtime.atomic_writes import PARTIAL, make_partial, partial_name, replace_folder

NAMED = 4  # ranks whose faults an error tells; the others are counted
Result = TypeVar("Result")


class Shard(NamedTuple):
    """A rank's box of a global tensor of `shape`, without padding; no other rank writes it.

    `replica` is the data-parallel replica that has these elements, or None where all have them. The
    tensor may be on the meta device, where its elements are produced as they are written.
    """

    name: str
    tensor: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    replica: int | None = None

    @property
    def box(self) -> Box:
        """The box of the global tensor."""
        return Box(self.start, tuple(self.tensor.shape))


def save(  # noqa: PLR0913 - what a checkpoint holds, by name; a bundle would only rename it
    root: Path,
    step: int,
    shards: list[Shard],
    *,
    ranks: Ranks,
    progress: Callable[[], None] = lambda: None,
    extra: dict[str, Any],
    config_toml: str,
    tokenizer: Path | None,
    attached: Mapping[str, Path] | None = None,
    keep: int,
    keep_every: int = 0,
    best: Best = NO_BEST,
    replicas: int = 1,
    warn: Callable[[str], None] = lambda text: None,
) -> Path:
    """Writes root/step-<step> from all ranks together and returns it; every rank calls it.

    `progress` is called during the save. `extra` is JSON. Afterwards the newest `keep` checkpoints
    stay (0: all), those of multiples of `keep_every` and the best. `attached` maps names in the
    folder to further files to copy. A tensor whose shards name a replica must have shards for each
    of `replicas`. `warn` is called with what cannot be removed.

    Raises MtcliError (exit 1) on every rank where any could not write; earlier checkpoints remain.
    """
    final = root / step_name(step)
    partial = partial_name(final)

    def prepare() -> None:
        _remove_stale(root)
        make_partial(partial, final, needed)

    def write() -> dict[str, Any]:
        try:
            read = partial_of(elements, progress=progress)
            return dump_written(write_shards(partial, ranks.rank, shards, read, block_bytes))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                # A write that is refused knows no name, and a sweep saves many models.
                name = error.filename or str(partial)
                raise OSError(error.errno, error.strerror, name) from None
            message = f"{error.filename or root}: {error.strerror}: the checkpoint takes {needed}"
            raise failed(f"{message} bytes and {shutil.disk_usage(root).free} are free") from None

    def finish() -> None:
        files = tokenizer_files(tokenizer, names=TOKENIZER_FILES)
        copied = {f"{TOKENIZER}/{name}": path for name, path in files.items()}
        commit(partial, written, facts, config_toml, copied | dict(attached or {}))
        replace_folder(partial, final)

    needed, world = ranks.tell(ranks.merge([_nbytes(shards), 1], _sums))
    block_bytes = block_bytes_of(needed)
    facts = {"step": step, "world": world, "extra": extra, "replicas": replicas}
    try:
        save_together(ranks, prepare if ranks.rank == 0 else lambda: None)
        written = ranks.merge(save_together(ranks, write), merge_written)
        save_together(ranks, finish if ranks.rank == 0 else lambda: None)
    except MtcliError:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if ranks.rank == 0:
        prune(root, keep, keep_every, final, warn, best)
    ranks.tell(None)
    return final


def _remove_stale(root: Path) -> None:
    """Removes the temporary folders of killed saves, unless they hold other files."""
    for stale in root.glob(f"step-*{PARTIAL}"):
        if stale.is_dir() and not stale.is_symlink() and not unrelated_files(stale):
            shutil.rmtree(stale, ignore_errors=True)


def block_bytes_of(size: int) -> int:
    """Returns the block size of hashes for a checkpoint of `size` bytes: a power of two times
    BLOCK_BYTES, which gives at most MAX_BLOCKS, plus one per file."""
    block = BLOCK_BYTES
    while size > MAX_BLOCKS * block:
        block *= 2
    return block


def _nbytes(shards: list[Shard]) -> int:
    return sum(shard.tensor.nbytes for shard in shards)


def _sums(values: list[list[int]]) -> list[int]:
    return [sum(column) for column in zip(*values, strict=True)]


def elements(shard: Shard, progress: Callable[[], None] = lambda: None) -> Iterator[Tensor]:
    """Yields the elements of a shard by boxes of at most BOX_BYTES; calls `progress` after each."""
    most = BOX_BYTES // shard.tensor.element_size()
    for box in boxes_of_at_most(tuple(shard.tensor.shape), most):
        yield shard.tensor[box.slices]
        progress()


def write_shards(
    folder: Path,
    rank: int,
    shards: list[Shard],
    read: Callable[[Shard], Iterable[Tensor]] = elements,
    block_bytes: int = BLOCK_BYTES,
) -> RankManifest:
    """Writes a rank's file in `folder`; no file where the rank owns nothing.

    `read` yields consecutive runs of a shard's elements.
    """
    full = [shard for shard in shards if shard.tensor.numel()]
    full.sort(key=lambda shard: -shard.tensor.element_size())  # all aligned to their item's size
    if not full:
        return RankManifest()
    file, plan, count = rank_file(rank), [], Counter[str]()
    tensors: dict[str, TensorRecord] = {}
    for name, tensor, start, shape, replica in full:
        key = f"{name}#{count[name]}" if count[name] else name
        count[name] += 1
        size = tuple(tensor.shape)
        plan.append((key, code_of(tensor.dtype), size))
        record = TensorRecord(dtype=dtype_name(tensor.dtype), shape=shape, pieces=[])
        shard = ShardRecord(file=file, key=key, start=start, size=size, replica=replica)
        tensors.setdefault(name, record).shards.append(shard)
    runs = (run for shard in full for run in read(shard))
    written = write_tensors(folder / file, plan, runs, {}, block_bytes)
    return RankManifest(files={file: written}, tensors=tensors)


def commit(
    partial: Path,
    written: dict[str, Any],
    facts: dict[str, Any],
    config_toml: str,
    attached: dict[str, Path],
) -> None:
    """Adds the small files and, last, the manifest to a folder that holds the ranks' files.

    `written` is the result of `merge_written`. `facts` are the manifest's step, world, extra and,
    where they differ, number of replicas; `attached` maps names in the folder to files that are
    copied.
    """
    if fault := written["fault"]:
        raise failed(fault)
    files = dict(written["files"])
    files[CONFIG] = write_bytes(partial / CONFIG, config_toml.encode())
    for name, source in sorted(attached.items()):
        (partial / name).parent.mkdir(exist_ok=True)
        files[name] = write_bytes(partial / name, read_untrusted(source))
    manifest = Manifest.of(_index(written), files, **facts)
    check_shards(partial / MANIFEST, manifest)
    write_bytes(partial / MANIFEST, manifest.as_short().to_bytes())


def dump_written(written: RankManifest) -> dict[str, Any]:
    """Converts a rank's manifest to JSON that is small and quick to merge."""
    files = {name: record.model_dump() for name, record in written.files.items()}
    return _dump(index_of(written), files)


def merge_written(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the ranks' manifests in order; `fault` is the first contradiction."""
    files = {name: record for part in parts for name, record in part["files"].items()}
    fault = next((part["fault"] for part in parts if part["fault"]), "")
    try:
        index = merge([_index(part) for part in parts])
    except ValueError as error:
        return _dump(ShardIndex(files), files) | {"fault": fault or str(error)}
    return _dump(index, files) | {"fault": fault}


def _dump(index: ShardIndex, files: dict[str, Any]) -> dict[str, Any]:
    tensors = {
        name: (*tensor[:2], () if tensor.keys == (name,) else tensor.keys, tensor.table)
        for name, tensor in index.tensors.items()
    }
    return {
        "files": files,
        "tensors": tensors,
        "tables": index.packed_tables(),
        "fault": "",
    }


def _index(part: dict[str, Any]) -> ShardIndex:
    index = ShardIndex(part["files"], part["tables"])
    for name, (dtype, shape, keys, table) in part["tensors"].items():
        index.tensors[name] = IndexedTensor(dtype, tuple(shape), tuple(keys) or (name,), table)
    return index


def save_together(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Runs `work` on each rank and returns this rank's result.

    Raises MtcliError (exit 1) on every rank where it failed on any, with that rank's reason.
    """
    result, fault = list[Result](), ""
    try:
        result.append(work())
    except MtcliError as error:
        fault = error.problems[0].message
    except OSError as error:
        fault = f"{error.filename or 'writing'}: {error.strerror or error}"
    except Exception as error:  # any: the other ranks wait and must be told
        fault = f"{type(error).__name__}: {error}"
    report = [[f"rank {ranks.rank}: {fault}"] if fault else [], int(bool(fault))]
    faults, count = ranks.tell(ranks.merge(report, _first_faults))
    if count > len(faults):
        faults.append(f"and {count - len(faults)} more ranks")
    if faults:
        hint = "the checkpoints saved before are whole; free some space and --resume"
        raise failed(f"the checkpoint was not saved ({'; '.join(faults)})", hint)
    return result[0]


def _first_faults(values: list[Any]) -> list[Any]:
    faults = [fault for named, _ in values for fault in named]
    return [faults[:NAMED], sum(count for _, count in values)]
