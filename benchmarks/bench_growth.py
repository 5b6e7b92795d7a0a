"""What one rank of n does at start-up, in a save and for the watchdog, from 8 to 16,384 ranks.

No processes are started. Ranks are played one after another through mtcli's own functions, with
process groups and stores that keep in memory what is sent, for a checkpoint of Llama 3.1 405B with
AdamW in bf16 (tp 8, pp 16, the rest data parallelism with ZeRO-1). Tensors have no elements: files
are sparse, and what is left out is the reading, writing and hashing of their bytes. Counted are a
rank's opens of files, requests to the store, messages and bytes, and its processor seconds.

    python benchmarks/bench_growth.py --json benchmarks/results/growth.json \
        --plot docs/images/growth.png
"""

import gc
import json
import os
import sys
import tempfile
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from arguments import Arguments, write_rows
from progress import each, say
from torch.testing._internal.distributed.fake_pg import FakeStore

from mtcli.core.checkpoint import blocks, reader, store
from mtcli.core.checkpoint.folder import CHECKPOINTS, MANIFEST
from mtcli.core.checkpoint.manifest import FileRecord, RankManifest
from mtcli.core.checkpoint.reader import Checkpoint, StoredTensor
from mtcli.core.checkpoint.safetensors_file import CODE_BYTES, encode_header
from mtcli.core.checkpoint.store import (
    Shard,
    block_bytes_of,
    commit,
    dump_written,
    merge_written,
    write_shards,
)
from mtcli.core.config.loading import dump_toml, load_config
from mtcli.core.config.schema import RunConfig
from mtcli.core.convert.to_mtcli import rank_shards
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.parallel import collectives, tree
from mtcli.core.parallel.groups import make_groups, world_axis
from mtcli.core.runtime.attempts import Meeting
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.runtime.health.watchdog import RankStatus, values_of
from mtcli.core.training.state import starting_point

RANKS = (8, 128, 1024, 4096, 16384)
KINDS = {"": torch.bfloat16} | {
    f"optimizer.{kind}/": torch.float32 for kind in ("master", "exp_avg", "exp_avg_sq")
}
BYTES = 14  # of a parameter: its weight, master weight and moments
STEP = "step-00000001"
# What a save and a start may cost a rank, whatever the number of ranks up to 16,384.
MOST = {
    "start_seconds": 5.0,
    "save_seconds": 0.5,
    "manifest_bytes": 64e6,
    "told_bytes": 64e6,
    "received": 3 * (tree.FAN_OUT - 1),
    "sockets": 3 * (tree.FAN_OUT - 1),
    "requests": 32,
    "report_requests": 64,
}


def main() -> None:
    parser = Arguments(__doc__, ranks=[8])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--plot", help="draw them into this PNG")
    args = parser.parse_args()
    rows = []
    for world in each(args.ranks):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(play(world, Path(folder)))
        say(json.dumps(rows[-1]))
        if missed := over(rows[-1]):
            say(f"over its limit at {world} ranks: {', '.join(missed)}")
    write_rows(args.json, rows)
    if args.plot:
        draw(rows, Path(args.plot))
    if any(map(over, rows)):
        sys.exit(1)


def play(world: int, root: Path) -> dict[str, Any]:
    """The largest costs of a rank, rank 0 among them, where `world` ranks save and start again."""
    config = config_of(world, root)
    folder = root / CHECKPOINTS / STEP
    folder.mkdir(parents=True)
    saved, shards = play_save(config, world, folder)
    own, first = play_meeting(world)
    row = {"ranks": world, "boxes": min(map(len, shards.values()))} | saved
    row |= play_start(config, world, shards)
    return row | {"requests": own, "requests_0": first, "report_requests": play_report(world)}


def over(row: dict[str, Any]) -> list[str]:
    """The costs of a row that are over their limits."""
    limits = MOST | {"opens": 4 + row["boxes"]}
    return [f"{name} {row[name]} of {most}" for name, most in limits.items() if row[name] > most]


def config_of(world: int, output: Path) -> RunConfig:
    """Llama 3.1 405B on a number of ranks: tp 8, pp 16 where there are so many."""
    pp = [] if world >= 128 else ["parallel.pp=1", "parallel.stage_layers=[]"]
    return load_config(
        "llama-3.1-405b", ["parallel.zero=1", f"train.output={json.dumps(str(output))}", *pp]
    )


class Seconds(Counter[int]):
    """Processor seconds by rank."""

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        """Adds those of a block."""
        start = process_time()
        yield
        self[rank] += process_time() - start  # type: ignore[assignment]


# A save


class Mail:
    """What stands for torch.distributed in a tree: a rank's messages wait for the next to play."""

    def __init__(self) -> None:
        self.waiting: dict[Any, deque[torch.Tensor]] = defaultdict(deque)
        self.rank, self.sockets = 0, 0
        self.received: Counter[int] = Counter()
        self.received_bytes: Counter[int] = Counter()

    def PrefixStore(self, name: str, _: Any) -> str:  # noqa: N802 - torch's
        """The name of a group."""
        return name

    def ProcessGroupGloo(self, name: str, rank: int, size: int, **_: Any) -> "MailGroup":  # noqa: N802
        """A group by its name."""
        self.sockets += size - 1
        return MailGroup(self, name, rank)


