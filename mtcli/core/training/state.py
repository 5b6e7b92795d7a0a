"""The state of a run: where it starts, how a checkpoint captures it, and how it is restored.

Weights, optimizer and strategy state go as shards, each rank its own boxes. Counters, loss scale
and consumed samples go into the manifest's `extra`. Any layout restores what any other captured.
"""

import sys
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch

from mtcli.core.checkpoint.folder import CHECKPOINTS
from mtcli.core.checkpoint.manifest import OPTIMIZER
from mtcli.core.checkpoint.opening import newest_step, offering_earlier, open_agreed, together
from mtcli.core.checkpoint.progress import RandomState, RunProgress, progress_of
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.store import Shard
from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.schema import RunConfig
from mtcli.core.model import init
from mtcli.core.parallel.groups import Axis
from mtcli.core.parallel.ownership import OwnedShard
from mtcli.core.training.consumed_samples import ConsumedSamples
from mtcli.core.training.step import Trainer

# Fields that a resumed run keeps, besides those of [model]: they decide weights, batches and what
# the optimizer's state means.
FIXED = ("seed", "batch.seq_len", "batch.global_batch_size", "optimizer.name")
FIXED += ("data.document_mask", "data.document_positions")


class StartingPoint(NamedTuple):
    """Where a run starts: at its own newest checkpoint, another model's, or (None) the seed."""

    checkpoint: Checkpoint | None
    is_own: bool

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self.checkpoint.step if self.checkpoint and self.is_own else 0

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "the seed"
        return f"{self.checkpoint.folder}, step {self.checkpoint.step}"


def starting_point(config: RunConfig, weights_from: str | None, world: Axis) -> StartingPoint:
    """The run's newest checkpoint, or another model's, as all ranks agree; or the seed.

    Raises MtcliError for damaged files, and where the run's own checkpoint is of another run.
    """
    output = Path(config.train.output)
    if newest_step(output / CHECKPOINTS, world):
        checkpoint = open_agreed(output, world)

        def verify() -> None:
            with offering_earlier(checkpoint.folder):
                checkpoint.verify_hashes(world.rank, world.size)

        together(world, verify)
        require_same_run(config, checkpoint)
        return StartingPoint(checkpoint, is_own=True)
    if weights_from:
        checkpoint = open_agreed(Path(weights_from), world)
        together(world, lambda: checkpoint.verify_weights(world.rank, world.size))
        return StartingPoint(checkpoint, is_own=False)
    return StartingPoint(None, is_own=False)


def require_same_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """A resumed run may change its layout, precision and length, not its model, data or rule.

    The rate of the routers' biases may change, not whether there are any.
    """
    before = checkpoint.config
    if before is None:
        return
    fixed = {field: (attrgetter(field)(before), attrgetter(field)(config)) for field in FIXED}
    shapes = before.model.model_dump(), config.model.model_dump()
    fixed |= {f"model.{key}": (shapes[0][key], shapes[1][key]) for key in shapes[0]}
    if all(fixed["model.router_bias_update_rate"]):  # with biases, at any rate
        del fixed["model.router_bias_update_rate"]
    problems = [
        Problem(f"it is {new}, and the run was trained with {old}", f"set it back to {old}", field)
        for field, (old, new) in fixed.items()
        if old != new
    ]
    if problems:
        hint = "to change them, train from the run's weights: --init, and another train.output"
        raise MtcliError(*problems, hint=hint)


def progress(trainer: Trainer, samples: ConsumedSamples | None = None) -> RunProgress:
    """How far a run has come, and with which data where that is recorded."""
    return RunProgress(
        consumed_samples=trainer.consumed_samples,
        updates=trainer.optimizer.updates,
        loss_scale=trainer.loss_scale.state(),
        random=RandomState(seed=trainer.config.seed, step=trainer.step),
        samples=samples and samples.record(trainer.consumed_samples),
        sync=trainer.exchange.counters(),
    )


def shards(trainer: Trainer) -> list[Shard]:
    """The shards that this rank writes of weights and state, on its device, unpadded.

    Of what is equal in all replicas the first one's; of the rest each its own.
    """
    found = []
    strategy, exchange, table = trainer.strategy, trainer.exchange, trainer.table
    for name, (tensor, rows) in strategy.shards.items():
        if strategy.saves(name):
            weight = tensor.to(trainer.dtype) if table[name].trained else tensor
            shard = OwnedShard(weight, rows)
            found += _boxes(trainer, name, name, shard, exchange.weights_differ)
    for key, name, shard in _owned_state(trainer):
        if strategy.ownership.answers_for(name):
            differs = exchange.differs(key.partition("/")[0])
            found += _boxes(trainer, f"{OPTIMIZER}{key}", name, shard, differs)
    return found


