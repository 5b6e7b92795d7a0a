"""C8 and C9: checkpoints saved, loaded cold and resharded, beside the disk and the usual libraries.

The same float32 tensors [1024, 4096] everywhere. Save is timed to the last fsync; cold loads follow
a request to the kernel to forget the files, and end with every tensor in new memory. Contenders run
in turn, --repeats times, another one first each time, and every loaded tensor is compared first:
  raw           O_DIRECT in blocks of 16 MiB, no format: the disk
  mtcli         store.save (with its hashes) and open_checkpoint(...).read
  mtcli+hash    as mtcli, after verify_hashes (a resume)
  safetensors, torch.save
  DCP           torch.distributed.checkpoint in one process as it comes, which saves by one thread
  DCP 2 threads the same with two
Training stands still (the stall) until an asynchronous save returns, which is written to its end
before the next: mtcli's snapshot, and DCP's async_save with a stager that keeps its memory. The
first of each, in new memory, is told apart.
Resharding is 2 ranks' Shard(0) read as Shard(1) by 4 ranks, each a process: DCP with DTensors, and
ours by boxes.

    python benchmarks/bench_checkpoint.py [--gib 0.5] [--repeats 5] [--folder DIR] [--json FILE]
"""

import mmap
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from arguments import Arguments, write_rows
from progress import each, in_turn, say
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard as DtensorShard
from torch.distributed.tensor import distribute_tensor, empty

from mtcli.core.checkpoint.async_save import Snapshot
from mtcli.core.checkpoint.integrity import verify_hashes
from mtcli.core.checkpoint.opening import open_checkpoint
from mtcli.core.checkpoint.store import Shard, save
from mtcli.core.config.loading import dump_toml
from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.sharding import Box
from mtcli.core.parallel.groups import world_axis
from mtcli.core.parallel.tree import ALONE, make_tree
from mtcli.core.runtime.health.flight_recorder import FlightRecorder

SHAPE = (1024, 4096)  # 16 MiB
BLOCK = 16 << 20
RANDOM = np.random.default_rng(0).bytes(BLOCK)
MODEL = ModelConfig(num_layers=1, hidden_size=8, num_heads=1, vocab_size=8, max_seq_len=8)
CONFIG = dump_toml(RunConfig(model=MODEL))
ABOUT = {"extra": {}, "config_toml": CONFIG, "tokenizer": None, "keep": 0}


def main():
    arguments = parse()
    tensors = make_tensors(arguments.gib)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        rows = {
            "save": measure("save", SAVERS, tensors, root, arguments.repeats),
            "load cold": measure("load", LOADERS, tensors, root, arguments.repeats),
            "stall": stalls(tensors, root / "stall", arguments.repeats),
            "reshard": reshard(root / "reshard", arguments),
        }
    size = sum(t.nbytes for t in tensors.values())
    show_stalls(rows["stall"], size)
    for name, times in rows.items():
        if name != "stall":
            show(name, times, size)
    write_rows(arguments.json, rows)


def parse():
    parser = Arguments(__doc__, gib=0.01, repeats=1)
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to measure; default: the system's temporary")
    return parser.parse_args()


def make_tensors(gib):
    generator = torch.Generator().manual_seed(0)
    count = max(4, int(gib * 2**30 / BLOCK))
    return {f"layers.{i}.weight": torch.randn(SHAPE, generator=generator) for i in range(count)}


def measure(what, contenders, tensors, root, repeats):
    """Seconds of each contender, each time; a contender is (make ready, what is timed)."""
    times = {name: [] for name in contenders}
    names = list(contenders)
    turns = [names[turn % len(names) :] + names[: turn % len(names)] for turn in range(repeats)]
    for name in each(sum(turns, [])):
        ready, timed = contenders[name]
        state, found = ready(root, tensors), None
        touch_memory(tensors)
        start = perf_counter()
        found = timed(state, tensors)
        times[name].append(perf_counter() - start)
        say(f"{what:8}{name:14}{times[name][-1]:8.2f} s")
        if len(times[name]) == 1 and found is not None:
            assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items()), name
    return times


