"""Muon against torch.optim.Muon, and on every layout against one rank."""

import pytest
import torch
from tiny import GPT, LLAMA, MOE, Samples, run_config

from mtcli.core.config.model import ModelConfig
from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.matrices import assigned, boxes_of_ranks, chunks, matrix_stacks
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Box
from mtcli.core.optim.newton_schulz import POLYNOMIALS, orthogonalised
from mtcli.core.plan.memory import state_bytes
from mtcli.core.plan.workload import Workload
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


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (1, 1), (5, 8)])
def test_degenerate_matrices_stay_finite(shape):
    zeros = orthogonalised(torch.zeros(2, *shape), OptimizerConfig(name="muon"))
    assert torch.equal(zeros, torch.zeros(2, *shape))
    ones = orthogonalised(torch.full((1, *shape), 1e-20), OptimizerConfig(name="muon"))
    (largest, *others) = torch.linalg.svdvals(ones[0].double()).tolist()
    assert 0.6 < largest < 1.3 and max(others, default=0.0) < 1e-3


# Of the scalar iteration: the images of singular values between 0.01 and 1.
IMAGES = {"jordan": (0.68, 1.14), "quintic5": (0.97, 1.04), "polar_express": (0.85, 1.15)}


@pytest.mark.parametrize("name", IMAGES)
def test_singular_values_come_near_1_and_vectors_stay(name):
    generator = torch.Generator().manual_seed(3)
    u, v = (
        torch.linalg.qr(torch.randn(n, 24, dtype=torch.float64, generator=generator))[0]
        for n in (24, 40)
    )
    # divided by their norm they lie between 0.01 and 1
    values = torch.logspace(-1.9, 0, 24, dtype=torch.float64)
    x = (u * values @ v.T)[None]
    out = orthogonalised(x, OptimizerConfig(name="muon", ns_coefficients=name))[0]
    images = u.T @ out @ v
    diagonal = images.diagonal()
    assert float((images - diagonal.diag()).abs().max()) < 1e-10
    low, high = IMAGES[name]
    within = diagonal[values / values.norm() > 0.01]
    assert low < float(within.min()) and float(within.max()) < high


@pytest.mark.parametrize("name", POLYNOMIALS)
@pytest.mark.parametrize("steps", [1, 3, 5, 7])
def test_each_iteration_has_its_polynomial_and_the_last_is_repeated(name, steps):
    generator = torch.Generator().manual_seed(3)
    u, s, vt = torch.linalg.svd(
        torch.randn(6, 9, generator=generator, dtype=torch.float64), full_matrices=False
    )
    safety, polynomials = POLYNOMIALS[name]
    value = s / (s.square().sum().sqrt() * safety)
    for a, b, c in (*polynomials, *[polynomials[-1]] * 7)[:steps]:
        value = a * value + b * value**3 + c * value**5
    config = OptimizerConfig(name="muon", ns_coefficients=name, ns_steps=steps)
    found = orthogonalised((u * s @ vt)[None].clone(), config)[0]
    torch.testing.assert_close(found, u * value @ vt, rtol=1e-9, atol=1e-9)


def test_coefficients_of_ones_own_are_those_of_the_name_they_equal():
    x = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(1))
    named = orthogonalised(x.clone(), OptimizerConfig(name="muon"))
    given = OptimizerConfig(name="muon", ns_coefficients=(3.4445, -4.7750, 2.0315))
    assert torch.equal(named, orthogonalised(x, given))


def test_an_overflow_leaves_the_momentum_as_it_was():
    train = {"steps": 4, "precision": "fp16", "initial_loss_scale": 2.0**40}
    config = run_config(LLAMA, optimizer={"name": "muon"}, train=train)
    trainer = Trainer(config, ALONE)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    assert trainer.train_step(loader).outcome == "overflow"
    assert not any(m.any() for kind in trainer.optimizer.moments.values() for m in kind.values())


@pytest.mark.parametrize(
    "optimizer", [{"name": "muon"}, {"name": "muon", "nesterov": False}, {"name": "adamw"}], ids=str
)
def test_narrow_moments_are_rounded_and_a_step_is_of_wide_ones(optimizer):
    trainers = {}
    for moments in ("fp32", "bf16"):
        train = {"steps": 4, "precision": "fp32", "moments": moments}
        config = run_config(LLAMA, optimizer=optimizer, train=train)
        trainers[moments] = trainer = Trainer(config, ALONE)
        initialise(trainer)
        trainer.train_step(MicroBatchLoader(Samples(config), config, trainer.groups))
    wide, narrow = (trainer.optimizer for trainer in trainers.values())
    for kind, moments in narrow.moments.items():
        for parameter, moment in moments.items():
            assert torch.equal(moment, wide.moments[kind][parameter].bfloat16())
    for parameter, weight in narrow.weights.items():
        assert torch.equal(weight, wide.weights[parameter])
    config = trainers["bf16"].config
    assert trainers["bf16"].state_bytes() == sum(state_bytes(Workload.of(config, 1), 0))


def test_accumulation_makes_one_iteration_a_step():
    weights = []
    for size in (1, 4):
        batch = {"micro_batch_size": size, "global_batch_size": 4}
        train = {"steps": 3, "precision": "fp64"}
        config = run_config(LLAMA, optimizer={"name": "muon"}, train=train, batch=batch)
        trainer = Trainer(config, ALONE)
        initialise(trainer)
        loader = MicroBatchLoader(Samples(config), config, trainer.groups)
        for _ in range(3):
            trainer.train_step(loader)
        weights.append(trainer.strategy.weights())
    for name, one in weights[0].items():
        torch.testing.assert_close(one, weights[1][name], rtol=0, atol=1e-12, msg=name)


def test_owners_have_equal_work():
    """Of a model of equal layers on ranks that divide them: within the largest matrix."""
    table = parameters(ModelConfig(**LLAMA | {"num_layers": 4}))
    names = [name for name, parameter in table.items() if parameter.matrices]
    layout, ranks = ParallelLayout(4, tp=2), (0, 1, 2, 3)
    chunks_of = {}
    for name in names:
        boxes = boxes_of_ranks(table[name], layout, ranks, ())
        for stack in matrix_stacks(table[name], Box.of(table[name].shape), False):
            chunks_of[stack] = chunks(stack, boxes)
    work = [sum(stack.flops for stack in stacks) for stacks in assigned(chunks_of, 4)]
    assert sum(work) == sum(stack.flops for stack in chunks_of)
    assert max(work) - min(work) <= max(stack.flops for stack in chunks_of)
    assert len(chunks_of) == 4 * 7
