"""Updated weights that are gathered while the next forward runs (zero = 1 on a GPU)."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, Samples, run_config

from mtcli.core.mesh import sharding
from mtcli.core.model.block import Block
from mtcli.core.sync import methods
from mtcli.core.sync.all_reduce import Bucket, BucketedDataParallel
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise, shards
from mtcli.core.training.step import Trainer

IN_PLACE, COPIED = 1, 2**40  # elements of a parameter from which on it is gathered in place


def trainer_of(runtime, config, ahead, elements, stack):
    """A rank's trainer whose weights are gathered so, and its batches."""
    strategy = lambda *given, gathers_ahead: BucketedDataParallel(*given, gathers_ahead=ahead)  # noqa: E731
    stack.enter_context(patch.object(methods, "BucketedDataParallel", strategy))
    stack.enter_context(patch.object(sharding, "LARGE_ELEMENTS", elements))
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    stack.callback(loader.close)
    return trainer, loader


def trained(runtime, config, ahead, elements):
    """(losses of three steps, evaluated loss, weights as a checkpoint has them) of a rank."""
    with ExitStack() as stack:
        trainer, loader = trainer_of(runtime, config, ahead, elements, stack)
        losses = [trainer.train_step(loader).loss for _ in range(2)]
        valid = MicroBatchLoader(Samples(config), config, trainer.groups)
        evaluated = trainer.evaluate(valid)
        valid.close()
        losses.append(trainer.train_step(loader).loss)
        saved = {(s.name, *s.start): s.tensor.clone() for s in shards(trainer)}
        trainer.train_step(loader)
        trainer.strategy.settle()
        weights = {n: s.tensor.clone() for n, s in trainer.strategy.shards.items()}
    return losses, evaluated, saved, weights


def config_of(model, world, **parallel):
    batch = {"seq_len": 8, "micro_batch_size": 1, "global_batch_size": 2 * world}
    parallel = {"zero": 1, "bucket_mib": 0.005} | parallel
    train = {"precision": "fp64", "eval_batches": 1}
    return run_config(model, batch=batch, parallel=parallel, train=train)


LAYOUTS = {
    "gpt": (2, GPT, {}),
    "rows that do not divide": (3, LLAMA, {}),
    "experts": (2, MOE, {"ep": 2}),
    "tied ends of a pipeline": (4, GPT, {"pp": 2}),
    "chunks": (4, GPT, {"pp": 2, "vpp": 2, "schedule": "interleaved"}),
    "recomputed": (2, LLAMA, {"recompute": "full"}),
}


@pytest.mark.parametrize("elements", [IN_PLACE, COPIED])
@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_reads_a_weight_before_it_is_there(name, elements):
    world, model, parallel = LAYOUTS[name]
    config = config_of(model, world, **parallel)
    expected = run_ranks(world, trained, config, False, COPIED)
    found = run_ranks(world, trained, config, True, elements)
    for (losses, evaluated, *ours), (their_losses, theirs_evaluated, *theirs) in zip(
        found, expected, strict=True
    ):
        assert losses == their_losses and evaluated == theirs_evaluated
        for tensors, their_tensors in zip(ours, theirs, strict=True):
            assert tensors.keys() == their_tensors.keys()
            assert all(torch.equal(x, their_tensors[key]) for key, x in tensors.items())


def order(runtime, config):
    """In a rank's second step: blocks that are about to run, and names whose rows have come."""
    events, finish = [], Bucket.start_all_gather

    def started(bucket, parameters):
        wait = finish(bucket, parameters)

        def waiting():
            wait()
            events.extend(bucket.slots)

        return waiting

    def forward(block, *given, run=Block.forward):
        events.append(block)
        return run(block, *given)

    with (
        ExitStack() as stack,
        patch.object(Bucket, "start_all_gather", started),
        patch.object(Block, "forward", forward),
    ):
        trainer, loader = trainer_of(runtime, config, True, IN_PLACE, stack)
        trainer.train_step(loader)
        events.clear()
        trainer.train_step(loader)
        names = {block: name for name, block in trainer.stages[0].named_modules()}
        trainer.strategy.settle()
    return [names.get(event, event) for event in events]


def test_each_block_waits_for_its_own_weights_alone():
    model = LLAMA | {"tie_embeddings": False}
    for events in run_ranks(2, order, config_of(model, 2, bucket_mib=1e-6)):
        ran = [events.index(f"blocks.{layer}") for layer in range(4)]
        assert ran == sorted(ran)
        assert events[0] == "embedding.weight"
        for layer, end in enumerate(ran):
            arrived = events[ran[layer - 1] + 1 if layer else 1 : end]
            assert len(arrived) == 6 and all(n.startswith(f"blocks.{layer}.") for n in arrived)
        assert events[ran[3] + 1 :][:2] == ["final_norm.weight", "head.weight"]


def gathered_again(runtime):
    """The bytes that a gather allocates, of a parameter whose rows two owners share evenly."""
    with ExitStack() as stack:
        trainer, _ = trainer_of(runtime, config_of(GPT, 2), False, IN_PLACE, stack)
        bucket = next(b for b in trainer.strategy.buckets if "blocks.0.mlp.up.weight" in b.slots)
        copies = stack.enter_context(patch.object(Bucket, "_gather_copies"))
        bucket.start_all_gather({n: s.tensor for n, s in trainer.strategy.shards.items()})()
        return [set(call.args[0]) for call in copies.call_args_list]


def test_only_rows_that_do_not_divide_are_copied():
    assert run_ranks(2, gathered_again) == [[], []]