def touch_memory(tensors):
    """Makes a virtual machine's host give this one its free memory back, before it is timed."""
    size = sum(t.nbytes for t in tensors.values())
    np.ones(2 * size, dtype=np.uint8)  # page cache and tensors


def show(title, times, size):
    disk = next((times[name] for name in ("raw", "DCP") if name in times), times["mtcli"])
    print(f"\n{title}: {size / 1e9:.2f} GB, beside {'raw' if 'raw' in times else 'DCP'}")
    print(f"{'':14}{'min s':>8}{'median':>8}{'GB/s':>7}{'of mins':>9}{'medians':>9}")
    for name, found in times.items():
        mins, medians = min(disk) / min(found), median(disk) / median(found)
        print(
            f"{name:14}{min(found):8.2f}{median(found):8.2f}{size / min(found) / 1e9:7.2f}"
            f"{mins:9.2f}{medians:9.2f}"
        )


def fresh(root, _):
    """An empty folder, with nothing left for the disk to write."""
    folder = root / "save"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.sync()
    return folder


def synced(path):
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def save_raw(folder, tensors):
    file = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    block = mmap.mmap(-1, BLOCK)
    block.write(RANDOM)  # memory that nobody wrote to is one page of zeros
    for _ in range(sum(t.nbytes for t in tensors.values()) // BLOCK):
        os.write(file, block)
    os.fsync(file)
    os.close(file)


def save_ours(folder, tensors):
    shards = [Shard(name, t, (0, 0), SHAPE) for name, t in tensors.items()]
    save(folder / "ours", 1, shards, ranks=ALONE, **ABOUT)


def save_safetensors(folder, tensors):
    save_file(tensors, folder / "st")
    synced(folder / "st")


def save_torch(folder, tensors):
    torch.save(tensors, folder / "pt")
    synced(folder / "pt")


def save_dcp(folder, tensors, threads=1):
    writer = FileSystemWriter(folder / "dcp", thread_count=threads)
    dcp.save(tensors, storage_writer=writer, no_dist=True)


def cold(saver, name):
    """Saves once, and then makes the kernel forget the files before each load."""

    def ready(root, tensors):
        folder = root / "load"
        if not (folder / name).exists():
            folder.mkdir(exist_ok=True)
            saver(folder, tensors)
        forget(folder / name)
        return folder / name

    return ready


def forget(folder):
    os.sync()
    for path in [folder, *folder.rglob("*")]:
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load_raw(path, tensors):
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    block = mmap.mmap(-1, BLOCK)
    while os.readv(file, [block]):
        pass
    os.close(file)


def load_ours(folder, tensors):
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in tensors}


def load_verified(folder, tensors):
    verify_hashes(open_checkpoint(folder))
    return load_ours(folder, tensors)


def load_safetensors(path, tensors):
    return {name: tensor.clone() for name, tensor in load_file(path).items()}  # read the mapping


def load_dcp(folder, tensors):
    state = {name: torch.empty(SHAPE) for name in tensors}
    dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


SAVERS = {
    "raw": (fresh, save_raw),
    "mtcli": (fresh, save_ours),
    "safetensors": (fresh, save_safetensors),
    "torch.save": (fresh, save_torch),
    "DCP": (fresh, save_dcp),
    "DCP 2 threads": (fresh, partial(save_dcp, threads=2)),
}
LOADERS = {
    "raw": (cold(save_raw, "raw"), load_raw),
    "mtcli": (cold(save_ours, "ours"), load_ours),
    "mtcli+hash": (cold(save_ours, "ours"), load_verified),
    "safetensors": (cold(save_safetensors, "st"), load_safetensors),
    "torch.load": (cold(save_torch, "pt"), lambda path, _: torch.load(path)),
    "DCP": (cold(save_dcp, "dcp"), load_dcp),
}


