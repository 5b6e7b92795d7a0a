"""Measures this machine's processor for `mtcli plan --device cpu`, which starts it by
`plan/calibration_cache.py`.

One process per rank, all at the same work at once. Each trains small models of one kind, alone,
with the trainer itself; what a forward and a backward pass cost per unit of what they count
(`plan/cpu_time.py`) is then fitted to all of them together, by least squares of relative errors.

What limits it is processor time, BUDGET seconds of all processes: what is measured does not depend
on how much of the machine others leave to it, only how long that takes.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from statistics import median
from time import process_time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mtcli.core.config.schema import RunConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.pipeline import OpSpan
from mtcli.core.plan.calibration import BUDGET, Amounts, Calibration, Facts
from mtcli.core.plan.cpu_time import attention_seconds, stage_amounts
from mtcli.core.plan.probes import (
    LENGTHS,
    Stopwatch,
    attention_row,
    copy_rate,
    links,
    product_rate,
    stopwatch,
)
from mtcli.core.plan.workload import Workload
from mtcli.core.runtime.launch import Runtime, set_matmul
from mtcli.core.runtime.lifeline import end_with
from mtcli.core.training.loader import synthetic_loader
from mtcli.core.training.step import Phases, Trainer
from mtcli.kernels.gemm import runs_in_float32

ROUNDS, STEPS, WARMUP = 2, 2, 1  # rounds, so that no slow moment of the machine is in all
MOST_RANKS = 4  # that measure at once: more would have too little of the budget each
OF_ATTENTION, OF_MODELS = 0.2, 0.7  # of a rank's share, after which nothing more is begun
LEAST_SHAPES = 8  # as many as a pass has counts (`Amounts`)
PATIENCE = timedelta(minutes=3)  # for another rank, on a machine that has other work
NO_LINKS = dict.fromkeys(("gather", "scatter", "reduce", "exchange", "hop"), (0.0, 0.0))


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


class Budget:
    """Processor time of this rank: its share of what all processes together may take."""

    def __init__(self, seconds: float, ranks: int) -> None:
        self.seconds, self.ranks, self.start = seconds, ranks, process_time()

    def allows(self, part: float) -> bool:
        """Whether no rank has used as much as a part of its share. Collective of several."""
        used = torch.tensor([process_time() - self.start], dtype=torch.float64)
        if self.ranks > 1:
            dist.all_reduce(used, dist.ReduceOp.MAX)
        return used.item() < part * self.seconds


def main() -> None:
    """Prints the calibration of the facts given, as JSON: rank 0, of which the others are forks.
    They meet in a file of the folder given.

    So torch is imported once, which takes more than a second. Nothing has computed before they
    are forked: a fork of a process that has used OpenMP may hang.
    """
    facts, folder = json.loads(sys.argv[1]), sys.argv[2]
    ranks = min(facts["ranks"], MOST_RANKS)
    share = max(0.01, BUDGET - process_time()) / ranks
    lifeline = os.dup(sys.stdin.fileno())  # multiprocessing closes stdin in a fork

    def work(rank: int) -> Calibration:
        end_with(lifeline, lambda: shutil.rmtree(folder, ignore_errors=True))
        return _rank(facts, f"{folder}/store", rank, ranks, share)

    others = [
        get_context("fork").Process(target=work, args=(rank,), daemon=True)
        for rank in range(1, ranks)
    ]
    for process in others:
        process.start()
    found = work(0)
    for process in others:
        process.join()
    sys.stdout.write(json.dumps(found.as_json()))


def _rank(facts: Facts, store: str, rank: int, ranks: int, share: float) -> Calibration:
    """Measurements of one rank, ended by its share of processor time."""
    signal.setitimer(signal.ITIMER_PROF, share)  # of processor time; its signal ends the process
    torch.set_num_threads(max(1, facts["cores"] // facts["ranks"]))
    set_matmul(facts["matmul"])
    if ranks > 1:
        where = {"init_method": f"file://{store}", "rank": rank, "world_size": ranks}
        dist.init_process_group("gloo", timeout=PATIENCE, **where)
    found = calibrate(facts, rank, ranks, share)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return found


def calibrate(
    facts: Facts, rank: int, ranks: int, share: float, shapes: Sequence[ProbeShape] = SHAPES
) -> Calibration:
    """Measurements of rank `rank`, taken in at most `share` seconds of its processor time.

    Collective where there are several. Raises RuntimeError where that is too little to train
    enough models.
    """
    timer, budget = stopwatch(ranks), Budget(share, ranks)
    known = _without_passes(facts, rank, timer, budget)
    configs = [run_config(facts, shape) for shape in shapes]
    rounds: list[list[list[Timed]]] = [[] for _ in configs]
    for config, steps in [*zip(configs, rounds, strict=True)] * ROUNDS:
        if budget.allows(OF_MODELS):
            steps.append(_train(config, timer))
    timed = [typical(steps, ranks) for steps in rounds if steps]
    if len(timed) < min(LEAST_SHAPES, len(shapes)):
        have = f"{len(timed)} of {len(shapes)} models"
        raise RuntimeError(f"{BUDGET:g} s of processor time were enough for {have}")
    return _fitted(known, timed)


def typical(rounds: Iterable[Sequence[Timed]], ranks: int) -> Timed:
    """The median step of a model, each on the rank that took longest, for which others wait.

    Collective where there are several.
    """
    steps = [step for steps in rounds for step in steps]
    seconds = torch.tensor([step[1:] for step in steps], dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return Timed(steps[0].work, *(median(column) for column in seconds.T.tolist()))


def run_config(facts: Facts, shape: ProbeShape) -> RunConfig:
    """A run of a model of the kind that the facts name."""
    kind, experts = facts["kind"], {}
    heads = max(1, shape.width // kind["head_dim"])
    flags = {name: value for name, value in kind.items() if name not in ("dropout", "routed")}
    wide = 4 if kind["activation"] != "swiglu" else 3
    if kind["routed"]:
        experts = {"num_experts": shape.experts, "top_k": 2}
    model = {
        **flags,
        **experts,
        "num_layers": shape.layers,
        "hidden_size": shape.width,
        "num_heads": heads,
        "num_kv_heads": heads,
        "ffn_hidden_size": wide * shape.width // (2 if kind["routed"] else 1),
        "vocab_size": shape.vocab,
        "max_seq_len": shape.seq_len,
        "norm_eps": 1e-5,
        "tie_embeddings": False,
        "dropout": 0.1 if kind["dropout"] else 0.0,
    }
    sizes = {"seq_len": shape.seq_len, "micro_batch_size": shape.sequences}
    sizes["global_batch_size"] = shape.sequences
    train = {"precision": facts["precision"], "loss_scale": 1.0, "steps": WARMUP + STEPS}
    train |= {name: facts[name] for name in ("fp8_scaling",) if name in facts}
    rule = {"name": facts.get("optimizer", "adamw")}
    table = {"model": model, "batch": sizes, "optimizer": rule, "train": train}
    return RunConfig.model_validate(table)


def _train(config: RunConfig, timer: Stopwatch) -> list[Timed]:
    """A model trained for a few steps on this rank alone, each begun with the others."""
    trainer = Trainer(config, Runtime(0, 1, 0, 1, torch.device("cpu")))
    trainer.initialise()
    trainer.pipeline.clock = timer.clock
    loader, work = synthetic_loader(config, trainer.groups), Workload.of(config, 1)
    steps: list[Timed] = []
    for _ in range(WARMUP + STEPS):
        timer.together()
        trainer.train_step(loader)
        assert trainer.phases is not None, "a step leaves its phases"
        steps.append(_timed(work, trainer.phases, trainer.pipeline.spans))
    loader.close()
    return steps[WARMUP:]


def _timed(work: Workload, p: Phases, spans: Iterable[OpSpan]) -> Timed:
    passes = {span.op.kind: span.end - span.start for span in spans}  # of one micro-batch
    update = p.norm - p.reduce + p.end - p.agree
    overhead = p.data - p.begin + p.reduce - p.pipeline + p.agree - p.norm
    return Timed(work, passes["F"], passes["B"], update, overhead)


def _without_passes(facts: Facts, rank: int, timer: Stopwatch, budget: Budget) -> Calibration:
    """All but what is fitted."""
    precision, kind, axis = facts["precision"], facts["kind"], None
    if budget.ranks > 1:
        axis = make_groups(ParallelLayout(budget.ranks), rank, torch.device("cpu")).world
    rows = []
    for length in LENGTHS:
        if not rows or budget.allows(OF_ATTENTION):
            rows.append(attention_row(length, kind["head_dim"], kind["causal"], precision, timer))
    return Calibration(
        ranks=facts["ranks"],
        widens=runs_in_float32(torch.empty(0, dtype=torch.bfloat16)),
        flops=product_rate(precision, timer),
        memory_bandwidth=copy_rate(timer),
        forward=Amounts(),
        backward=Amounts(),
        attention=tuple(rows),
        update=(0.0, 0.0),
        overhead=0.0,
        links=links(axis, timer) if axis else NO_LINKS,
    )


def _fitted(known: Calibration, timed: Sequence[Timed]) -> Calibration:
    """The calibration with the seconds per unit that make the timed passes what they were."""
    counts = [stage_amounts(one.work) for one in timed]
    fixed = [attention_seconds(one.work, known) * one.work.model.num_layers for one in timed]
    passes = [(one.forward, one.backward) for one in timed]
    fits = [
        least_squares(
            [ways[way] for ways in counts],
            [seconds[way] for seconds in passes],
            [(one.forward, one.backward)[way] for one in fixed],
        )
        for way in (0, 1)
    ]
    sizes = [
        (one.work.model.num_layers, ways[1].weights)
        for one, ways in zip(timed, counts, strict=True)
    ]
    update = least_squares(sizes, [one.update for one in timed], [0.0] * len(timed))
    return Calibration(
        **known.as_json()
        | {
            "forward": Amounts(*fits[0]),
            "backward": Amounts(*fits[1]),
            "attention": known.attention,
            "update": (update[0], update[1]),
            "overhead": median(one.overhead for one in timed),
        }
    )


def least_squares(
    rows: Iterable[Sequence[float]], seconds: Sequence[float], fixed: Sequence[float]
) -> list[float]:
    """The costs c >= 0 for which fixed + rows c comes nearest to `seconds`, relative to these.

    What would cost less than nothing is left out, the one that saves most first; a count that is
    always zero costs nothing.
    """
    wanted = np.array(seconds)
    table = np.array(list(rows), float) / wanted[:, None]
    rest = 1.0 - np.array(fixed) / wanted
    size = np.linalg.norm(table, axis=0)
    left, found = [i for i in range(table.shape[1]) if size[i] > 0], np.zeros(table.shape[1])
    while left:
        some, *_ = np.linalg.lstsq(table[:, left] / size[left], rest, rcond=None)
        if (some >= 0).all():
            found[left] = some / size[left]
            break
        left.pop(int(np.argmin(some)))
    return [float(one) for one in found]


if __name__ == "__main__":
    main()
