"""A run by LAMB against a plain loop of the paper's."""

import pytest
import torch
from tiny import Samples, run_config

from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import load_weights
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
STEPS = 8
BOUNDS = (0.12, 0.3)
SETTINGS = {"name": "lamb", "lr": 0.1, "weight_decay": 0.2}


def plain_loop(model, config):
    """([(loss, norm)], {trust ratio}) of arXiv:1904.00962's algorithm 2, a parameter at a time."""
    o, kept = config.optimizer, {p: [torch.zeros_like(p)] * 2 for p in model.parameters()}
    done, ratios = [], []
    for step in range(STEPS):
        rows = torch.from_numpy(Samples(config).batch(4 * step, 4))
        logits = model(rows[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        norm = sum(float((x.grad**2).sum()) for x in kept) ** 0.5
        done.append((loss.item(), norm))
        for x, (m, v) in kept.items():
            g = x.grad * min(1.0, o.clip / norm)
            m = o.betas[0] * m + (1 - o.betas[0]) * g
            v = o.betas[1] * v + (1 - o.betas[1]) * g**2
            u = m / (v**0.5 + o.eps) + o.weight_decay * (x.dim() > 1) * x.data
            r = float((x.data**2).sum() / (u**2).sum()) ** 0.5
            ratios.append(min(max(r, o.trust_bounds[0]), o.trust_bounds[1]) if r else 1.0)
            x.data -= o.lr * ratios[-1] * u
            kept[x] = [m, v]
    return done, set(ratios)


def test_a_run_is_the_paper_s_loop_on_transformers_model(gpt2):
    model, checkpoint = gpt2
    fields = checkpoint.model.model_dump(exclude_none=True)
    settings = SETTINGS | {"clip": 0.5, "trust_bounds": BOUNDS}
    settings |= {"warmup_steps": 0, "schedule": "constant"}
    config = run_config(fields, optimizer=settings, train={"precision": "fp64", "steps": STEPS})
    trainer = Trainer(config, ALONE)
    load_weights(trainer, checkpoint)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    found = [trainer.train_step(loader) for _ in range(STEPS)]
    loader.close()
    expected, ratios = plain_loop(model.double(), config)
    assert {*BOUNDS, 1.0} < ratios, "both bounds are met, norms of 0, and what lies between"
    assert expected[0][1] > 0.5, "clipping is at work"
    for step, (loss, norm) in zip(found, expected, strict=True):
        assert step.loss == pytest.approx(loss, rel=1e-10)
        assert step.grad_norm == pytest.approx(norm, rel=1e-10)
