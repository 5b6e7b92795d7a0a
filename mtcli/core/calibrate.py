"""Measures this machine's processor for `mtcli plan --device cpu`: `cost/calibration.py` starts it.

One process per rank, all at the same work at once. Each trains small models of one kind, alone,
with the trainer itself; what a forward and a backward pass cost per unit of what they count
(`cost/host.py`) is then fitted to all of them together, by least squares of relative errors.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mtcli.core.cost.calibration import Amounts, Calibration, Facts
from mtcli.core.cost.host import attention_seconds, stage_amounts
from mtcli.core.cost.workload import Workload
from mtcli.core.measure import counted
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.pp import OpSpan
from mtcli.core.probes import (
    Watch,
    attention_rows,
    copy_rate,
    links,
    product_rate,
    watch,
)
from mtcli.core.runtime import Runtime, set_matmul
from mtcli.core.spec.config import RunConfig
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.trainer import Phases, Trainer
from mtcli.kernels.products import is_slow

ROUNDS, STEPS, WARMUP = 2, 2, 1  # rounds, so that no slow moment of the machine is in all
NO_LINKS = dict.fromkeys(("gather", "scatter", "reduce", "exchange", "hop"), (0.0, 0.0))


class Shape(NamedTuple):
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
    Shape(128, 2, 512, 64, 1), Shape(128, 2, 512, 64, 16, 8), Shape(128, 1, 4096, 256, 4),
    Shape(256, 4, 1024, 128, 2, 8), Shape(256, 1, 2048, 256, 4), Shape(256, 1, 8192, 64, 8),
    Shape(256, 1, 512, 512, 2, 8), Shape(512, 1, 1024, 64, 1), Shape(512, 2, 512, 128, 4),
    Shape(512, 1, 1024, 512, 1, 8), Shape(768, 1, 1024, 64, 2), Shape(1024, 1, 512, 128, 1),
    Shape(1024, 1, 1024, 64, 4),
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
    """Rank 0 prints the calibration of the facts given, as JSON."""
    facts, folder, rank = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    ranks = facts["ranks"]
    torch.set_num_threads(max(1, facts["cores"] // ranks))
    set_matmul(facts["matmul"])
    if ranks > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    found = calibrate(facts, rank)
    if rank == 0:
        sys.stdout.write(json.dumps(found.as_json()))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def calibrate(facts: Facts, rank: int, shapes: Sequence[Shape] = SHAPES) -> Calibration:
    """What rank `rank` of them finds. Collective where there are several."""
    ranks = facts["ranks"]
    timer = watch(torch.get_num_threads(), ranks)
    known = _without_passes(facts, rank, timer)
    configs = [run_config(facts, shape) for shape in shapes]
    rounds = [[_train(config, timer) for config in configs] for _ in range(ROUNDS)]
    timed = [typical(steps, ranks) for steps in zip(*rounds, strict=True)]
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


def run_config(facts: Facts, shape: Shape) -> RunConfig:
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


def _train(config: RunConfig, timer: Watch) -> list[Timed]:
    """A model trained for a few steps on this rank alone, each begun with the others."""
    trainer = Trainer(config, Runtime(0, 1, 0, 1, torch.device("cpu")))
    trainer.initialise()
    trainer.pipeline.clock = timer.clock
    feed, work = counted(config, trainer), Workload.of(config, 1)
    steps: list[Timed] = []
    for _ in range(WARMUP + STEPS):
        timer.together()
        trainer.train_step(feed)
        assert trainer.phases is not None, "a step leaves its phases"
        steps.append(_timed(work, trainer.phases, trainer.pipeline.spans))
    feed.close()
    return steps[WARMUP:]


def _timed(work: Workload, p: Phases, spans: Iterable[OpSpan]) -> Timed:
    passes = {span.op.kind: span.end - span.start for span in spans}  # of one micro-batch
    update = p.norm - p.reduce + p.end - p.agree
    overhead = p.data - p.begin + p.reduce - p.pipeline + p.agree - p.norm
    return Timed(work, passes["F"], passes["B"], update, overhead)


def _without_passes(facts: Facts, rank: int, timer: Watch) -> Calibration:
    """All but what is fitted."""
    ranks, precision, kind = facts["ranks"], facts["precision"], facts["kind"]
    axis = None
    if ranks > 1:
        axis = make_groups(ParallelLayout(ranks), rank, torch.device("cpu")).world
    return Calibration(
        ranks=ranks,
        widens=is_slow(torch.empty(0, dtype=torch.bfloat16)),
        flops=product_rate(precision, timer),
        memory_bandwidth=copy_rate(timer),
        forward=Amounts(),
        backward=Amounts(),
        attention=attention_rows(kind["head_dim"], kind["causal"], precision, timer),
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
