"""The state of a run: where it starts, how a checkpoint captures it, and how it is restored.

Weights, optimizer and strategy state go as shards, each rank its own boxes. Counters, loss scale
and consumed samples go into the manifest's `extra`. Any layout restores what any other captured.
"""

import sys
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from mtcli.core.checkpoint.adapters import base_of, require_adapters, require_scale, weights_hash
from mtcli.core.checkpoint.compatibility import missing_head
from mtcli.core.checkpoint.fine_tuning import no_base
from mtcli.core.checkpoint.folder import CHECKPOINTS
from mtcli.core.checkpoint.integrity import verify_hashes, verify_weights
from mtcli.core.checkpoint.manifest import OPTIMIZER
from mtcli.core.checkpoint.new_rows import with_new_rows
from mtcli.core.checkpoint.opening import newest_step, offering_earlier, open_agreed
from mtcli.core.checkpoint.reader import Checkpoint
from mtcli.core.checkpoint.run_progress import (
    BaseRecord,
    RandomState,
    RunProgress,
    ValidationState,
    progress_of,
)
from mtcli.core.checkpoint.store import Shard
from mtcli.core.config.errors import MtcliError, Problem
from mtcli.core.config.phases import PhaseSpan, phase_after, phases_of
from mtcli.core.config.schema import RunConfig
from mtcli.core.data.indexed import tokenizer_folder
from mtcli.core.data.vocabulary import vocabulary_notes
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.model import init
from mtcli.core.optim.loss_scale import LossScale
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.optim.weight_average import KIND, WeightAverage
from mtcli.core.parallel.groups import Axis, Groups
from mtcli.core.parallel.ownership import OwnedShard
from mtcli.core.parallel.together import together
from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.strategy import Strategy
from mtcli.core.training.consumed_samples import ConsumedSamples, data_hashes
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.run_tokenizer import new_ids, new_token_notes

# Fields that a resumed run keeps, besides those of [model]: they decide weights, batches and what
# the optimizer's state means.
FIXED: tuple[str, ...]
FIXED = ("seed", "data.seed", "batch.seq_len", "batch.global_batch_size", "optimizer.name")
FIXED += ("lora.rank", "lora.alpha", "lora.targets", "lora.modules_to_save")
FIXED += ("train.freeze", "train.new_tokens")
FIXED += ("data.document_mask", "data.document_positions", "data.format", "data.chat_template")
FIXED += ("data.loss_on",)
OF_PHASES: tuple[str, ...]
OF_PHASES = ("batch.seq_len", "batch.global_batch_size", "model.max_seq_len")
OF_PHASES += ("model.rope_theta", "model.rope_scaling")
# Optimizers whose exp_avg is the same mean of gradients: one goes on from the other's checkpoint.
SAME_MEAN = {"adamw", "muon"}


class RunState(Protocol):
    """What checkpoints capture and restore: a Trainer, or one model of an array."""

    config: RunConfig
    span: PhaseSpan
    groups: Groups
    dtype: torch.dtype
    table: Mapping[str, Parameter]
    optimizer: Optimizer
    average: WeightAverage
    exchange: ReplicaExchange
    loss_scale: LossScale
    step: int

    @property
    def strategy(self) -> Strategy:
        """The strategy that holds weights and gradients."""

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the run's ranks."""

    @property
    def consumed_samples(self) -> int:
        """Sequences trained on so far."""


class StartingPoint(NamedTuple):
    """Where a run starts: at its own newest checkpoint, another model's, or (None) the seed."""

    checkpoint: Checkpoint | None
    is_own: bool

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self.checkpoint.step if self.checkpoint and self.is_own else 0

    def close(self) -> None:
        """Closes the run's own checkpoint, which its saves may then prune."""
        if self.checkpoint and self.is_own:
            _own(self.checkpoint).close()

    def __str__(self) -> str:
        if self.checkpoint is None:
            return "the seed"
        return f"{self.checkpoint.folder}, step {self.checkpoint.step}"