def stalls(tensors, root, repeats):
    """Seconds until an asynchronous save returns, for ours and DCP in turn, first in new memory."""
    shards = [Shard(name, t, (0, 0), SHAPE) for name, t in tensors.items()]
    held, stager = Snapshot(torch.device("cpu")), DefaultStager(StagingOptions(*[False] * 4))
    times = {"mtcli": [], "DCP": []}
    for _ in each(range(repeats + 1)):
        start = perf_counter()
        taken = held.take(shards)
        times["mtcli"].append(perf_counter() - start)
        folder = root / "ours"
        save(folder, 1, taken.shards, ranks=ALONE, **ABOUT)
        start = perf_counter()
        writer = FileSystemWriter(root / "dcp", thread_count=2, overwrite=True)
        done = dcp.async_save(tensors, storage_writer=writer, async_stager=stager, no_dist=True)
        times["DCP"].append(perf_counter() - start)
        say("stall   " + "".join(f"{name:8}{s[-1]:8.3f} s " for name, s in times.items()))
        done.result()
        os.sync()
    found = open_checkpoint(root / "ours")
    assert all(torch.equal(found.read(name), tensor) for name, tensor in tensors.items())
    return times


def show_stalls(times, size):
    print(f"\nasync stall, s/GB of {size / 1e9:.2f} GB\n{'':14}{'first':>8}{'min':>8}{'median':>8}")
    for name, (first, *later) in times.items():
        row = [seconds / size * 1e9 for seconds in (first, min(later), median(later))]
        print(f"{name:14}" + "".join(f"{figure:8.3f}" for figure in row))


def reshard(root, arguments):
    """Seconds from the first rank's start to the last rank's end, for ours and DCP in turn."""
    root.mkdir()
    writers, readers = (1, 1) if arguments.tiny else (2, 4)
    spawn(writers, write_parts, root, arguments.gib)
    times = {"mtcli": []} if arguments.tiny else {"DCP": [], "mtcli": []}
    for name in in_turn(times, arguments.repeats):
        forget(root)
        times[name].append(max(spawn(readers, read_columns, root, arguments.gib, name)))
        say(f"{'reshard':8}{name:14}{times[name][-1]:8.2f} s")
    return times


def spawn(world, work, root, *rest):
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    store = tempfile.mktemp(dir=root)
    torch.multiprocessing.spawn(_rank, (world, store, work, results, root, *rest), nprocs=world)
    return [results.get() for _ in range(world)]


def _rank(rank, world, store, work, results, *rest):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results.put(work(rank, world, *rest))
    dist.destroy_process_group()


def write_parts(rank, world, root, gib):
    mesh = init_device_mesh("cpu", (world,))
    tensors = make_tensors(gib)
    cut = {name: distribute_tensor(t, mesh, [DtensorShard(0)]) for name, t in tensors.items()}
    dcp.save(cut, checkpoint_id=str(root / "dcp"))

    ranks = make_tree(world_axis(rank, world, FlightRecorder()))
    start = (rank * SHAPE[0] // world, 0)
    shards = [Shard(name, t.to_local(), start, SHAPE) for name, t in cut.items()]
    save(root / "ours", 1, shards, ranks=ranks, **ABOUT)


def read_columns(rank, world, root, gib, name):
    names = [f"layers.{i}.weight" for i in range(max(4, int(gib * 2**30 / BLOCK)))]
    mesh = init_device_mesh("cpu", (world,))
    width = SHAPE[1] // world
    dist.barrier()
    start = perf_counter()
    if name == "DCP":
        state = {n: empty(SHAPE, device_mesh=mesh, placements=[DtensorShard(1)]) for n in names}
        dcp.load(state, checkpoint_id=str(root / "dcp"))
        last = state[names[-1]].to_local()
    else:
        checkpoint = open_checkpoint(root / "ours")
        box = Box((0, rank * width), (SHAPE[0], width))
        last = {n: checkpoint.read(n, box) for n in names}[names[-1]]
    dist.barrier()
    seconds = perf_counter() - start
    expected = make_tensors(gib)[names[-1]][:, rank * width : (rank + 1) * width]
    assert torch.equal(last, expected), name
    return seconds


if __name__ == "__main__":
    main()
