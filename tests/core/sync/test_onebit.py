"""Runs by 1-bit LAMB and 1-bit Adam, beside a plain loop over the replicas in one process."""

import math

import pytest
import torch
from ranks import run_ranks
from tiny import GPT, LLAMA, MOE, Samples, run_config
from trained import checkpoint_of, save_to

from mtcli.core.config.errors import MtcliError
from mtcli.core.mesh.sharding import Box
from mtcli.core.optim.lr_schedule import learning_rate
from mtcli.core.plan.sync_onebit import onebit_bytes, onebit_state
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise, resume
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
STEPS, WARMUP = 9, 4
LAMB = {"name": "lamb", "lr": 0.1, "weight_decay": 0.2, "clip": 0.5}
ADAM = {"name": "adamw", "lr": 0.01, "weight_decay": 0.2, "clip": 0.5}
TWO = {"num_layers": 2}


def config_of(model=GPT, parallel=(), replicas=0, optimizer=LAMB, **train):
    train = {"precision": "fp64", "steps": STEPS, "matmul": "strict"} | train
    sync = {"method": "onebit", "replicas": replicas, "warmup_steps": WARMUP}
    batch = {"global_batch_size": 12 if replicas == 3 else 8}
    sections = {"optimizer": optimizer, "train": train, "batch": batch}
    return run_config(model | TWO, parallel=dict(parallel), sync=sync, **sections)


class Share:
    """The samples of one replica, of the batches that all of them have together."""

    def __init__(self, config, replica, replicas, data_ranks):
        self.all, self.place = Samples(config), (replica, replicas, data_ranks)

    def __len__(self):
        return len(self.all) // self.place[1]

    def __getattr__(self, name):
        return getattr(self.all, name)

    def batch(self, start, count):
        assert count == 1
        replica, replicas, data_ranks = self.place
        turn, rank = divmod(start, data_ranks)  # micro-batches go round all data ranks
        return self.all.batch((turn * replicas + replica) * data_ranks + rank, 1)


