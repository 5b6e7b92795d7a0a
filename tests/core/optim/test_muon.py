"""Muon against torch.optim.Muon, and on every layout against one rank."""

import pytest
import torch
from tiny import GPT, LLAMA, MOE, Samples, run_config

from mtcli.core.config.schema import OptimizerConfig
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


def logical(name, x, split_heads):
    """The matrices that a weight stands for, by its layout alone."""
    layer = name.split(".")[-2]
    experts = x if ".experts." in name else [x]
    if layer == "gate_up":
        return [half for expert in experts for half in expert]
    if layer != "qkv":
        return list(experts)
    heads = [x[:, :-2], x[:, -2:-1], x[:, -1:]]
    return [y for role in heads for y in (role.flatten(0, 1) if split_heads else [role])]


class Theirs:
    """torch.optim.Muon of each logical matrix of a trainer's weights, and torch.optim.AdamW of the
    other parameters."""

    def __init__(self, trainer):
        self.table, o = trainer.table, trainer.config.optimizer
        self.split, self.weights = o.muon_split_heads, trainer.strategy.weights()
        update_of = {name: trainer.optimizer.update_of(name) for name in self.weights}
        self.matrices = {name for name, u in update_of.items() if u.rule.name == "muon"}
        self.parameters = {
            name: [torch.nn.Parameter(x.clone()) for x in self.parts(name, weight)]
            for name, weight in self.weights.items()
        }
        assert all(update_of[name].decays for name in self.matrices)
        muon = [p for name in self.matrices for p in self.parameters[name]]
        others, adamw = o.of_others, []
        for decays in (True, False):
            left = [n for n in self.weights if n not in self.matrices]
            of_kind = [n for n in left if update_of[n].decays == decays]
            parameters = [p for name in of_kind for p in self.parameters[name]]
            decay = others.weight_decay * decays
            adamw += [{"params": parameters, "weight_decay": decay}] if parameters else []
        settings = {"momentum": o.momentum, "nesterov": o.nesterov, "weight_decay": o.weight_decay}
        adjust = ADJUST[o.scale]
        self.optimizers = [
            (1.0, torch.optim.Muon(muon, lr=1.0, adjust_lr_fn=adjust, **settings)),
            (others.lr / o.lr, torch.optim.AdamW(adamw, betas=others.betas, eps=others.eps)),
        ]

    def parts(self, name, x):
        """The logical matrices of a weight or gradient; another parameter itself."""
        if name not in self.matrices:
            return [x]
        x = x.view(self.table[name].shape)
        return [matrix.reshape(-1, x.shape[-1]) for matrix in logical(name, x, self.split)]

    def note(self, gradients, factor):
        for name, gradient in gradients.items():
            parts = self.parts(name, gradient)
            for parameter, part in zip(self.parameters[name], parts, strict=True):
                parameter.grad = part * factor

    def step(self, lr):
        for share, optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * share
            optimizer.step()

    def largest_difference(self):
        pairs = (
            pair
            for name, weight in self.weights.items()
            for pair in zip(self.parts(name, weight), self.parameters[name], strict=True)
        )
        return max(float((a - b).abs().max()) for a, b in pairs)


def largest_difference(config):
    """Of weights after 20 steps from torch's, which are given the same gradients."""
    trainer = Trainer(config, ALONE)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    theirs, ours = Theirs(trainer), trainer.optimizer.step

    def noting_gradients(gradients, lr, factor=1.0):
        """The step writes over what it is given."""
        theirs.note(gradients, factor)
        ours(gradients, lr, factor)

    trainer.optimizer.step = noting_gradients
    for _ in range(20):
        theirs.step(trainer.train_step(loader).lr)
    return theirs.largest_difference()


OPTIMIZERS = [
    {"scale": "match_adamw", "lr": 0.01},
    {"scale": "spectral", "lr": 0.02, "nesterov": False, "other": {"lr": 1e-3, "eps": 1e-6}},
    {"scale": "spectral", "muon_split_heads": True, "momentum": 0.8, "clip": 0.1},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [GPT, LLAMA, MOE])
def test_twenty_steps_are_torchs(monkeypatch, model, optimizer):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())  # in which torch's iterates
    config = run_config(model, optimizer={"name": "muon"} | optimizer, train={"steps": 20})
    assert largest_difference(config) < 1e-6
