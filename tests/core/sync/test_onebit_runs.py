"""Runs by 1-bit LAMB and 1-bit Adam, beside a plain loop over the replicas in one process."""

import math

import pytest
import torch
from marks import slow, slow_cases
from ranks import run_ranks
from tiny import GPT, LLAMA, Samples, run_config
from trained import checkpoint_of, save_to

from mtcli.core.config.errors import MtcliError
from mtcli.core.exchange.facts import ReplicaShare
from mtcli.core.exchange.onebit import OneBitFacts
from mtcli.core.mesh.update_rules import update_of
from mtcli.core.optim.lr_schedule import learning_rate
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

    def __init__(self, config, replica, replicas):
        self.all, self.place = Samples(config), (replica, replicas)

    def __len__(self):
        return len(self.all) // self.place[1]

    def __getattr__(self, name):
        return getattr(self.all, name)

    def batch(self, start, count):
        assert count == 1
        replica, replicas = self.place
        return self.all.batch(start * replicas + replica, 1)


class PlainLoop:
    """arXiv:2104.06069's algorithm over replicas of one rank, a whole tensor at a time."""

    def __init__(self, config, replicas):
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
            share = Share(alone, i, replicas)
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
        o = self.config.optimizer
        return o.weight_decay * update_of(self.table[name], o).decays

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
        self.scale, roots = {}, {}
        for n, v in self.v.items():
            mean = v[v > 0].mean() if v.any() else 0.0
            self.v[n] = torch.where(v > 1e-8 * mean, v, 0.0)
        self.live = {n: v > 0 for n, v in self.v.items()}
        for n, live in self.live.items():
            roots[n] = float(self.m[n][live].square().mean()) ** 0.5 if live.any() else 0.0
        moved = [root for root in roots.values() if root > 0]
        for n, root in roots.items():
            self.scale[n] = sum(moved) / len(moved) / root if root > 0 else 1.0
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
            {
                n: (o.betas[0] * before[n] + (1 - o.betas[0]) * g) * self.live[n]
                for n, g in gs.items()
            }
            for gs in gradients
        ]
        if self.replicas == 1:
            self.m = own[0]
        else:
            for i, m in enumerate(own):
                y = {n: m[n] * self.scale[n] + self.errors[i][n] for n in m}
                q, self.errors[i] = self.signs(y)
                sent.append(q)
            mean = {n: sum(q[n] for q in sent) / self.replicas + self.server[n] for n in before}
            q, self.server = self.signs(mean)
            self.m = {n: q[n] / self.scale[n] for n in q}
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
        for box, view in shard.blocks(trainer.groups)
    }
    if folder and stop < STEPS:
        save_to(folder, trainer)
    where = trainer.groups.layout.coordinates(runtime.rank)
    return boxes, [(s.loss, s.grad_norm) for s in steps], sent, weights, where


@pytest.mark.parametrize(("model", "replicas"), [(LLAMA, 3), (GPT, 1)], ids=["llama", "gpt"])
@pytest.mark.parametrize("optimizer", [LAMB, ADAM], ids=["lamb", "adamw"])
def test_a_run_has_the_weights_of_the_paper_s_loop(model, replicas, optimizer):
    """The parity table has its layouts."""
    config = config_of(model, replicas=replicas, optimizer=optimizer)
    loop = PlainLoop(config, replicas)
    start = {n: x.clone() for n, x in loop.x.items()}
    expected = loop.run()
    assert (replicas == 1) == (not any(e.any() for e in loop.errors[0].values()))
    for boxes, steps, _, _, _ in run_ranks(replicas, trained, config):
        assert steps[0][1] > config.optimizer.clip, "clipping is at work"
        for (name, box), shard in boxes.items():
            if name not in expected:
                continue
            whole = expected[name].view(loop.table[name].local_shape(loop.trainers[0].layout))
            torch.testing.assert_close(shard, whole[box.slices], rtol=0, atol=1e-10)
    assert all((expected[n] - start[n]).norm() > 1e-3 * start[n].norm() for n in expected)


@pytest.mark.parametrize("optimizer", [LAMB, ADAM], ids=["lamb", "adamw"])
def test_the_warm_up_is_the_run_of_one_replica(optimizer):
    config = config_of(optimizer=optimizer)
    alone = config.model_copy(update={"sync": run_config(GPT).sync})
    (_, whole, *_), (_, ours, sent, *_) = (run_ranks(2, trained, c)[0] for c in (alone, config))
    assert ours[:WARMUP] == [pytest.approx(pair, rel=1e-12) for pair in whole[:WARMUP]]
    assert ours[WARMUP + 2] != pytest.approx(whole[WARMUP + 2], rel=1e-6)
    assert len(set(sent[:WARMUP])) == 1 and max(sent[WARMUP:]) < sent[0] / 30


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [(LAMB, "bf16"), *slow_cases("2 s", (ADAM, "fp16"))],
    ids=["lamb", "adamw"],
)
def test_weights_are_the_same_bits_on_all_ranks_after_every_step(optimizer, precision):
    config = config_of(parallel={"tp": 2}, optimizer=optimizer, precision=precision)
    ranks = run_ranks(4, trained, config)
    for *_, weights, where in ranks[1:]:
        for ours, first in zip(weights, ranks[where["tp"]][3], strict=True):
            assert all(torch.equal(x, first[name]) for name, x in ours.items())
    assert ranks[0][1][-1][0] < ranks[0][1][0][0], "the loss falls"


