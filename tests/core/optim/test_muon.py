"""Muon against torch.optim.Muon, and on every layout against one rank."""

import pytest
import torch

from tiny import GPT, LLAMA, MOE, Samples, run_config

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.mesh.matrices import matrix_stacks
from mtcli.core.mesh.sharding import Box
from mtcli.core.optim.newton_schulz import orthogonalised
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

ALONE = Runtime(0, 1, 0, 1, torch.device("cpu"))
SHAPES = [(64, 64), (128, 32), (24, 96)]
ADJUST = {"spectral": "original", "match_adamw": "match_rms_adamw"}


@pytest.mark.parametrize("shape", SHAPES)
def test_an_iteration_in_bfloat16_is_torchs_to_the_bit(shape):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
    ours = orthogonalised(x.bfloat16(), OptimizerConfig(name="muon"))
    coefficients = (3.4445, -4.7750, 2.0315)
    theirs = [
        torch.optim._muon._zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7) for matrix in x
    ]
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=0, atol=0)


def in_float32(monkeypatch):
    """Has torch.optim.Muon iterate in the gradient's dtype."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())


def largest_difference(runtime, config):
    """Of weights after 20 steps from torch's, which are given the same gradients: Muon of each
    logical matrix, and AdamW of the other parameters."""
    trainer, o = Trainer(config, runtime), config.optimizer
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    weights, table = trainer.strategy.weights(), trainer.table
    theirs, groups, views = {}, {True: [], False: []}, {}
    adam = {True: [], False: []}
    for name, weight in weights.items():
        update = trainer.optimizer.update_of(name)
        if update.rule.name == "adamw":
            theirs[name] = [torch.nn.Parameter(weight.clone())]
            adam[update.decays] += theirs[name]
            continue
        shape = table[name].shape
        stacks = matrix_stacks(table[name], Box.of(shape), o.muon_split_heads)
        views[name] = [(s.box.slices, (-1, s.rows, s.columns)) for s in stacks]
        cut = [weight.view(shape)[box].reshape(size) for box, size in views[name]]
        theirs[name] = [torch.nn.Parameter(x.clone()) for stack in cut for x in stack]
        groups[update.decays] += theirs[name]
    assert not groups[False]
    rest, decays = o.of_others, (True, False)
    muon = torch.optim.Muon(
        groups[True],
        lr=1.0,
        weight_decay=o.weight_decay,
        momentum=o.momentum,
        nesterov=o.nesterov,
        adjust_lr_fn=ADJUST[o.scale],
    )
    adamw = torch.optim.AdamW(
        [{"params": adam[d], "weight_decay": rest.weight_decay * d} for d in decays if adam[d]],
        betas=rest.betas,
        eps=rest.eps,
    )
    ours = trainer.optimizer.step

    def noting_gradients(gradients, lr, factor=1.0):
        """The step writes over what it is given."""
        for name, gradient in gradients.items():
            parts = [gradient]
            if name in views:
                g = gradient.view(table[name].shape)
                parts = [x for box, size in views[name] for x in g[box].reshape(size)]
            for parameter, part in zip(theirs[name], parts, strict=True):
                parameter.grad = part * factor
        ours(gradients, lr, factor)

    trainer.optimizer.step = noting_gradients
    for _ in range(20):
        step = trainer.train_step(loader)
        for optimizer, scale in ((muon, 1.0), (adamw, rest.lr / o.lr)):
            for group in optimizer.param_groups:
                group["lr"] = step.lr * scale
            optimizer.step()
    differences = []
    for name, parameters in theirs.items():
        weight = weights[name]
        parts = [weight]
        if name in views:
            whole = weight.view(table[name].shape)
            parts = [x for box, size in views[name] for x in whole[box].reshape(size)]
        pairs = zip(parts, parameters, strict=True)
        differences += [float((a - b).abs().max()) for a, b in pairs]
    return max(differences)


OPTIMIZERS = [
    {"scale": "match_adamw", "lr": 0.01},
    {"scale": "spectral", "lr": 0.02, "nesterov": False, "other": {"lr": 1e-3, "eps": 1e-6}},
    {"scale": "spectral", "muon_split_heads": True, "momentum": 0.8, "clip": 0.1},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [GPT, LLAMA, MOE])
def test_twenty_steps_are_torchs(monkeypatch, model, optimizer):
    in_float32(monkeypatch)
    config = run_config(model, optimizer={"name": "muon"} | optimizer, train={"steps": 20})
    assert largest_difference(ALONE, config) < 1e-6
