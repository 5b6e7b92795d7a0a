"""Replicas that exchange nothing are runs of their own, whatever layout each has inside."""

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, MOE, Samples, run_config

from mtcli.core.sync.exchange import ReplicaExchange
from mtcli.core.sync.replica_average import distance
from mtcli.core.training import step
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

STEPS = 3
SGD = {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip": 0.5}


class Shares:
    """The samples of one replica of some, of the batches that all of them have together."""

    def __init__(self, config, replica, replicas, data_ranks):
        self.all, self.size = Samples(config), config.batch.global_batch_size
        self.mbs = config.batch.micro_batch_size
        self.replica, self.replicas, self.data_ranks = replica, replicas, data_ranks

    def __len__(self):
        return len(self.all) // self.replicas

    def __getattr__(self, name):
        return getattr(self.all, name)

    def batch(self, start, count):
        rows = [self.all.batch(self._sample(start + i), 1) for i in range(count)]
        return torch.cat([torch.as_tensor(row) for row in rows]).numpy()

    def loss_weights(self, start, count):
        return None

    def _sample(self, own):
        """The global number of a replica's own sample: micro-batches go round all data ranks."""
        block, within = divmod(own, self.mbs)
        round_, rank = divmod(block, self.data_ranks)
        first = round_ * self.data_ranks * self.replicas + self.replica * self.data_ranks + rank
        return first * self.mbs + within


def run(runtime, config, shares=None):
    """(weights by name, rows that they are, gradient norm and loss of each step)."""
    # Of this forked process: nothing is exchanged.
    step.replica_exchange = lambda config, inside, optimizer: ReplicaExchange(inside, optimizer)
    trainer = Trainer(config, runtime)
    initialise(trainer)
    samples = Shares(config, *shares) if shares else Samples(config)
    loader = MicroBatchLoader(samples, config, trainer.groups)
    steps = [trainer.train_step(loader) for _ in range(STEPS)]
    boxes = {
        (name, box): view.clone()
        for name, shard in trainer.strategy.shards.items()
        for box, view in shard.blocks(trainer.groups)
    }
    apart = distance(trainer.exchange)
    return trainer.groups.replicas.rank, boxes, [(s.loss, s.grad_norm) for s in steps], apart


@pytest.mark.parametrize(
    ("model", "world", "parallel", "replicas", "data_ranks"),
    [
        (GPT, 2, {}, 2, 1),
        (GPT, 4, {"tp": 2}, 2, 1),
        (GPT, 4, {"zero": 1}, 2, 2),
        (GPT, 4, {"pp": 2}, 2, 1),
        (GPT, 4, {"cp": 2}, 2, 1),
        (MOE, 4, {"ep": 2}, 2, 2),
    ],
    ids=str,
)
def test_a_replica_is_the_one_rank_run_on_its_samples(model, world, parallel, replicas, data_ranks):
    sections = {
        "optimizer": SGD,
        "batch": {"global_batch_size": 8},
        "train": {"precision": "fp64", "steps": STEPS},
    }
    sync = {"method": "dsgd", "replicas": replicas}
    config = run_config(model, parallel=parallel, sync=sync, **sections)
    found = run_ranks(world, run, config)
    alone = run_config(model, **(sections | {"batch": {"global_batch_size": 8 // replicas}}))
    whole = [run_ranks(1, run, alone, (r, replicas, data_ranks))[0] for r in range(replicas)]
    means = [
        [sum(two) / replicas for two in zip(*each, strict=True)]
        for each in zip(*(steps for _, _, steps, _ in whole), strict=True)
    ]
    for replica, boxes, steps, _ in found:
        assert steps == [pytest.approx(mean, rel=1e-10) for mean in means]
        full = {name: tensor for (name, _), tensor in whole[replica][1].items()}
        for (name, box), shard in boxes.items():
            torch.testing.assert_close(shard, full[name][box.slices], rtol=0, atol=1e-12)
    assert not torch.equal(*(torch.cat([x.flatten() for x in w[1].values()]) for w in whole[:2]))
    flat = torch.stack([torch.cat([x.flatten() for x in w[1].values()]) for w in whole])
    exact = float((flat - flat.mean(0)).square().sum(1).mean().sqrt())
    assert [apart for *_, apart in found] == [pytest.approx(exact, rel=0.04)] * world
