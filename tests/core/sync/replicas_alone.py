"""Replicas that train each as a run of one rank, in one process: the oracle of what they exchange.

A method under test is given as a function of plain tensors that makes the step of all replicas.
"""

import torch
from tiny import Samples

from mtcli.core.optim.grad_norm import clip_factor
from mtcli.core.optim.lr_schedule import learning_rate
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))


class OfReplica(Samples):
    """The samples that one of n replicas has of each global batch, `data_ranks` of them inside."""

    def __init__(self, config, replica, replicas, data_ranks=1):
        super().__init__(config)
        self.own = replica, replicas, data_ranks * config.batch.micro_batch_size

    def batch(self, start, count):
        replica, replicas, block = self.own
        blocks, offset = divmod(start, block)
        return super().batch((blocks * replicas + replica) * block + offset, count)


class Alone:
    """n one-rank trainers of the samples of n replicas, from the same weights."""

    def __init__(self, config, replicas, data_ranks=1, samples=OfReplica):
        size = config.batch.global_batch_size // replicas
        parallel = type(config.parallel)()
        batch = config.batch.model_copy(update={"global_batch_size": size})
        sync = type(config.sync)()
        self.config = config.model_copy(update={"batch": batch, "parallel": parallel, "sync": sync})
        self.trainers = [Trainer(self.config, ALONE) for _ in range(replicas)]
        self.loaders = []
        for replica, trainer in enumerate(self.trainers):
            initialise(trainer)
            own = samples(config, replica, replicas, data_ranks)
            self.loaders.append(MicroBatchLoader(own, self.config, trainer.groups))

    def step(self, method):
        """Makes a step: method(x, g, lr), lists of a dict by name for each replica, changes x.

        Returns the mean loss, and the mean of the norms of gradients, which are clipped each by
        its own and have weight decay added.
        """
        losses, norms, gradients = [], [], []
        o, number = self.config.optimizer, self.trainers[0].step + 1
        for trainer, loader in zip(self.trainers, self.loaders, strict=True):
            loss, batch = trainer.forward_backward(loader)
            found = trainer.strategy.gradients
            norm = sum(float((g.double() ** 2).sum()) for g in found.values()) ** 0.5
            factor = clip_factor(norm, o.clip)
            weights, update_of = trainer.strategy.weights(), trainer.optimizer.update_of
            gradients.append(
                {
                    name: factor * g + o.weight_decay * update_of(name).decays * weights[name]
                    for name, g in found.items()
                }
            )
            losses.append(float(loss) / batch.labels)
            norms.append(norm)
            trainer.step = number
        lr = learning_rate(o, number, self.config.train.steps)
        method([trainer.strategy.weights() for trainer in self.trainers], gradients, lr)
        for trainer in self.trainers:
            trainer.balance.move_biases()
        return sum(losses) / len(losses), sum(norms) / len(norms)

    def weights(self, replica):
        """All tensors of one replica by name, its untrained ones too, without padding."""
        trainer = self.trainers[replica]
        return {
            name: view
            for name, shard in trainer.strategy.shards.items()
            for _, view in shard.blocks(trainer.groups)
        }

    def close(self):
        """Ends the readers."""
        for loader in self.loaders:
            loader.close()