class MailGroup(NamedTuple):
    """A group of one rank."""

    mail: Mail
    name: str
    rank: int

    def send(self, x: list[torch.Tensor], to: int, _: int) -> "MailGroup":
        """Keeps a message."""
        self.mail.waiting[self.name, self.rank, to].append(x[0])
        return self

    def recv(self, x: list[torch.Tensor], source: int, _: int) -> "MailGroup":
        """Fills x with the oldest message."""
        x[0].copy_(self.mail.waiting[self.name, source, self.rank].popleft())
        self.mail.received[self.mail.rank] += 1
        self.mail.received_bytes[self.mail.rank] += x[0].nbytes
        return self

    def wait(self) -> None:
        """Returns at once."""


def play_save(
    config: RunConfig, world: int, folder: Path
) -> tuple[dict[str, Any], dict[int, list[Shard]]]:
    """The costs of what a save exchanges, and the shards of some ranks; the folder is written."""
    mail, seconds = Mail(), Seconds()
    block = block_bytes_of(BYTES * sum(p.numel for p in parameters(config.model).values()))
    shown = {rank: list[Shard]() for rank in (0, 1, world // 2, world - 1)}
    told, sockets = {}, 0
    for rank, own in enumerate(rank_shards(_source(config), config, world, None)):
        if rank in shown:
            shown[rank] = own
        written = write_sparse(folder, rank, own, block, rank in shown)
        with seconds.of(rank):
            own_part = dump_written(written)
        told[rank] = json.dumps(own_part)  # text, which the collector of garbage passes over
    gc.freeze()  # what plays the ranks: no rank has to look through it for garbage
    with ExitStack() as stack:
        stack.enter_context(patch.object(tree, "dist", mail))
        stack.enter_context(patch.object(tree, "_get_default_store", object))
        stack.enter_context(patch.object(tree, "first_value", lambda *_: "a name of rank 0's"))
        for rank in reversed(range(world)):  # the first of a group hears those after it
            mail.rank, mail.sockets = rank, 0
            axis = world_axis(rank, world, FlightRecorder())._replace(group=None)
            own_part = json.loads(told.pop(rank))
            with seconds.of(rank):
                merged = tree.make_tree(axis).merge(own_part, merge_written)
            sockets = max(sockets, mail.sockets)
    with seconds.of(0):
        about = {"step": 1, "world": world, "extra": {}}
        commit(folder, merged, about, dump_toml(config), {})
    return {
        "save_seconds": max(seconds.values()),
        "received": max(mail.received.values(), default=0) // 2,  # each follows its length
        "received_bytes": max(mail.received_bytes.values(), default=0),
        "sockets": sockets,
        "manifest_bytes": (folder / MANIFEST).stat().st_size,
    }, shown


def _source(config: RunConfig) -> Checkpoint:
    """The tensors of a run, of which none is stored."""
    tensors = {
        kind + name: StoredTensor(dtype, parameter.shape, ())
        for name, parameter in parameters(config.model).items()
        for kind, dtype in KINDS.items()
    }
    return Checkpoint(Path(), config.model, tensors, None, config, step=1)


def write_sparse(
    folder: Path, rank: int, shards: list[Shard], block: int, is_read: bool
) -> RankManifest:
    """`write_shards` of a file without elements, and without a header where it is not read."""

    def write(path: Path, plan: list[Any], *_: Any) -> FileRecord:
        header = encode_header(plan, {}) if is_read else b""
        with path.open("wb") as file:
            file.write(header)
            size = len(header) + sum(CODE_BYTES[code] * prod(shape) for _, code, shape in plan)
            file.truncate(size)
        hashes = [os.urandom(16).hex() for _ in range(-(-size // block))]
        return FileRecord(bytes=size, xxh3_128=hashes, block_bytes=block)

    with patch.object(store, "write_tensors", write):
        return write_shards(folder, rank, shards, block_bytes=block)


# A start


class Played:
    """A process group in which rank 0 alone has something to tell; it is played first."""

    def __init__(self) -> None:
        self.told: list[bytes | None] = []
        self.rank, self.turn = 0, 0

    def first(self, data: bytes | None) -> bytes | None:
        """Stands for `process_group.first_bytes`."""
        if self.rank == 0:
            self.told.append(data)
            return data
        assert data is None, data  # the fault of another rank
        self.turn += 1
        return self.told[self.turn - 1]


def play_start(config: RunConfig, world: int, shards: dict[int, list[Shard]]) -> dict[str, Any]:
    """The costs of finding, checking and opening the checkpoint, and of reading a rank's boxes."""
    group, seconds, opens = Played(), Seconds(), Counter[int]()
    with ExitStack() as stack:
        stack.enter_context(patch.object(collectives, "first_of", lambda x, group: group.first(x)))
        stack.enter_context(patch.object(reader, "read_box", lambda *_: None))
        stack.enter_context(patch.object(blocks, "verify_blocks", lambda *_: None))
        for rank, own in sorted(shards.items()):
            group.rank, group.turn = rank, 0
            axis = world_axis(rank, world, FlightRecorder())._replace(group=group)
            OPENED.clear()
            with seconds.of(rank):
                start = starting_point(config, axis)
                assert start.checkpoint is not None
                for shard in own:
                    start.checkpoint.read(shard.name, shard.box)
            opens[rank] = sum(path.startswith(config.train.output) for path in OPENED)
            with seconds.of(rank):
                join(rank, world, config)
    return {
        "opens": max(opens.values()),
        "opens_others": max(count for rank, count in opens.items() if rank),
        "start_seconds": max(seconds.values()),
        "start_seconds_others": max(value for rank, value in seconds.items() if rank),
        "told_bytes": sum(len(data or b"") for data in group.told),
    }


def join(rank: int, world: int, config: RunConfig) -> None:
    """Makes the groups of a rank in torch's fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        make_groups(ParallelLayout.of_run(config, world), rank, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


OPENED: list[str] = []
sys.addaudithook(
    # an opener is told of once more, without a mode
    lambda event, args: OPENED.append(str(args[0])) if event == "open" and args[1] else None
)


# A store


class PlayedStore:
    """A store in memory that counts the requests of each thread."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests: Counter[str] = Counter()
        self.lock = threading.Lock()

    def __getattr__(self, request: str) -> Any:
        def ask(*args: Any) -> Any:
            with self.lock:
                self.requests[threading.current_thread().name] += 1
                return getattr(self, f"_{request}")(*args)

        return ask

    def _set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def _get(self, key: str) -> bytes:
        return self.values[key]

    def _check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def _multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def _multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self._set(key, value)
        for rank in range(2, len(keys)):  # those who are not played answer at once
            self._set(f"{values[0]}/join/{rank}", "")

    def _add(self, key: str, number: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + number).encode()
        return int(self.values[key])

    def _compare_set(self, key: str, _: str, value: str) -> bytes:
        return self.values.setdefault(key, value.encode())


def play_meeting(world: int) -> tuple[int, int]:
    """Requests of rank 1 and of rank 0 to the store, until all ranks have met."""
    kept = PlayedStore()
    for rank in range(2, world):
        kept._set(f"join/{rank}", json.dumps([f"token {rank}", 0, "cpu", "host"]))
    ranks = [
        threading.Thread(target=Meeting(kept, rank, world, 60.0, "cpu").agree, name=str(rank))
        for rank in (1, 0)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    return kept.requests["1"], kept.requests["0"]


def play_report(world: int) -> int:
    """Requests by which one rank reads all others' answers, where a node of 8 does not answer."""
    kept = PlayedStore()
    for rank in set(range(world)) - set(range(world // 2, world // 2 + 8)):
        kept._set(f"answer/{rank}", RankStatus(rank, 1, "step.py", {}).dump())
    found = values_of(kept, [f"answer/{rank}" for rank in range(world)])
    assert len(found) == world - min(8, world - world // 2)
    return sum(kept.requests.values())


# The plot

PANELS = {
    "opens of files by a rank": ("opens", "opens_others", "boxes"),
    "processor seconds of a rank": ("start_seconds", "start_seconds_others", "save_seconds"),
    "bytes": ("manifest_bytes", "received_bytes"),
    "sockets, messages and requests of a rank": ("sockets", "requests", "report_requests"),
}  # fmt: skip
LABELS = {
    "opens": "opens, rank 0", "opens_others": "opens, others", "boxes": "boxes of a rank",
    "start_seconds": "start, rank 0 or any",
    "start_seconds_others": "start, others", "save_seconds": "metadata of a save, rank 0",
    "manifest_bytes": "manifest.json, told to every rank at a start",
    "received_bytes": "received by rank 0 in a save",
    "sockets": "sockets for saves, messages received in one",
    "requests": "requests to the store to meet",
    "report_requests": "requests of the watchdog's report",
}  # fmt: skip


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws every cost against the number of ranks."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(2, 2, figsize=(10, 8.5), layout="constrained")
    for (title, names), axis in zip(PANELS.items(), axes.flat, strict=True):
        for index, name in enumerate(names):
            x, y = [row["ranks"] for row in rows], [row[name] for row in rows]
            (line,) = axis.plot(x, y, marker="o", ms=4, color=f"C{index}", label=LABELS[name])
            if isinstance(limit := MOST.get(name), float):
                axis.axhline(limit, color=line.get_color(), ls=":", lw=1, label="its limit")
        axis.set(title=title, xlabel="ranks", xscale="log", yscale="log")
        axis.set_xticks(x, [f"{n:,}" for n in x])
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(lambda y, _: f"{y / 1e6:g} M" if y >= 1e6 else f"{y:,g}")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
