"""Prices what interrupts a run: its saves, and failures of its devices.

A copy to host memory stops training, and a checkpoint counts once its copy is written. A failure
costs half a save interval, the write that was under way, the restart, and the time to read the
checkpoint. With one failure in M seconds, and saves that stop training for S, intervals of
sqrt(2 S M) cost least (Young, 1974).
"""

from collections.abc import Sequence
from math import ceil, inf, isfinite, sqrt
from typing import NamedTuple

from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.schema import TrainConfig
from mtcli.core.config.synonyms import closest
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.mesh.update_rules import update_of
from mtcli.core.plan.exchange import exchange_of
from mtcli.core.plan.predict import Prediction
from mtcli.core.plan.workload import Workload

MINUTE, DAY, GIGA = 60.0, 86400.0, 1e9


class Assumed(NamedTuple):
    """The rates of a cluster and its building, which no plan can know."""

    storage: float = 200.0
    """GB/s of the file system, for all ranks together"""
    copy: float = 25.0
    """GB/s from a device to its host: PCIe 4 x16"""
    failures: float = 1000 * 419 / 54 / 16384
    """a day of 1,000 devices; Llama 3 had 419 in 54 days on 16,384 (arXiv:2407.21783, 3.3.4)"""
    restart: float = 5.0
    """minutes from a failure until the ranks begin to read the checkpoint"""
    pue: float = 1.1
    """energy of the building over that of the devices (arXiv:2302.13971, section 6)"""


HERE = Assumed(storage=1.0, copy=5.0, failures=0.0, restart=1.0, pue=1.0)  # this machine's disk
LEAST = {"storage": 1e-6, "copy": 1e-6, "pue": 1.0}  # the others may be 0
HINT = "NAME=VALUE, such as storage=400 (GB/s), failures=0.3 (a day of 1,000 devices), pue=1.3"


def read_assumed(words: Sequence[str], device: str) -> Assumed:
    """Replaces the usual rates of a kind of device by `NAME=VALUE`, several of them joined by
    commas. Raises MtcliError with every wrong one."""
    problems, changed = list[Problem](), dict[str, float]()
    for change in ",".join(words).split(",") if words else ():
        name, _, text = (part.strip() for part in change.partition("="))
        try:
            value = float(text)
        except ValueError:
            value = inf
        if name not in Assumed._fields:
            hint = f"{', '.join(Assumed._fields)}{closest(name, Assumed._fields)}"
            problems.append(Problem(f"{change!r} changes no assumption", hint, "--assume"))
        elif not isfinite(value) or value < LEAST.get(name, 0.0):
            problems.append(Problem(f"{change!r} is no rate", HINT, "--assume"))
        changed[name] = value
    if problems:
        raise MtcliError(*problems)
    return (HERE if device == "cpu" else Assumed())._replace(**changed)


def checkpoint_bytes(work: Workload) -> int:
    """Bytes of a checkpoint's tensors: weights in their compute dtype, masters, moments and their
    average of every parameter once; the weights under adapters are not in it. In bf16 AdamW has
    2 + 4 + 8 an element. Replicas that differ save a copy each."""
    exchange, sizes, total = exchange_of(work, 0), work.sizes, 0
    copies = work.layout.replicas if exchange.weights_differ else 1
    extra = sum(work.layout.replicas if kind.differs else 1 for kind in exchange.kept)
    for parameter in run_parameters(work.model, work.lora).values():
        width, wide = 0, sizes.master or sizes.weight
        if parameter.trained:
            moments = len(update_of(parameter, work.optimizer).rule.moments)
            state = sizes.master + moments * sizes.moment + (wide if work.ema else 0)
            width = copies * (sizes.weight + state) + extra * wide
        elif not parameter.frozen:
            width = copies * wide
        total += width * parameter.numel
    return total


class Interruptions(NamedTuple):
    """Seconds that saves and failures add to a run; `wall` is inf for one that never ends."""

    bytes: int  # of a checkpoint
    interval: float  # from one save to the next
    saves: int
    stall: float  # in which a save stops training
    write: float
    read: float  # by all ranks, each its weights, masters and moments
    between_failures: float
    lost: float  # in a failure
    best: float  # the interval of saves with which the run is shortest
    wall: float  # of the run
    at_best: float  # the run's with that interval

    @property
    def failures(self) -> float:
        """How many failures the run can expect."""
        return self.wall / self.between_failures


def interruptions(
    p: Prediction, train: TrainConfig, step: float, seconds: float, assumed: Assumed
) -> Interruptions:
    """Prices the saves and failures of a run whose training takes `seconds`, in steps of `step`."""
    layout, storage = p.work.layout, assumed.storage * GIGA
    written = checkpoint_bytes(p.work)
    state = sum(stage.weights + stage.optimizer for stage in p.stages) * layout.world / layout.pp
    write, read = written / storage, state / storage
    copy = p.memory.host / (assumed.copy * GIGA) if train.async_save else write
    by_steps, by_time = train.save_every * step, max(train.seconds_between_saves(copy), write)
    periods = [by_steps, by_time * (train.save_minutes > 0)]
    interval = min([seconds, *filter(None, periods)])
    daily = assumed.failures / 1000 * layout.world
    between = DAY / daily if daily else inf
    best = min(max(sqrt(2 * copy * between), write), seconds)

    def stall(period: float) -> float:
        return copy + max(0.0, write - period) * train.async_save  # for the write before it

    def lost(period: float) -> float:
        return period / 2 + write + MINUTE * assumed.restart + read

    def wall(period: float) -> float:
        running = seconds + ceil(seconds / period) * stall(period)
        return running / (1 - share) if (share := lost(period) / between) < 1 else inf

    return Interruptions(
        bytes=written,
        interval=interval,
        saves=ceil(seconds / interval),
        stall=stall(interval),
        write=write,
        read=read,
        between_failures=between,
        lost=lost(interval),
        best=best,
        wall=wall(interval),
        at_best=wall(best),
    )