def resumed(runtime, config, folder, start):
    boxes, steps, *_ = trained(runtime, config, folder, start)
    return boxes, steps


def first_part(runtime, config, folder, stop):
    trained(runtime, config, folder, 0, stop)


@slow("five runs, 6 s; the parity table has such runs resumed in float64")
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path):
    config = config_of(parallel={"tp": 2}, precision="bf16")
    whole = run_ranks(4, trained, config)
    for stop in (2, 6):  # in the warm-up, and where signs are sent
        run_ranks(4, first_part, config, tmp_path, stop)
        for rank, (boxes, steps) in enumerate(run_ranks(4, resumed, config, tmp_path, stop)):
            assert steps == whole[rank][1][stop:]
            assert all(torch.equal(x, whole[rank][0][box]) for box, x in boxes.items())


def errors_after(runtime, config, folder, start, capture):
    """Whether there are errors after a restart, what the warm-up left, and the words of it."""
    trainer = Trainer(config, runtime)
    with capture(runtime) as said:
        resume(trainer, checkpoint_of(folder, start))
    mean, numbers = trainer.exchange.mean, trainer.exchange.counters()
    here = [bool(mean.error.any()), bool(mean.server_error.any())] if mean else [False, False]
    return here, numbers, said.getvalue()


class Captured:
    """stderr of a rank."""

    def __init__(self, runtime):
        self.text = None

    def __enter__(self):
        import contextlib
        import io

        self.text = io.StringIO()
        self.redirect = contextlib.redirect_stderr(self.text)
        self.redirect.__enter__()
        return self.text

    def __exit__(self, *error):
        self.redirect.__exit__(*error)


@pytest.mark.parametrize("world", [2, 3])
def test_another_number_of_replicas_resets_the_errors_and_says_so_once(world, tmp_path):
    run_ranks(2, first_part, config_of(), tmp_path, 6)
    config = config_of(replicas=3) if world == 3 else config_of()
    ranks = run_ranks(world, errors_after, config, tmp_path, 6, Captured)
    for rank, (errors, numbers, said) in enumerate(ranks):
        assert errors == [world == 2] * 2
        assert numbers == ranks[0][1] and numbers["frozen_at"] == WARMUP
        assert said.count("errors of compression are reset to 0") == (world != 2 and rank == 0)


def counters_refused(runtime, counters):
    trainer = Trainer(config_of(), runtime)
    initialise(trainer)
    known = trainer.exchange.counters() | counters
    try:
        trainer.exchange.load_counters(known)
    except MtcliError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("counters", "said"),
    [
        ({"frozen_at": "soon"}, "error: the checkpoint's counters of onebit: frozen_at:"),
        ({"scale": [float("nan")]}, "error: the checkpoint's counters of onebit: scale.0:"),
        ({"live": [1.0, 2.0]}, "error: the checkpoint has live of 2 parameters, not of 28"),
        ({}, None),
    ],
    ids=str,
)
def test_counters_that_make_no_sense_are_refused(counters, said):
    (found,) = run_ranks(1, counters_refused, counters)
    assert (found is None) if said is None else found.startswith(said), found


def measured(runtime, config, steps):
    """(bytes sent in each step, elements owned, bytes of the exchange's state)."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    sent = []
    for _ in range(steps):
        trainer.train_step(loader)
        sent.append(trainer.sync_traffic.taken())
    loader.close()
    owned = sum(x.numel() for x in trainer.strategy.weights().values())
    return sent, owned, sum(x.nbytes for x in trainer.exchange.buffers())


@pytest.mark.parametrize(
    ("world", "parallel", "precision"),
    [(3, {}, "fp32"), *slow_cases("2 s", (4, {"tp": 2}, "fp16"), (2, {"pp": 2}, "bf16"))],
    ids=str,
)
def test_plan_tells_the_bytes_that_are_sent_and_kept(world, parallel, precision):
    model = GPT | {"hidden_size": 64, "vocab_size": 512}
    replicas = world // (parallel.get("tp", 1) * parallel.get("pp", 1))
    train = {"loss_scale": 1024.0} if precision == "fp16" else {}
    config = config_of(model, parallel, 3 * (replicas == 3), precision=precision, steps=6, **train)
    width = 4 if precision == "fp32" else 2
    ranks = run_ranks(world, measured, config, 6)
    planned = [
        OneBitFacts(ReplicaShare(config.sync, 6, replicas, {"w": owned}, width, config.optimizer))
        for _, owned, _ in ranks
    ]
    sent = sum(one.sent_bytes() for one in planned)
    assert sum(sum(steps) for steps, *_ in ranks) / 6 == pytest.approx(sent, rel=0.01)
    kept = sum(one.state_bytes() for one in planned)
    assert sum(state for *_, state in ranks) == pytest.approx(kept, rel=1e-6)


@slow("24 steps of 4 ranks, 4 s")
def test_the_volume_is_the_paper_s_share_of_float16_s_over_its_schedule():
    """A sixth of the steps is the warm-up, as in the paper's run at length 128 (1000 of 5993):
    1 / (1/6 + 5/6 / 16) = 4.57, its 4.6."""
    model = GPT | {"hidden_size": 128, "vocab_size": 512}
    config = config_of(model, precision="fp16", steps=24, loss_scale=1024.0)
    ranks = run_ranks(4, measured, config, 24)
    float16 = sum(24 * 2 * 3 / 4 * 2 * owned for _, owned, _ in ranks)
    ratio = float16 / sum(sum(sent) for sent, *_ in ranks)
    assert round(ratio, 1) >= 4.6
