"""Replicas trained one at a time on one rank, and their pulls written out: the oracle of LSGD and
EASGD. A replica has the gradients of a one-rank run on its part of the data; all else is here."""

from itertools import pairwise

import torch
from tiny import Samples, run_config
from trained import checkpoint_of, save_to

from mtcli.core.parallel.ownership import OwnedShard
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.rounds import Rounds
from mtcli.core.training.state import initialise, resume
from mtcli.core.training.step import Trainer

SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "schedule": "constant", "warmup_steps": 0}
BATCH = 8  # sequences of a global batch


def worker_config(model, sync, parallel=None, precision="fp64", **optimizer):
    """The config of a run of replicas whose learning rate is constant."""
    return run_config(
        model,
        parallel=parallel or {},
        sync=sync,
        batch={"global_batch_size": BATCH},
        optimizer=SGD | optimizer,
        train={"precision": precision},
    )


class Scripted:
    """Tickets that workers take in an order that is written down, of the whole run."""

    def __init__(self, order, worker, first=0):
        self.order, self.worker, self.next = order, worker, first

    def take(self, first, end):
        self.next = max(self.next, first)
        while self.next < end:
            self.next += 1
            if self.order[self.next - 1] == self.worker:
                return self.next - 1
        return None


def turns(workers, steps):
    """The order of workers of the same speed."""
    return list(range(workers)) * steps


def train_workers(runtime, config, folder=None, start=0, stop=5, order=None, data=Samples):
    """The steps start + 1 .. stop, from folder's checkpoint of `start` or the seed; saved there.

    Asynchronous workers take tickets in an `order`.
    """
    trainer = Trainer(config, runtime)
    if start:
        resume(trainer, checkpoint_of(folder, start))
    else:
        initialise(trainer)
    loader = MicroBatchLoader(data(config), config, trainer.groups)
    next_step = trainer.train_step
    if order:
        next_step = Rounds(trainer, Scripted(order, trainer.groups.replicas.rank)).train
    done = []
    while trainer.step < stop:
        done.append(next_step(loader))
    loader.close()
    if folder:
        save_to(folder, trainer)
    return done


def weights_of(folder, step):
    """The weights of each replica in a checkpoint, by name."""
    checkpoint = checkpoint_of(folder, step)
    names = [name for name in checkpoint.names() if not name.startswith("optimizer.")]
    views = [checkpoint.replica(index) for index in range(checkpoint.replicas)]
    return [{name: view.read(name) for name in names} for view in views]


class Part(Samples):
    """A part of each global batch, as a run of its own: of `parts`, each of `dp` data ranks."""

    def __init__(self, config, part, parts, dp):
        super().__init__(config)
        self.part, self.parts, self.dp = part, parts, dp

    def batch(self, start, count):
        return self.rows[[self._number(i) % len(self.rows) for i in range(start, start + count)]]

    def _number(self, i):
        step, i = divmod(i, BATCH // self.parts)
        micro_batch, data_rank = divmod(i, self.dp)  # of one sequence each
        return step * BATCH + (micro_batch * self.parts + self.part) * self.dp + data_rank


def one_at_a_time(runtime, config, workers, dp=1, order=None, steps=5):
    """(the weights of each worker, its losses), whose steps come in an order: ticket k is part
    k mod n of batch k div n. They exchange each time that all have made `period` on average."""
    alone = run_config(
        config.model.model_dump(exclude_defaults=True),
        batch={"global_batch_size": BATCH // workers},
        optimizer=SGD,
        train={"precision": config.train.precision},
    )
    trainer = Trainer(alone, runtime)
    initialise(trainer)
    here = {name: shard.tensor for name, shard in trainer.strategy.shards.items()}
    x = [{name: tensor.clone() for name, tensor in here.items()} for _ in range(workers)]
    momentum = [{name: torch.zeros_like(t) for name, t in here.items()} for _ in range(workers)]
    centre, losses = {name: t.clone() for name, t in here.items()}, [[] for _ in range(workers)]
    for ticket, worker in enumerate(order or turns(workers, steps)):
        for name, tensor in here.items():
            tensor.copy_(x[worker][name])
        trainer.step, part = divmod(ticket, workers)
        loader = MicroBatchLoader(Part(alone, part, workers, dp), alone, trainer.groups)
        loss_sum, batch = trainer.forward_backward(loader)
        loader.close()
        losses[worker].append(float(loss_sum) / batch.labels)
        decayed = {name for name in here if trainer.optimizer.update_of(name).decays}
        sgd(config.optimizer, x[worker], momentum[worker], trainer.strategy.gradients, decayed)
        if (ticket + 1) % workers == 0:
            pull(config.sync, x, losses, centre, (ticket + 1) // workers)
    return [as_saved(one, trainer) for one in x], losses


def sgd(config, x, momentum, gradients, decayed):
    """One clipped step of SGD with momentum and weight decay of some."""
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    factor = min(1.0, config.clip / norm) if config.clip else 1.0
    for name, gradient in gradients.items():
        g = gradient * factor
        if name in decayed:
            g = g + config.weight_decay * x[name]
        momentum[name] = config.momentum * momentum[name] + g
        g = g + config.momentum * momentum[name] if config.nesterov else momentum[name]
        x[name] = x[name] - config.lr * g


def pull(sync, x, losses, centre, step):
    """The exchange after a step, worker by worker: LSGD's pulls, or EASGD's and the centre's."""
    every, n = sync.steps_between, len(x)
    if sync.method == "easgd" and step % every == 0:
        moved = {name: sum(one[name] - c for one in x) for name, c in centre.items()}
        for one in x:
            towards(one, centre, sync.pull)
        for name in centre:
            centre[name] = centre[name] + sync.pull * moved[name]
    if sync.method == "lsgd":
        means = [sum(run[-every:]) / len(run[-every:]) if run else float("inf") for run in losses]
        size = sync.workers_of_group(n)
        if step % every == 0:
            for first, end in pairwise(range(0, n + 1, size)):
                lead(x, means, range(first, end), sync.pull)
        if step % sync.steps_between_global == 0:
            lead(x, means, range(n), sync.global_pull)


def lead(x, means, workers, share):
    """Pulls some workers to the first of them that has the least loss."""
    least = min(means[worker] for worker in workers)
    leader = x[next(worker for worker in workers if means[worker] == least)]
    target = dict(leader)
    for worker in workers:
        towards(x[worker], target, share)


def towards(one, target, share):
    for name in one:
        one[name] = one[name] - share * (one[name] - target[name])


def as_saved(weights, trainer):
    """Weights in the shapes of a checkpoint, without the rows that pad a vocabulary."""
    found = {}
    for name, x in weights.items():
        described = trainer.table[name]
        found[name] = x.new_empty(described.shape)
        for box, view in OwnedShard(described, x, slice(0, len(x))).blocks(trainer.groups):
            found[name][box.slices] = view
    return found
