"""Saves a checkpoint: every rank writes the shards that it owns, and a rename makes it real.

A folder under its final name is complete: it is written aside, every file is fsynced, and the
manifest comes last. A save that fails on any rank fails on all, and leaves what was there before.
"""

import errno
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial as partial_of
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mtcli.core.checkpoint.blocks import write_bytes, write_tensors
from mtcli.core.checkpoint.folder import (
    CONFIG,
    TOKENIZER,
    TOKENIZER_FILES,
    rank_file,
    step_name,
    tokenizer_files,
)
from mtcli.core.checkpoint.manifest import (
    NAME,
    Manifest,
    RankManifest,
    ShardRecord,
    TensorRecord,
    check_shards,
)
from mtcli.core.checkpoint.resharding import code_of, dtype_name
from mtcli.core.checkpoint.retention import prune
from mtcli.core.config.errors import MtcliError, failed
from mtcli.core.config.untrusted import read_untrusted
from mtcli.core.mesh.sharding import BOX_BYTES, Box, boxes_of_at_most
from mtcli.core.runtime.atomic_writes import PARTIAL, make_partial, replace_folder

Gather = Callable[[object], list[Any]]


class Shard(NamedTuple):
    """A rank's box of a global tensor of `shape`: without padding, and written by one rank only.

    `replica` is the data-parallel replica that has these elements, or None where all have them.
    The tensor may be on the meta device, where its elements are made as they are written.
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
    rank: int,
    gather: Gather,
    progress: Callable[[], None] = lambda: None,
    extra: dict[str, Any],
    config_toml: str,
    tokenizer: Path | None,
    attached: Mapping[str, Path] | None = None,
    keep: int,
    keep_every: int = 0,
    replicas: int = 1,
    warn: Callable[[str], None] = lambda text: None,
) -> Path:
    """Writes root/step-<step> from all ranks together and returns it; every rank calls it.

    `gather` returns every rank's JSON on every rank, in rank order, and is a barrier. `progress` is
    called as the save goes on. `extra` is JSON. Then the newest `keep` checkpoints stay (0: all),
    and those of multiples of `keep_every`. `attached` are further files to copy, by their names in
    the folder. Tensors whose shards name a replica are to be given for
    each of `replicas`. `warn` is told of what cannot be removed.

    Raises MtcliError (exit 1) on every rank where any could not write; the checkpoints that were
    there remain.
    """
    partial, final = root / (step_name(step) + PARTIAL), root / step_name(step)

    def prepare() -> None:
        for stale in root.glob(f"step-*{PARTIAL}"):  # of runs that were killed
            shutil.rmtree(stale, ignore_errors=True)
        make_partial(partial, needed)

    def write() -> dict[str, Any]:
        try:
            read = partial_of(elements, progress=progress)
            return write_shards(partial, rank, shards, read).model_dump(mode="json")
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            message = f"{error.filename or root}: {error.strerror}: the checkpoint takes {needed}"
            raise failed(f"{message} bytes and {shutil.disk_usage(root).free} are free") from None

    def finish() -> None:
        files = tokenizer_files(tokenizer, names=TOKENIZER_FILES)
        copied = {f"{TOKENIZER}/{name}": path for name, path in files.items()}
        about = {"step": step, "extra": extra, "replicas": replicas}
        commit(partial, written, about, config_toml, copied | dict(attached or {}))
        replace_folder(partial, final)

    needed = sum(gather(sum(shard.tensor.nbytes for shard in shards)))
    try:
        together(gather, rank == 0, prepare)
        written = [RankManifest.model_validate(part) for part in together(gather, True, write)]
        together(gather, rank == 0, finish)
    except MtcliError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if rank == 0:
        prune(root, keep, keep_every, final, warn)
    gather(None)
    return final


def elements(shard: Shard, progress: Callable[[], None] = lambda: None) -> Iterator[Tensor]:
    """Yields the elements of a shard by boxes of at most BOX_BYTES, after each of which `progress`
    is called."""
    most = BOX_BYTES // shard.tensor.element_size()
    for box in boxes_of_at_most(tuple(shard.tensor.shape), most):
        yield shard.tensor[box.slices]
        progress()


def write_shards(
    folder: Path,
    rank: int,
    shards: list[Shard],
    read: Callable[[Shard], Iterable[Tensor]] = elements,
) -> RankManifest:
    """Writes a rank's file in `folder`, and none where the rank owns nothing.

    `read` gives consecutive runs of a shard's elements.
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
    return RankManifest(files={file: write_tensors(folder / file, plan, runs, {})}, tensors=tensors)


def commit(
    partial: Path,
    written: list[RankManifest],
    about: dict[str, Any],
    config_toml: str,
    attached: dict[str, Path],
) -> None:
    """Adds the small files and, last, the manifest to a folder that holds the ranks' files.

    `about` are the manifest's step, extra and, where they differ, number of replicas; `attached`
    maps names in the folder to files that are copied.
    """
    files = {name: record for part in written for name, record in part.files.items()}
    files[CONFIG] = write_bytes(partial / CONFIG, config_toml.encode())
    for name, source in sorted(attached.items()):
        (partial / name).parent.mkdir(exist_ok=True)
        files[name] = write_bytes(partial / name, read_untrusted(source))
    tensors: dict[str, TensorRecord] = {}
    for name, record in (item for part in written for item in part.tensors.items()):
        known = tensors.setdefault(name, record.model_copy(update={"shards": []}))
        kind, before = (record.dtype, record.shape), (known.dtype, known.shape)
        if kind != before:
            raise failed(f"{name} is {kind} on one rank and {before} before")
        known.shards.extend(record.shards)
    version = 3 if about.get("replicas", 1) == 1 else 4
    manifest = Manifest(version=version, world=len(written), tensors=tensors, files=files, **about)
    check_shards(partial / NAME, manifest)
    write_bytes(partial / NAME, manifest.to_bytes())


def together(gather: Gather, is_worker: bool, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on each rank that is a worker, and returns the results in rank order.

    Raises MtcliError (exit 1) on every rank where it failed on any, with that one's reason.
    """
    result, fault = None, ""
    if is_worker:
        try:
            result = work()
        except MtcliError as error:
            fault = error.problems[0].message
        except OSError as error:
            fault = f"{error.filename or 'writing'}: {error.strerror or error}"
        except Exception as error:  # any: the other ranks wait in gather and must be told
            fault = f"{type(error).__name__}: {error}"
    answers = gather((result, fault))
    faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(answers) if fault]
    if faults:
        hint = "the checkpoints saved before are whole; free some space and --resume"
        raise failed(f"the checkpoint was not saved ({'; '.join(faults)})", hint)
    return [result for result, _ in answers]
