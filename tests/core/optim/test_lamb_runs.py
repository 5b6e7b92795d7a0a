"""Runs by LAMB: one rank against a plain loop of the paper's, and layouts that take over a run."""

import pytest
import torch
from tiny import GPT, Samples, run_config

from mtcli.core.model.build import build_stages
from mtcli.core.model.inputs import make_inputs
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
STEPS = 6
BOUNDS = (0.12, 0.3)
SETTINGS = {"name": "lamb", "lr": 0.1, "weight_decay": 0.2}


def plain_loop(config):
    """([(loss, norm)], {trust ratio}) of arXiv:1904.00962's algorithm 2, a parameter at a time."""
    o, trainer = config.optimizer, Trainer(config, ALONE)
    initialise(trainer)
    (stage,) = build_stages(config, trainer.groups).values()  # autograd returns its gradients
    stage.load_state_dict(trainer.stages[0].state_dict())
    weights = dict(stage.named_parameters())
    moments = {name: [torch.zeros_like(x)] * 2 for name, x in weights.items()}
    done, ratios = [], []
    for step in range(STEPS):
        rows = torch.from_numpy(Samples(config).batch(4 * step, 4))
        inputs = make_inputs(config.model, torch.float64, rows[:, :-1], labels=rows[:, 1:])
        loss = stage.losses(stage(None, inputs), inputs).mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        norm = sum(float((g**2).sum()) for g in gradients) ** 0.5
        done.append((loss.item(), norm))
        for (name, x), g in zip(weights.items(), gradients, strict=True):
            m, v = moments[name]
            g = g * min(1.0, o.clip / norm)
            m = o.betas[0] * m + (1 - o.betas[0]) * g
            v = o.betas[1] * v + (1 - o.betas[1]) * g**2
            decays = "norm" not in name and not name.endswith("bias")
            u = m / (v**0.5 + o.eps) + o.weight_decay * decays * x.data
            r = float((x.data**2).sum() / (u**2).sum()) ** 0.5
            ratios.append(min(max(r, o.trust_bounds[0]), o.trust_bounds[1]) if r else 1.0)
            x.data -= o.lr * ratios[-1] * u
            moments[name] = [m, v]
    return done, set(ratios)


def test_a_run_is_the_paper_s_loop():
    settings = SETTINGS | {"clip": 0.5, "trust_bounds": BOUNDS}
    settings |= {"warmup_steps": 0, "schedule": "constant"}
    model = GPT | {"num_layers": 2, "init_std": 0.1}
    config = run_config(model, optimizer=settings, train={"precision": "fp64", "steps": STEPS})
    trainer = Trainer(config, ALONE)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    found = [trainer.train_step(loader) for _ in range(STEPS)]
    loader.close()
    expected, ratios = plain_loop(config)
    assert {*BOUNDS, 1.0} < ratios, "both bounds are met, norms of 0, and what lies between"
    assert expected[0][1] > 0.5, "clipping is at work"
    for step, (loss, norm) in zip(found, expected, strict=True):
        assert step.loss == pytest.approx(loss, rel=1e-10)
        assert step.grad_norm == pytest.approx(norm, rel=1e-10)