class PlainLoop:
    """arXiv:2104.06069's algorithm over replicas of one rank, a whole tensor at a time."""

    def __init__(self, config, replicas, data_ranks):
        self.config, self.replicas = config, replicas
        size = config.batch.global_batch_size // replicas
        alone = config.model_copy(
            update={
                "sync": run_config(GPT).sync,
                "parallel": run_config(GPT).parallel,
                "batch": config.batch.model_copy(update={"global_batch_size": size}),
            }
        )
        self.trainers = [Trainer(alone, ALONE) for _ in range(replicas)]
        self.loaders = []
        for i, trainer in enumerate(self.trainers):
            initialise(trainer)
            share = Share(alone, i, replicas, data_ranks)
            self.loaders.append(MicroBatchLoader(share, alone, trainer.groups))
        self.x = {n: w.clone() for n, w in self.trainers[0].strategy.weights().items()}
        self.table, zeros = self.trainers[0].table, {n: 0 * w for n, w in self.x.items()}
        self.m, self.v, self.server = dict(zeros), dict(zeros), dict(zeros)
        self.errors = [dict(zeros) for _ in range(replicas)]
        self.ratio, self.weight = dict.fromkeys(zeros, 0.0), dict.fromkeys(zeros, 0.0)

    def run(self, steps=STEPS):
        """Trains; returns the weights."""
        for step in range(1, steps + 1):
            self.lr = learning_rate(self.config.optimizer, step, self.config.train.steps)
            gradients = [self._gradients(i) for i in range(self.replicas)]
            if step <= WARMUP:
                mean = {n: sum(g[n] for g in gradients) / self.replicas for n in self.x}
                self.warm(step, self.clipped(mean))
                if step == WARMUP:
                    self.freeze()
            else:
                self.compressed(step, [self.clipped(g) for g in gradients])
        return self.x

    def _gradients(self, i):
        trainer = self.trainers[i]
        for name, weight in trainer.strategy.weights().items():
            weight.copy_(self.x[name])
        trainer.forward_backward(self.loaders[i])
        trainer.step += 1
        return {n: g.clone() for n, g in trainer.strategy.gradients.items()}

    def clipped(self, gradients):
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        factor = min(1.0, self.config.optimizer.clip / norm)
        return {n: g * factor for n, g in gradients.items()}

    def decay(self, name):
        return self.config.optimizer.weight_decay * self.table[name].decays

    def warm(self, step, gradients):
        o = self.config.optimizer
        for n, g in gradients.items():
            self.m[n] = o.betas[0] * self.m[n] + (1 - o.betas[0]) * g
            self.v[n] = o.betas[1] * self.v[n] + (1 - o.betas[1]) * g**2
            if o.name == "adamw":
                self.adam(n, step, step)
                continue
            u = self.m[n] / (self.v[n].sqrt() + o.eps) + self.decay(n) * self.x[n]
            c = 1.0
            if self.x[n].any() and u.any():
                c = float(self.x[n].norm() / u.norm())
                c = min(max(c, o.trust_bounds[0]), o.trust_bounds[1])
                self.ratio[n] = 0.9 * self.ratio[n] + 0.1 * c
                self.weight[n] = 0.9 * self.weight[n] + 0.1
            self.x[n] = self.x[n] - self.lr * c * u

    def adam(self, n, step, frozen_at):
        o = self.config.optimizer
        self.x[n] = self.x[n] * (1 - self.lr * self.decay(n))
        m = self.m[n] / (1 - o.betas[0] ** step)
        v = self.v[n] / (1 - o.betas[1] ** frozen_at)
        self.x[n] = self.x[n] - self.lr * m / (v.sqrt() + o.eps)

    def freeze(self):
        eps, self.unit, roots = self.config.optimizer.eps, {}, {}
        for n, v in self.v.items():
            mean = v[v > 0].mean() if v.any() else 0.0
            self.v[n] = torch.where(v > 1e-8 * mean, v, 0.0)
        self.live = {n: v > 0 for n, v in self.v.items()}
        for n, live in self.live.items():
            self.unit[n] = 1 / (self.v[n].sqrt() + eps)
            scaled = (self.m[n] * self.unit[n])[live]
            roots[n] = scaled.square().mean().sqrt() if live.any() else torch.zeros(())
        moved = [root for root in roots.values() if root > 0]
        for n, root in roots.items():
            self.unit[n] = self.unit[n] * (sum(moved) / len(moved) / root if root > 0 else 1.0)
        self.fresh = {n: v.clone() for n, v in self.v.items()}
        self.factor = dict.fromkeys(self.v, 1.0)
        self.count = sum(int(live.sum()) for live in self.live.values())

    def signs(self, y):
        """(scale * sign of each tensor, the errors that are left): one scale of all."""
        y = {n: t * self.live[n] for n, t in y.items()}
        scale = math.sqrt(sum(float(t.square().sum()) for t in y.values()) / self.count)
        q = {n: scale * (2.0 * (t >= 0).double() - 1.0) * self.live[n] for n, t in y.items()}
        return q, {n: t - q[n] for n, t in y.items()}

    def compressed(self, step, gradients):
        o, before, sent = self.config.optimizer, self.m, []
        own = [
            {n: (o.betas[0] * before[n] + (1 - o.betas[0]) * g) * self.live[n] for n, g in gs.items()}
            for gs in gradients
        ]
        if self.replicas == 1:
            self.m = own[0]
        else:
            for i, m in enumerate(own):
                y = {n: m[n] * self.unit[n] + self.errors[i][n] for n in m}
                q, self.errors[i] = self.signs(y)
                sent.append(q)
            mean = {n: sum(q[n] for q in sent) / self.replicas + self.server[n] for n in before}
            q, self.server = self.signs(mean)
            self.m = {n: q[n] / self.unit[n] for n in q}
        for n in self.x:
            if o.name == "adamw":
                self.adam(n, step, WARMUP)
                continue
            g = (self.m[n] - o.betas[0] * before[n]) / (1 - o.betas[0])
            self.fresh[n] = o.betas[1] * self.fresh[n] + (1 - o.betas[1]) * g**2
            denominator = self.v[n].sqrt() + o.eps
            quotient = (denominator / (self.fresh[n].sqrt() + o.eps))[self.live[n]]
            r = float(quotient.max()) if quotient.numel() else 1.0
            u_p = self.m[n] / denominator
            u = u_p + self.decay(n) * self.x[n]
            omega = min(1.0, float(u_p.norm() / u.norm())) if u.any() else 1.0
            r = min(max(r * omega + 1 - omega, 0.5), 4.0)
            self.factor[n] = min(max(r, 0.9 * self.factor[n]), 1.1 * self.factor[n])
            c = self.ratio[n] / self.weight[n] if self.weight[n] else 1.0
            self.x[n] = self.x[n] - self.lr * c * self.factor[n] * u


