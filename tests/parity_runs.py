"""How a row of the parity table is measured: by its oracle, on its layout, and on another."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from parity_factors import STEPS, STOP, Row
from ranks import run_ranks
from trained import checkpoint_of, save_to

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import run_parameters
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import StartingPoint, base_record, initialise, resume
from mtcli.core.training.step import Trainer


class Measured(NamedTuple):
    """What a rank saw: the weights it started from and the first gradients it keeps, each by name
    with their rows, and the loss and gradient norm of each step."""

    replica: int
    weights: dict
    gradients: dict
    losses: list
    norms: list


def train_on(runtime, config, samples, steps=STEPS, folder=None):
    """The Measured of some steps on a rank, which saves step STOP in a folder, if one is given."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    _move_adapters(trainer)
    shards, ownership = trainer.strategy.shards, trainer.strategy.ownership
    weights = {name: (shard.tensor.clone(), shard.rows) for name, shard in shards.items()}
    loader = MicroBatchLoader(samples(config), config, trainer.groups)
    done = [trainer.train_step(loader)]
    gradients = {n: (g.clone(), ownership.rows(n)) for n, g in trainer.strategy.gradients.items()}
    done += [trainer.train_step(loader) for _ in range(min(steps, STOP) - 1)]
    if folder:
        save_to(folder, trainer, _base(runtime, trainer, folder / "base"))
    done += [trainer.train_step(loader) for _ in range(steps - len(done))]
    loader.close()
    frozen = {name for name in shards if trainer.table[name].frozen}
    assert all(torch.equal(shards[name].tensor, weights[name][0]) for name in frozen)
    curve = [step.loss for step in done], [step.grad_norm for step in done]
    return Measured(trainer.groups.replicas.rank, weights, gradients, *curve)


def _move_adapters(trainer):
    """Fills the Bs of adapters, which begin at 0, where no A has a gradient."""
    for name, shard in trainer.strategy.shards.items():
        if ".adapter.b." in name:
            described = trainer.table[name]
            values = 0.1 * torch.sin(torch.arange(1.0, described.numel + 1)).view(described.shape)
            for box, view in shard.blocks(trainer.groups):
                view.copy_(values[box.slices])
    trainer.optimizer.reset_masters()


def _base(runtime, trainer, folder):
    """The record of the weights that adapters are for, which are saved; None without adapters."""
    if not trainer.config.lora.rank:
        return None
    plain = trainer.config.model_copy(update={"lora": type(trainer.config.lora)()})
    base = Trainer(plain, runtime)
    initialise(base)
    folder.mkdir(exist_ok=True)
    save_to(folder, base)
    return base_record(trainer, StartingPoint(checkpoint_of(folder, 0), is_own=False))


def resumed(runtime, config, samples, folder):
    """(losses, gradient norms) of the steps after STOP, from its checkpoint, on a rank."""
    trainer = Trainer(config, runtime)
    resume(trainer, checkpoint_of(folder, STOP))
    loader = MicroBatchLoader(samples(config), config, trainer.groups)
    done = [trainer.train_step(loader) for _ in range(STEPS - STOP)]
    loader.close()
    return [step.loss for step in done], [step.grad_norm for step in done]


def measure(runtime, row, after, folder):
    """The Measured of a rank: until STOP as a row, then as the row that goes on."""
    first = train_on(runtime, row.config(), row.samples, STOP, folder)
    losses, norms = resumed(runtime, after.config(), row.samples, folder)
    return first._replace(losses=first.losses + losses, norms=first.norms + norms)


class Oracle(NamedTuple):
    """A run without parallelism: the Measured of each replica, and the tensors of its checkpoint by
    name and replica."""

    replicas: list
    state: dict


def oracle(row, precision="fp64", steps=STEPS):
    """The Oracle of a row, which rows of the same training share."""
    return _oracle(json.dumps(row.oracle), precision, steps)


@cache
def _oracle(text, precision, steps):
    row = Row(*json.loads(text))
    with TemporaryDirectory(prefix="parity-") as name:
        folder = Path(name)
        config = row.config(precision, steps)
        ranks = run_ranks(row.world, train_on, config, row.samples, steps, folder)
        replicas = {rank.replica: rank for rank in reversed(ranks)}
        return Oracle([replicas[r] for r in sorted(replicas)], state_of(folder))