def saved_replicas(trainer: Trainer) -> int:
    """The number of replicas that a checkpoint holds: 1 where all of its tensors are equal."""
    kinds = {key.partition("/")[0] for key, _, _ in _owned_state(trainer)}
    differ = trainer.exchange.weights_differ or any(map(trainer.exchange.differs, kinds))
    return trainer.layout.replicas if differ else 1


def _boxes(
    trainer: Trainer, stored: str, name: str, shard: OwnedShard, differs: bool
) -> list[Shard]:
    """The boxes of a parameter's shard, or of its state's, under the name it is `stored` by."""
    described, replica = trainer.table[name], trainer.groups.replicas.rank
    if replica and not differs:
        return []
    return [
        Shard(stored, view, box.start, described.shape, replica if differs else None)
        for box, view in shard.blocks(described, trainer.groups)
    ]


def _owned_state(trainer: Trainer) -> list[tuple[str, str, OwnedShard]]:
    """(`<kind>/<parameter>`, parameter, shard) of the optimizer's and the exchange's state."""
    found = []
    for key, tensor in (trainer.optimizer.state() | trainer.exchange.state()).items():
        name = key.partition("/")[2]
        rows = trainer.strategy.ownership.rows(name)
        found.append((key, name, OwnedShard(tensor, rows)))
    return found


def initialise(trainer: Trainer) -> None:
    """Fills the weights from the config's seed."""
    config = trainer.config
    where = trainer.strategy.shards, config.model, trainer.groups
    init.initialise(*where, config.seed, trainer.dtype)
    trainer.optimizer.reset_masters()
    trainer.exchange.begin()


def load_weights(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Takes the weights of any checkpoint of this model and starts at step 0."""
    init.load_weights(trainer.strategy.shards, checkpoint, trainer.config.model, trainer.groups)
    trainer.optimizer.reset_masters()
    trainer.exchange.begin()


@torch.no_grad()
def resume(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Restores a run's checkpoint but its consumed samples, whatever layout and precision wrote it.

    Master weights are lost in no precision; one that a checkpoint of fp32 lacks is the weight
    itself. State of an exchange that it lacks, of another method, starts at zero. Replicas that
    differ are restored where there are as many of them; else all start from their average. Raises
    MtcliError where the manifest's counters make no sense.
    """
    model, groups, done = trainer.config.model, trainer.groups, progress_of(checkpoint)
    same = checkpoint.replicas in (1, groups.replicas.size)
    if checkpoint.replicas > 1:
        own = groups.replicas.rank
        checkpoint = checkpoint.replica(own) if same else checkpoint.averaged()
    init.load_weights(trainer.strategy.shards, checkpoint, model, groups, from_masters=True)
    known, optional = set(checkpoint.names()), trainer.exchange.state()
    for key, name, shard in _owned_state(trainer):
        stored = f"{OPTIMIZER}{key}"
        if stored not in known and key.startswith("master/"):
            stored = name
        shard.tensor.zero_()
        if stored not in known and key in optional:
            continue
        for box, view in shard.blocks(trainer.table[name], groups):
            view.copy_(checkpoint.read(stored, box))
    trainer.optimizer.updates = checkpoint.step if done.updates is None else done.updates
    trainer.loss_scale.load(done.loss_scale and done.loss_scale.model_dump())
    trainer.step = checkpoint.step
    if not same:
        trainer.exchange.begin()
        if groups.rank == 0:
            sys.stderr.write(f"note: {_averaged(checkpoint.averages, groups.replicas.size)}\n")
    trainer.exchange.load_counters(done.sync if same else {})


def _averaged(before: int, now: int) -> str:
    return f"the run had {before} replicas and goes on with {now}, each from their average"


def restore(trainer: Trainer, samples: ConsumedSamples, start: StartingPoint) -> Path | None:
    """Fills the state of a run from where it starts; returns its own checkpoint, if that is one."""
    checkpoint = start.checkpoint
    if checkpoint is None:
        initialise(trainer)
    elif start.is_own:
        consumed = checkpoint.step * trainer.config.batch.global_batch_size
        samples.resume(progress_of(checkpoint).samples, consumed)
        resume(trainer, checkpoint)
        return checkpoint.folder
    else:
        load_weights(trainer, checkpoint)
    return None
