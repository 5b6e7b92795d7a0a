"""Measures this machine's processor for `mtcli plan --device cpu`; `calibration.py` starts it.

One process per rank, all at the same work at once. Each trains small models of one kind, alone,
with the trainer itself; what a forward and a backward pass cost per unit of what they count
(`plan/cpu_time.py`) is then fitted to all of them together, by least squares of relative errors.
Products, copies, attention and collectives are measured by themselves.

A rank is timed by the processor time of its main thread, which other programs that use the machine
meanwhile leave as it is. It has its part of every parallel region; threads that wait for each other
sleep (OMP_WAIT_POLICY), or they would count their waiting.

What limits it is processor time, BUDGET seconds of all processes: what is measured does not depend
on how much of the machine others leave to it, only how long that takes.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import cycle
from multiprocessing import get_context
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtcli.core.config.schema import RunConfig
from mtcli.core.config.sync import SyncConfig
from mtcli.core.exchange.arithmetic import Kind
from mtcli.core.exchange.payload import Payload
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.model.build import DTYPES
from mtcli.core.parallel.attention_mask import AttentionMask
from mtcli.core.parallel.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from mtcli.core.parallel.context import attention_over
from mtcli.core.parallel.groups import Axis, make_groups
from mtcli.core.parallel.health.flight_recorder import FlightRecorder
from mtcli.core.plan.calibration import (
    BUDGET,
    Amounts,
    AttentionRow,
    Calibration,
    Exchange,
    Facts,
)
from mtcli.core.plan.cpu_time import attention_seconds, stage_amounts
from mtcli.core.plan.hardware import send_over_loopback
from mtcli.core.plan.workload import Workload
from mtcli.core.runtime.launch import Runtime, set_matmul
from mtcli.core.runtime.process_pool import end_with
from mtcli.core.sync.compression import compress, decompress
from mtcli.core.training.loader import synthetic_loader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer
from mtcli.kernels.gemm import matmul, runs_in_float32
from mtcli.kernels.onebit import pack_reference_, unpack_reference

ROUNDS, STEPS, WARMUP = 2, 2, 1  # rounds, so that no slow moment of the machine is in all
MOST_RANKS = 4  # that measure at once: more would have too little of the budget each
OF_ATTENTION, OF_MODELS = 0.2, 0.7  # of a rank's share, after which nothing more is begun
LEAST_SHAPES = 8  # as many as a pass has counts (`Amounts`)
PATIENCE = timedelta(minutes=3)  # for another rank, on a machine that has other work

SIDE = 1024  # of a large product
LENGTHS = (64, 128, 256, 512, 1024, 2048)
SCORES, HEAD_DIM = 2**20, 32  # of an attention; of wider heads fewer scores do
LEAST_SECONDS, LEAST_TIMES = 0.01, 3
SMALL, LARGE = 2**12, 2**22  # bytes of a collective
STREAM, STREAMS = 2**25, 7  # bytes through a socket, and how often
TENSORS, ELEMENTS = 64, (2**12, 2**18)  # of an exchange's arithmetic
LARGEST = 1 / 64  # share of the values that are selected


class ProbeShape(NamedTuple):
    """A small model and its micro-batch; `experts` counts where the kind has any."""

    width: int
    layers: int
    vocab: int
    seq_len: int
    sequences: int
    experts: int = 4


# Chosen to differ in what a pass counts: launches, FLOPs, elements, logits and weights.
# fmt: off
SHAPES = (
    ProbeShape(128, 2, 512, 64, 1), ProbeShape(128, 2, 512, 64, 16, 8),
    ProbeShape(128, 1, 4096, 256, 4), ProbeShape(256, 4, 1024, 128, 2, 8),
    ProbeShape(256, 1, 2048, 256, 4), ProbeShape(256, 1, 8192, 64, 8),
    ProbeShape(256, 1, 512, 512, 2, 8), ProbeShape(512, 1, 1024, 64, 1),
    ProbeShape(512, 2, 512, 128, 4), ProbeShape(512, 1, 1024, 512, 1, 8),
    ProbeShape(768, 1, 1024, 64, 2), ProbeShape(1024, 1, 512, 128, 1),
    ProbeShape(1024, 1, 1024, 64, 4),
)
# fmt: on


class Timed(NamedTuple):
    """Seconds of a model's step: of its passes, of the update, and of the rest."""

    work: Workload
    forward: float
    backward: float
    update: float
    overhead: float