def _own(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint that the run itself wrote: the adapters', where it trains adapters."""
    return checkpoint.adapters.own if checkpoint.adapters else checkpoint


def starting_point(config: RunConfig, world: Axis) -> StartingPoint:
    """Finds the run's newest checkpoint, or that of train.init, or the seed; equal on all ranks.

    Raises MtcliError for damaged files, and where the run's own checkpoint is of another run.
    """
    output = Path(config.train.output)
    if newest_step(output / CHECKPOINTS, world):
        checkpoint = open_agreed(
            output, world, config.train.base or config.train.init, flag="--init"
        )

        def verify() -> None:
            with offering_earlier(checkpoint.folder):
                verify_hashes(checkpoint, world.rank, world.size)

        together(world, verify)
        require_same_run(config, checkpoint)
        return StartingPoint(checkpoint, is_own=True)
    if config.train.init:
        checkpoint = open_agreed(Path(config.train.init), world, config.train.base)
        together(world, lambda: verify_weights(checkpoint, world.rank, world.size))
        if ids := together(world, lambda: new_ids(config)):
            checkpoint = with_new_rows(checkpoint, config.model.vocab_size, ids)
        return StartingPoint(checkpoint, is_own=False)
    if config.lora.rank:
        raise no_base(config.lora)
    return StartingPoint(None, is_own=False)


def starting_notes(config: RunConfig, start: StartingPoint) -> list[str]:
    """Notes on the weights that a run starts from.

    Another model's: the parameters that they lack, which begin from the seed, and whether they
    average replicas that differ. The seed's: whether the data uses the vocabulary. `resume` reports
    on the run's own.
    """
    if start.checkpoint is None:
        return vocabulary_notes(config)
    if start.is_own:
        return []
    fresh = ", ".join(sorted(missing_head(start.checkpoint, config.model)))
    notes = [f"note: {fresh} begin from the seed"] if fresh else []
    notes += new_token_notes(config)
    if start.checkpoint.weights_differ:
        notes.append(f"note: {start.checkpoint.averaging}")
    return notes


def with_tokenizer(config: RunConfig, start: StartingPoint) -> RunConfig:
    """The config with the tokenizer that came with the starting weights.

    It is set for runs that read texts or mask tokens, where neither config nor data names one.
    """
    data, folder = config.data, start.checkpoint and start.checkpoint.tokenizer_folder
    if config.model.head == "lm" or data.tokenizer or not folder:
        return config
    if data.format == "tokens" and any(map(tokenizer_folder, data.train)):
        return config
    named = data.model_copy(update={"tokenizer": str(folder)})
    return config.model_copy(update={"data": named})


def require_same_run(config: RunConfig, checkpoint: Checkpoint) -> None:
    """Raises MtcliError where a resumed run changes its model, data order or update rule.

    Layout, precision and length may change, and the rate of the routers' biases, but not whether
    there are biases; and AdamW may change to Muon, or back. Compares what is in force at the
    checkpoint's step: a later phase changes what it may.
    """
    saved, span = _own(checkpoint).config, phase_after(phases_of(config), checkpoint.step)
    if saved is None:
        return
    config = span.config
    fixed = {field: (attrgetter(field)(saved), attrgetter(field)(config)) for field in FIXED}
    shapes = saved.model.model_dump(), config.model.model_dump()
    fixed |= {f"model.{key}": (shapes[0][key], shapes[1][key]) for key in shapes[0]}
    if saved.model.has_router_biases and config.model.has_router_biases:
        del fixed["model.router_bias_update_rate"], fixed["model.router_biases"]
    if {*fixed["optimizer.name"]} == SAME_MEAN:
        del fixed["optimizer.name"]
    record = progress_of(checkpoint).samples
    token = record.tokens if record else span.tokens_before(checkpoint.step)
    problems = [
        Problem(
            f"it is {new}, and the run was trained with {old}",
            f"set it back to {old}"
            + f"; a [[phase]] with from_tokens = {token} or more changes it" * (field in OF_PHASES),
            field,
        )
        for field, (old, new) in fixed.items()
        if old != new
    ]
    problems += _other_phases(checkpoint, span)
    if problems:
        hint = "to change them, train from the run's weights: --init, and another train.output"
        raise MtcliError(*problems, hint=hint)


def _other_phases(checkpoint: Checkpoint, span: PhaseSpan) -> list[Problem]:
    """Lists where a run has other phases before its checkpoint's step than it was trained by."""
    done, planned = progress_of(checkpoint), span.samples_before(checkpoint.step)
    if done.samples is None:
        return []
    pairs = {
        f"{planned:,} sequences in its first {checkpoint.step:,} steps": (
            planned, done.consumed_samples, f"{done.consumed_samples:,}"
        ),
        f"an order of samples that begins at {span.samples[0]:,}": (
            span.samples[0], done.samples.first, f"one from {done.samples.first:,} on"
        ),
    }  # fmt: skip
    return [
        Problem(
            f"the phases give {now}, and the run was trained with {then}",
            "leave the phases before this step as they were, and change later ones",
            "phase",
        )
        for now, (new, old, then) in pairs.items()
        if new != old
    ]


def progress(
    trainer: RunState,
    samples: ConsumedSamples | None = None,
    base: BaseRecord | None = None,
    validation: ValidationState | None = None,
) -> RunProgress:
    """The run's progress for a checkpoint, with its samples, its adapters' base and its validation
    losses where given."""
    return RunProgress(
        base=base,
        validation=validation,
        consumed_samples=trainer.consumed_samples,
        updates=trainer.optimizer.updates,
        loss_scale=trainer.loss_scale.state(),
        random=RandomState(seed=trainer.config.seed, step=trainer.step),
        samples=samples and samples.record(trainer.consumed_samples),
        sync=trainer.exchange.counters(),
    )


def shards(trainer: RunState) -> list[Shard]:
    """The shards of weights and state that this rank writes, on its device, unpadded.

    State that is equal on all replicas comes from the first, state sharded over replicas from its
    owner, differing state from each. A LoRA run writes adapters only.
    """
    own_shards = []
    strategy, exchange = trainer.strategy, trainer.exchange
    strategy.settle()
    is_first = trainer.groups.replicas.rank == 0
    writes = is_first or exchange.weights_differ
    omits_frozen = trainer.config.lora.rank > 0
    for name, shard in strategy.shards.items():
        frozen = shard.parameter.frozen
        if writes and strategy.saves(name) and not (frozen and omits_frozen):
            if shard.parameter.trained or frozen:
                shard = shard._replace(tensor=shard.tensor.to(trainer.dtype))
            own_shards += _boxes(trainer, name, shard, exchange.weights_differ)
    for key, shard in _owned_state(trainer).items():
        kind, _, name = key.partition("/")
        differs, shared_out = exchange.differs(kind), exchange.rows_here(kind, name) is not None
        if strategy.ownership.answers_for(name) and (is_first or differs or shared_out):
            own_shards += _boxes(trainer, f"{OPTIMIZER}{key}", shard, differs)
    return own_shards


def saved_replicas(trainer: RunState) -> int:
    """The number of replicas that a checkpoint holds: 1 where all of its tensors are equal."""
    kinds = {key.partition("/")[0] for key in _owned_state(trainer)}
    differ = trainer.exchange.weights_differ or any(map(trainer.exchange.differs, kinds))
    return trainer.layout.replicas if differ else 1


def _boxes(trainer: RunState, name: str, shard: OwnedShard, differs: bool) -> list[Shard]:
    """The boxes of a shard of a parameter, or of its state, by its name in a checkpoint."""
    replica = trainer.groups.replicas.rank if differs else None
    return [
        Shard(name, view, box.start, shard.parameter.shape, replica)
        for box, view in shard.blocks(trainer.groups)
    ]


def _owned_state(trainer: RunState) -> dict[str, OwnedShard]:
    """The shards of the optimizer's and the exchange's state, by `<kind>/<parameter>`."""
    state = {}
    tensors = trainer.optimizer.state() | trainer.average.state() | trainer.exchange.state()
    for key, tensor in tensors.items():
        kind, _, name = key.partition("/")
        rows = trainer.exchange.rows_here(kind, name) or trainer.strategy.ownership.rows(name)
        state[key] = OwnedShard(trainer.table[name], tensor, rows)
    return state


def initialise(trainer: RunState) -> None:
    """Fills the weights from the config's seed."""
    _fill_from_seed(trainer, trainer.strategy.shards)
    trainer.optimizer.reset_masters()
    trainer.average.begin()
    trainer.exchange.begin()


def load_weights(trainer: RunState, checkpoint: Checkpoint) -> None:
    """Loads the weights of any checkpoint of this model, to start at step 0.

    A head that the checkpoint lacks begins from the seed. A LoRA run loads frozen weights, and the
    checkpoint's adapters or, without any, adapters from the seed.
    """
    config = trainer.config
    if not config.lora.rank:
        where = trainer.strategy.shards, checkpoint, config.model, trainer.groups
        init.load_weights(*where, new_head=config.seed)
    else:
        _load_frozen(trainer, checkpoint)
        if checkpoint.adapters:
            _load_adapters(trainer, checkpoint.adapters.own.averaged())
            require_scale(checkpoint.adapters, config.lora)
        else:
            shards = trainer.strategy.shards
            adapters = {name: s for name, s in shards.items() if s.parameter.of_adapter}
            _fill_from_seed(trainer, adapters)
    trainer.optimizer.reset_masters()
    trainer.average.begin()
    trainer.exchange.begin()


def _fill_from_seed(trainer: RunState, shards: Mapping[str, OwnedShard]) -> None:
    config = trainer.config
    init.initialise(shards, config.model, trainer.groups, config.seed, trainer.dtype)


def _load_frozen(trainer: RunState, checkpoint: Checkpoint) -> None:
    """Fills the weights that adapters are trained for."""
    shards = trainer.strategy.shards
    frozen = {name: shard for name, shard in shards.items() if not shard.parameter.of_adapter}
    init.load_weights(frozen, base_of(checkpoint), trainer.config.model, trainer.groups)


@torch.no_grad()
def _load_adapters(trainer: RunState, adapters: Checkpoint, from_masters: bool = False) -> None:
    """Fills adapters and modules that are trained whole from a checkpoint's. Raises MtcliError
    where these do not fit."""
    require_adapters(adapters, trainer.config.model, trainer.config.lora)
    for shard in trainer.strategy.shards.values():
        if shard.parameter.trained:
            init.load_shard(shard, trainer.groups, adapters, from_masters)


@torch.no_grad()
def resume(trainer: RunState, checkpoint: Checkpoint) -> None:
    """Restores a run's checkpoint but its consumed samples, whatever layout and precision wrote it.

    A master weight that an fp32 checkpoint lacks is the weight itself. Exchange state that the
    checkpoint lacks, as another method wrote it, starts at zero. Replicas that differ are restored
    each where their number is the same; else all start from their average. Raises
    MtcliError where the manifest's counters make no sense.
    """
    model, groups, done = trainer.config.model, trainer.groups, progress_of(checkpoint)
    saved = _own(checkpoint)
    count, same = saved.replicas, saved.replicas in (1, groups.replicas.size)
    if saved.replicas > 1:
        saved = saved.replica(groups.replicas.rank) if same else saved.averaged()
    if checkpoint.adapters:
        _load_frozen(trainer, checkpoint)
        _load_adapters(trainer, saved, from_masters=True)
    else:
        init.load_weights(trainer.strategy.shards, saved, model, groups, from_masters=True)
    stored_names, optional = set(saved.names()), trainer.exchange.state()
    afresh = _changes_optimizer(trainer, saved)
    for key, shard in _owned_state(trainer).items():
        stored = f"{OPTIMIZER}{key}"
        if stored not in stored_names and key.startswith(f"{KIND}/"):
            stored = f"{OPTIMIZER}master/{shard.parameter.name}"
        if stored not in stored_names and key.startswith(("master/", f"{KIND}/")):
            stored = shard.parameter.name
        shard.tensor.zero_()
        kind = key.partition("/")[0]
        if (stored not in stored_names and key in optional) or (
            afresh and kind in trainer.optimizer.moments
        ):
            continue
        for box, view in shard.blocks(groups):
            view.copy_(saved.read(stored, box))
    updates = checkpoint.step if done.updates is None else done.updates
    trainer.optimizer.updates = 0 if afresh else updates
    trainer.loss_scale.load(None if done.loss_scale is None else done.loss_scale.model_dump())
    trainer.step = checkpoint.step
    if same:
        trainer.exchange.load_counters(done.sync)
        return
    average = "their average" if checkpoint.weights_differ else "the weights"
    start = trainer.exchange.rejoin(done.sync) or average
    if groups.rank == 0:
        now = groups.replicas.size
        who = f"all {now} replicas start" if now > 1 else "the run goes on"
        sys.stderr.write(f"note: the checkpoint has {count} replicas: {who} from {start}\n")


def _changes_optimizer(trainer: RunState, saved: Checkpoint) -> bool:
    """Whether the optimizer's moments begin at zero, as the checkpoint's optimizer has others; says
    what a change of optimizer loses, or changes."""
    if saved.config is None:
        return False
    was, now, notes = saved.config.optimizer, trainer.config.optimizer, []
    if (was.name, now.name) == ("muon", "adamw"):
        notes.append(
            "the checkpoint is muon's, which has no exp_avg_sq of matrices: adamw's moments begin "
            "at zero, and its bias correction at step 1"
        )
    elif (was.name, now.name) == ("adamw", "muon"):
        notes.append(
            "the checkpoint is adamw's: muon's momentum begins from exp_avg, and exp_avg_sq of "
            "matrices is dropped"
        )
    elif now.name == "muon":
        notes += [
            f"optimizer.{field} was {getattr(was, field)!r} and is {getattr(now, field)!r}: steps "
            "have another size at the same lr"
            for field in ("scale", "ns_coefficients", "ns_steps", "muon_split_heads")
            if getattr(was, field) != getattr(now, field)
        ]
    if trainer.groups.rank == 0:
        sys.stderr.writelines(f"note: {note}\n" for note in notes)
    return was.name == "muon" != now.name


def base_record(trainer: RunState, start: StartingPoint) -> BaseRecord | None:
    """The frozen weights that a run's adapters are for; None where the run trains all weights."""
    if not trainer.config.lora.rank or start.checkpoint is None:
        return None
    base = base_of(start.checkpoint)
    return BaseRecord(path=str(base.folder.absolute()), hash=weights_hash(base))


def restore(
    trainer: RunState, loader: MicroBatchLoader, start: StartingPoint, local_rank: int
) -> tuple[ConsumedSamples, Path | None, BaseRecord | None]:
    """Fills the state of a run from its starting point, and closes that checkpoint. Collective.

    Returns (the samples it has read, its own checkpoint if any, its adapters' base if any).
    """
    hashes = data_hashes(loader.batches, local_rank, trainer.groups.world)
    where = loader.batches, hashes, loader.subset, trainer.span
    samples = ConsumedSamples(trainer.config, *where)
    checkpoint, last_good = start.checkpoint, None
    if checkpoint is None:
        initialise(trainer)
    elif start.is_own:
        consumed = trainer.span.samples_before(checkpoint.step)
        samples.resume(progress_of(checkpoint).samples, consumed)
        resume(trainer, checkpoint)
        last_good = checkpoint.folder
    else:
        load_weights(trainer, checkpoint)
    base = base_record(trainer, start)
    start.close()
    return samples, last_good, base