def trained(runtime, config, folder=None, start=0, stop=STEPS):
    """(boxes of the weights after some steps, steps, bytes sent for data parallelism in each)."""
    trainer = Trainer(config, runtime)
    if start:
        resume(trainer, checkpoint_of(folder, start))
    else:
        initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    steps, sent, weights = [], [], []
    for _ in range(stop - start):
        steps.append(trainer.train_step(loader))
        sent.append(trainer.sync_traffic.taken())
        weights.append({n: s.tensor.clone() for n, s in trainer.strategy.shards.items()})
    loader.close()
    boxes = {
        (name, box): view.clone()
        for name, shard in trainer.strategy.shards.items()
        for box, view in shard.blocks(trainer.table[name], trainer.groups)
    }
    if folder and stop < STEPS:
        save_to(folder, trainer)
    where = trainer.groups.layout.coordinates(runtime.rank)
    return boxes, [(s.loss, s.grad_norm) for s in steps], sent, weights, where


@pytest.mark.parametrize(
    ("model", "world", "parallel", "replicas", "data_ranks"),
    [
        (GPT, 2, {}, 2, 1),
        (LLAMA, 3, {}, 3, 1),
        (GPT, 1, {}, 1, 1),
        (GPT, 4, {"tp": 2}, 2, 1),
        (GPT, 4, {"pp": 2}, 2, 1),
        (GPT, 4, {"cp": 2}, 2, 1),
        (GPT, 4, {"tp": 2, "sequence_parallel": False}, 2, 1),
        (LLAMA, 4, {"zero": 1}, 2, 2),
        (GPT, 4, {"zero": 3}, 2, 2),
        (MOE, 4, {"ep": 2}, 2, 2),
        (MOE, 4, {"ep": 2, "etp": 1, "tp": 2, "zero": 1}, 2, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", [LAMB, ADAM], ids=["lamb", "adamw"])
def test_any_layout_has_the_weights_of_the_paper_s_loop(
    model, world, parallel, replicas, data_ranks, optimizer
):
    config = config_of(model, parallel, replicas, optimizer)
    loop = PlainLoop(config, replicas, data_ranks)
    start = {n: x.clone() for n, x in loop.x.items()}
    expected = loop.run()
    assert (replicas == 1) == (not any(e.any() for e in loop.errors[0].values()))
    for boxes, steps, _, _, _ in run_ranks(world, trained, config):
        assert steps[0][1] > config.optimizer.clip, "clipping is at work"
        for (name, box), shard in boxes.items():
            if name not in expected:
                continue
            whole = expected[name].view(loop.table[name].local_shape(loop.trainers[0].layout))
            torch.testing.assert_close(shard, whole[box.slices], rtol=0, atol=1e-10)
    assert all((expected[n] - start[n]).norm() > 1e-3 * start[n].norm() for n in expected)