def main() -> None:
    """Prints the calibration of the facts given, as JSON: rank 0, of which the others are forks.
    They meet in a file of the folder given.

    So torch is imported once, which takes more than a second. Nothing has computed before they
    are forked: a fork of a process that has used OpenMP may hang. The file's store is made before,
    too: making one waits for its file, and keeps the interpreter from `end_with`'s thread.
    """
    facts, folder = json.loads(sys.argv[1]), sys.argv[2]
    ranks = min(facts["ranks"], MOST_RANKS)
    share = max(0.01, BUDGET - process_time()) / ranks
    lifeline = os.dup(sys.stdin.fileno())  # multiprocessing closes stdin in a fork
    store = dist.FileStore(f"{folder}/store")
    store.set_timeout(PATIENCE)

    def work(rank: int) -> Calibration:
        end_with(lifeline, lambda: shutil.rmtree(folder, ignore_errors=True))
        return _rank(facts, store, rank, ranks, share)

    others = [
        get_context("fork").Process(target=work, args=(rank,), daemon=True)
        for rank in range(1, ranks)
    ]
    for process in others:
        process.start()
    calibration = work(0)
    for process in others:
        process.join()
    sys.stdout.write(json.dumps(calibration.as_json()))


def _rank(facts: Facts, store: dist.Store, rank: int, ranks: int, share: float) -> Calibration:
    signal.setitimer(signal.ITIMER_PROF, share)  # of processor time; its signal ends the process
    torch.set_num_threads(max(1, facts["cores"] // facts["ranks"]))
    set_matmul(facts["matmul"])
    if ranks > 1:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=PATIENCE)
    calibration = calibrate(facts, rank, ranks, share)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return calibration


def calibrate(
    facts: Facts, rank: int, ranks: int, share: float, shapes: Sequence[ProbeShape] = SHAPES
) -> Calibration:
    """Measurements of rank `rank`, taken in at most `share` seconds of its processor time.

    Collective where there are several. Raises RuntimeError where that is too little to train
    enough models.
    """
    start = process_time()

    def allows(part: float) -> bool:
        """Whether no rank has used as much as a part of its share."""
        used = torch.tensor([process_time() - start], dtype=torch.float64)
        return _slowest(used).item() < part * share

    precision, kind = facts["precision"], facts["kind"]
    rows: list[AttentionRow] = []
    for length in LENGTHS:
        if not rows or allows(OF_ATTENTION):
            rows.append(attention_row(length, kind["head_dim"], kind["causal"], precision))
    known = Calibration(
        ranks=facts["ranks"],
        widens=runs_in_float32(torch.empty(0, dtype=torch.bfloat16)),
        flops=gemm_rate(precision),
        memory_bandwidth=copy_rate(),
        forward=Amounts(),
        backward=Amounts(),
        attention=tuple(rows),
        update=(0.0, 0.0),
        overhead=0.0,
        links=links(rank, ranks),
        socket=socket_cost(),
        arithmetic=arithmetic(),
    )
    configs = [run_config(facts, shape) for shape in shapes]
    rounds: list[list[list[Timed]]] = [[] for _ in configs]
    for config, steps in [*zip(configs, rounds, strict=True)] * ROUNDS:
        if allows(OF_MODELS):
            steps.append(_train(config))
    timed = [typical(steps) for steps in rounds if steps]
    if len(timed) < min(LEAST_SHAPES, len(shapes)):
        have = f"{len(timed)} of {len(shapes)} models"
        raise RuntimeError(f"{BUDGET:g} s of processor time were enough for {have}")
    return _fitted(known, timed)


def _slowest(seconds: Tensor) -> Tensor:
    """Takes each time from the slowest rank, for which the others wait. Collective of several."""
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds


def typical(rounds: Iterable[Sequence[Timed]]) -> Timed:
    """The median step of a model, each on the slowest rank. Collective where there are several."""
    steps = [step for steps in rounds for step in steps]
    seconds = _slowest(torch.tensor([step[1:] for step in steps], dtype=torch.float64))
    return Timed(steps[0].work, *(median(column) for column in seconds.T.tolist()))


def run_config(facts: Facts, shape: ProbeShape) -> RunConfig:
    """A run of a model of the kind that the facts name."""
    kind = dict(facts["kind"])
    dropout, routed = kind.pop("dropout"), kind.pop("routed")
    heads = max(1, shape.width // kind["head_dim"])
    wide = 3 if kind["activation"] == "swiglu" else 4
    model = kind | {
        "num_layers": shape.layers,
        "hidden_size": shape.width,
        "num_heads": heads,
        "num_kv_heads": heads,
        "ffn_hidden_size": wide * shape.width // (2 if routed else 1),
        "vocab_size": shape.vocab,
        "max_seq_len": shape.seq_len,
        "norm_eps": 1e-5,
        "tie_embeddings": False,
        "dropout": 0.1 if dropout else 0.0,
        **({"num_experts": shape.experts, "top_k": 2} if routed else {}),
    }
    sizes = dict.fromkeys(("micro_batch_size", "global_batch_size"), shape.sequences)
    train = {"precision": facts["precision"], "loss_scale": 1.0, "steps": WARMUP + STEPS}
    train |= {name: facts[name] for name in ("fp8_scaling",) if name in facts}
    rule = {"name": facts.get("optimizer", "adamw")}
    batch = sizes | {"seq_len": shape.seq_len}
    return RunConfig.model_validate(
        {"model": model, "batch": batch, "optimizer": rule, "train": train}
    )


def _train(config: RunConfig) -> list[Timed]:
    """Trains a model for a few steps on this rank alone, each begun with the others."""
    trainer = Trainer(config, Runtime(0, 1, 0, 1, torch.device("cpu")))
    initialise(trainer)
    trainer.pipeline.clock = thread_time
    loader, work = synthetic_loader(config, trainer.groups), Workload.of(config, 1)
    steps: list[Timed] = []
    for _ in range(WARMUP + STEPS):
        _together()
        trainer.train_step(loader)
        p = trainer.phases
        assert p is not None, "a step leaves its phases"
        passes = {op.kind: end - start for op, start, end in trainer.pipeline.spans}  # of one
        update, agree = p.norm - p.reduce + p.end - p.agree, p.agree - p.norm
        overhead = p.data - p.begin + p.reduce - p.pipeline + agree
        steps.append(Timed(work, passes["F"], passes["B"], update, overhead))
    loader.close()
    return steps[WARMUP:]


def _fitted(known: Calibration, timed: Sequence[Timed]) -> Calibration:
    """Fits the seconds per unit to the timed passes."""
    counts = [stage_amounts(row.work) for row in timed]
    layers = [row.work.model.num_layers for row in timed]
    fixed = [attention_seconds(row.work, known) * n for row, n in zip(timed, layers, strict=True)]
    forward, backward = zip(*counts, strict=True)
    sizes = [(n, way.weights) for n, way in zip(layers, backward, strict=True)]
    update = least_squares(sizes, [row.update for row in timed], [0.0] * len(timed))
    there = [row.forward for row in timed], [row.forward for row in fixed]
    back = [row.backward for row in timed], [row.backward for row in fixed]
    return replace(
        known,
        forward=Amounts(*least_squares(forward, *there)),
        backward=Amounts(*least_squares(backward, *back)),
        update=(update[0], update[1]),
        overhead=median(row.overhead for row in timed),
    )


def least_squares(
    rows: Iterable[Sequence[float]], seconds: Sequence[float], fixed: Sequence[float]
) -> list[float]:
    """Fits the costs c >= 0 for which fixed + rows c comes nearest to `seconds`, relative to these.

    What would cost less than nothing is left out, the one that saves most first; a count that is
    always zero costs nothing.
    """
    wanted = np.array(seconds)
    table = np.array(list(rows), float) / wanted[:, None]
    rest = 1.0 - np.array(fixed) / wanted
    size = np.linalg.norm(table, axis=0)
    left, costs = [i for i in range(table.shape[1]) if size[i] > 0], np.zeros(table.shape[1])
    while left:
        some, *_ = np.linalg.lstsq(table[:, left] / size[left], rest, rcond=None)
        if (some >= 0).all():
            costs[left] = some / size[left]
            break
        left.pop(int(np.argmin(some)))
    return [float(cost) for cost in costs]


def seconds_of(run: Callable[[], Any]) -> float:
    """Seconds that something takes, its first run aside."""
    return _passes_of(lambda mark: (run(), mark()), 1)[0]


def _together() -> None:
    """Waits until every rank has come so far."""
    if dist.is_initialized():
        dist.barrier()


def _passes_of(run: Callable[[Callable[[], None]], Any], passes: int) -> tuple[float, ...]:
    """Seconds of each pass of something that calls `mark` after each, its first run aside."""
    times: list[list[float]] = []
    run(lambda: None)
    _together()
    while len(times) < LEAST_TIMES or times[-1][-1] - times[0][0] < LEAST_SECONDS:
        moments = [thread_time()]
        run(lambda moments=moments: moments.append(thread_time()))
        times.append(moments)
    return tuple(median(marks[i + 1] - marks[i] for marks in times) for i in range(passes))


def gemm_rate(precision: str) -> float:
    """FLOP/s of a large GEMM."""
    a, b = (torch.randn(SIDE, SIDE).to(DTYPES[precision]) for _ in range(2))
    return 2.0 * SIDE**3 / seconds_of(lambda: matmul(a, b))


def copy_rate() -> float:
    """Bytes/s read and written by a copy that no cache holds."""
    source = torch.ones(2**24)
    target = torch.empty_like(source)
    return 2.0 * 4 * len(source) / seconds_of(lambda: target.copy_(source))


def attention_row(length: int, head_dim: int, causal: bool, precision: str) -> AttentionRow:
    """Seconds per score of rows of a length."""
    wanted = SCORES * HEAD_DIM // head_dim // length**2
    heads = max(2, wanted // 2 * 2)
    projected = torch.randn(2, length, heads // 2, 3, head_dim).to(DTYPES[precision])
    q, k, v = (x.transpose(1, 2) for x in projected.unbind(3))  # strided, as a model's are
    grad, scores = torch.randn_like(q), heads * length**2
    leaves, mask = [x.requires_grad_() for x in (q, k, v)], AttentionMask(causal)
    attend = attention_over("ring")

    def seconds(rank: int, ranks: int) -> tuple[float, float]:
        axis = Axis("cp", tuple(range(ranks)), rank, None, FlightRecorder(), Still())

        def there_and_back(mark: Callable[[], None]) -> None:
            y = attend(*leaves, axis, mask)
            mark()
            torch.autograd.grad(y, leaves, grad)
            mark()

        forward, backward = _passes_of(there_and_back, 2)
        return forward, backward

    alone = seconds(0, 1)
    # The first rank of a ring computes on half of its queries, the last one on half of the keys:
    # two shapes of a hop, of which everyone waits for the slower one.
    two, three = ([seconds(rank, ranks) for rank in (0, ranks - 1)] for ranks in (2, 3))
    ring = [max(x[way] for x in two) for way in (0, 1)]
    hop = [min(ring[way], max(0.0, max(x[way] for x in three) - ring[way])) for way in (0, 1)]
    square = [total - part for total, part in zip(ring, hop, strict=True)]
    per_score = (*alone, *square, *(2 * part for part in hop))
    return AttentionRow(float(length), *(cost / scores for cost in per_score))


def arithmetic() -> dict[Kind, tuple[float, float]]:
    """Measures seconds of a call, and seconds per element, of each kind of an exchange's
    arithmetic, on tensors that no cache holds: a step has used many since the last exchange."""
    tensors = (torch.rand(ELEMENTS[1]) - 0.5).repeat(TENSORS, 1)
    costs: dict[Kind, tuple[float, float]] = {}
    for kind in get_args(Kind):
        few, many = (_seconds_of_kind(kind, tensors[:, :length]) for length in ELEMENTS)
        each = max(0.0, (many - few) / (ELEMENTS[1] - ELEMENTS[0]))
        costs[kind] = (max(0.0, few - each * ELEMENTS[0]), each)
    return costs


def _seconds_of_kind(kind: Kind, tensors: Tensor) -> float:
    """Seconds of one kind on one of some tensors [n, length], which are taken in turn."""
    length, scale = tensors.shape[1], torch.tensor(1e-6)
    name, _, bits = kind.partition("_")
    sync = SyncConfig(method="diloco", quantise=int(bits or 2), top_k=0.0 if bits else LARGEST)
    form = Payload.of(sync, length)
    signs, payload = pack_reference_(tensors[0], scale), compress(tensors[0], form)
    runs: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "pass": lambda x, y: x.add_(y, alpha=1e-6),
        "sign": lambda x, _: pack_reference_(x, scale),
        "unsign": lambda *_: unpack_reference(signs, scale, length),
        "compress": lambda x, _: compress(x, form),
        "decompress": lambda *_: decompress(payload, form, length),
    }
    run = runs[{"select": "compress", "scatter": "decompress"}.get(name, name)]
    pairs = cycle(zip(tensors[::2], tensors[1::2], strict=True))
    return seconds_of(lambda: run(*next(pairs)))


class Still:
    """A transport that gives a rank back what it sends, at no cost."""

    def shift(self, out: Tensor, x: Tensor) -> "Still":
        """Gives `out` the memory of x."""
        out.set_(x)
        return self

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """Returns True."""
        return True


def links(rank: int, ranks: int) -> dict[Exchange, tuple[float, float]]:
    """Measures seconds, and seconds per byte that crosses, of each kind of exchange. Collective.

    Of a tensor of B bytes (a gather's whole, an all-reduce's own) (n - 1) / n * B cross; hops
    send B bytes to the next rank and back, which two ranks of each pair do in turn.
    """
    if ranks == 1:
        return dict.fromkeys(get_args(Exchange), (0.0, 0.0))
    axis = make_groups(ParallelLayout(ranks), rank, torch.device("cpu")).world
    n = axis.size
    runs: dict[Exchange, Callable[[Tensor], Any]] = {
        "gather": lambda x: all_gather(x[: len(x) // n], axis),
        "scatter": lambda x: reduce_scatter(x, axis),
        "reduce": lambda x: all_reduce(x, axis),
        "exchange": lambda x: all_to_all(x.view(n, -1), axis),
        "hop": lambda x: _hop_and_back(x, axis),
    }
    costs: dict[Exchange, tuple[float, float]] = {}
    for name, run in runs.items():
        small, large = (_exchange_seconds(run, size, n) for size in (SMALL, LARGE))
        crossing = [size if name == "hop" else size * (n - 1) / n for size in (SMALL, LARGE)]
        per_byte = max(0.0, (large - small) / (crossing[1] - crossing[0]))
        ways = 2 if name == "hop" else 1
        costs[name] = (max(0.0, small - per_byte * crossing[0]) / ways, per_byte / ways)
    return costs


def _exchange_seconds(run: Callable[[Tensor], Any], size: int, n: int) -> float:
    """Seconds of a collective, as often on every rank: the lower quartile, as ranks that other
    programs keep from a processor let the others wait."""
    x = torch.ones(size // 4 // n * n)
    times = 8 if size == LARGE else 50
    seconds = []
    _together()
    for _ in range(times):
        begin = perf_counter()
        run(x)
        seconds.append(perf_counter() - begin)
    return sorted(seconds)[times // 4]


def socket_cost() -> float:
    """Measures processor seconds of a byte by TCP over loopback, of the thread that sends it and of
    the one that receives it."""
    seconds, data = [], memoryview(bytes(STREAM))
    for _ in range(STREAMS):
        begin = process_time()
        send_over_loopback(data)
        seconds.append((process_time() - begin) / STREAM)
    return median(seconds)


def _hop_and_back(x: Tensor, axis: Axis) -> None:
    if axis.rank ^ 1 >= axis.size:  # the last of an odd number
        return
    peer = axis.ranks[axis.rank ^ 1]
    for sender in (0, 1):
        if axis.rank % 2 == sender:
            dist.send(x, peer, group=axis.group)
        else:
            dist.recv(x, peer, group=axis.group)


if __name__ == "__main__":
    main()