def state_of(folder):
    """The tensors of a checkpoint of step STOP by name and replica, a run's own where it has
    adapters."""
    checkpoint = checkpoint_of(folder, STOP)
    own = checkpoint.adapters.own if checkpoint.adapters else checkpoint
    pairs = [(name, replica) for name in own.names() for replica in own.replicas_of(name)]
    return {(name, replica): own.read(name, replica=replica) for name, replica in pairs}


class Differences(NamedTuple):
    """The largest relative differences of a row from its oracle: the first gradients by parameter
    norm, losses and norms of all steps, and the tensors of the checkpoint by their norms."""

    gradients: float
    curve: float
    state: float


def compare(row, after):
    """The Differences of a row that goes on as another, on another layout. Raises AssertionError
    where an initial weight differs in any bit, or a checkpoint has other tensors."""
    exact = oracle(row)
    with TemporaryDirectory(prefix="parity-") as name:
        folder = Path(name)
        ranks = run_ranks(row.world, measure, row, after, folder)
        found = state_of(folder)
    assert set().union(*(rank.weights for rank in ranks)) == set(exact.replicas[0].weights)
    assert found.keys() == exact.state.keys()
    state = [state_off(row, key[0], found[key], x) for key, x in exact.state.items()]
    gradients = [gradients_off(row, n, rank, exact) for n, rank in enumerate(ranks)]
    curves = [curve_off(rank, exact) for rank in ranks]
    return Differences(*(float(torch.tensor(each).max()) for each in (gradients, curves, state)))


def state_off(row, name, found, expected):
    """The relative difference of a tensor of a checkpoint.

    Where a bias moves no softmax its gradient is rounding, of which an optimizer makes a step: that
    of all choices is passed over, and of the keys' it is 6e-11 of a projection's biases.
    """
    if row.model.get("head") == "multiple_choice" and name.endswith("head.classifier.bias"):
        return 0.0
    return off(found, expected) / (10.0 if name.endswith("attention.qkv.bias") else 1.0)


def off(found, expected):
    """The norm of a difference over that of what is expected; both may be 0."""
    size = expected.double().norm()
    return float((found.double() - expected).norm() / (size if size else 1.0))


def gradients_off(row, rank, mine, exact):
    """The largest relative difference of a rank's gradients from its boxes of the oracle's, zeros
    where it holds padding. Raises AssertionError where a weight starts otherwise."""
    config, whole = row.config(), exact.replicas[mine.replica]
    layout, one = ParallelLayout.of_run(config, row.world), ParallelLayout(1)
    table, found = run_parameters(config.model, config.lora), []
    largest = max(gradient.norm() for gradient, _ in whole.gradients.values())
    # Of a replica all of whose loss weights are 0 the losses of routers alone have gradients.
    may_vanish = row.replicas > 1 and row.level("samples") == "weights"

    def expected(name, tensor, rows):
        """The rows of a rank's box of a tensor of the oracle."""
        box = table[name].box(layout, rank)
        local = tensor.new_zeros(table[name].local_shape(layout))
        local[box.inside] = tensor.view(table[name].local_shape(one))[box.slices]
        return local.view(table[name].stored_shape(layout))[rows]

    for name, (weight, rows) in mine.weights.items():
        start = expected(name, whole.weights[name][0], rows)
        assert torch.equal(weight, start), f"{name} starts otherwise"
    for name, (gradient, rows) in mine.gradients.items():
        whole_gradient, _ = whole.gradients[name]
        norm = whole_gradient.norm()
        # A bias of all choices moves no softmax, so that rounding is all that its gradient is. Any
        # other gradient is held to its own norm: of these models all are above 7e-5 of the largest.
        rounding = name == "head.classifier.bias" and config.model.head == "multiple_choice"
        vanishes = bool(norm < 1e-6 * largest)
        assert rounding == vanishes or may_vanish, f"{name} has a gradient of norm {norm}"
        error = gradient - expected(name, whole_gradient, rows)
        scale = largest if vanishes else norm
        found.append(float(error.norm() / (scale if scale else 1.0)))
    return float(torch.tensor([0.0, *found]).nan_to_num(nan=torch.inf).max())


def curve_off(mine, exact):
    """The largest relative difference of losses and gradient norms, in the steps that both did."""
    a, b = (
        torch.tensor([m.losses, m.norms], dtype=torch.float64) for m in (exact.replicas[0], mine)
    )
    steps = min(a.shape[1], b.shape[1])
    return float(((a - b)[:, :steps].abs() / a[:, :steps].abs()).max())
