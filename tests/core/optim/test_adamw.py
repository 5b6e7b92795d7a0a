"""Against torch.optim.AdamW, its unfused loop, on a plain copy of the parameters."""

import pytest
import torch
from torch import nn

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import Ownership

TABLE = {
    "up.weight": Parameter("up.weight", (6, 5), (None, None), "normal", 0),
    "down.weight": Parameter("down.weight", (5, 6), (None, None), "residual", 0),
    "up.bias": Parameter("up.bias", (6,), (None,), "zeros", 0),
    "norm.weight": Parameter("norm.weight", (5,), (None,), "ones", 0),
}
CONFIG = OptimizerConfig(lr=1e-2, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.3)
ALONE = make_groups(ParallelLayout(1), 0, torch.device("cpu"))


def adamw(named, dtype, config=CONFIG, moments=None):
    return Optimizer(named, Ownership(ALONE, TABLE, False, False), config, dtype, moments)


def seeded(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def named(dtype):
    made = {n: nn.Parameter(seeded(p.shape, i).to(dtype)) for i, (n, p) in enumerate(TABLE.items())}
    return made


def gradients(step, dtype=torch.float32):
    return {n: seeded(p.shape, 100 * step + i).to(dtype) for i, (n, p) in enumerate(TABLE.items())}


def plain(parameters, rates, dtype):
    """torch's loop on copies in `dtype`: matrices decay, biases and norms do not."""
    copies = {n: nn.Parameter(p.detach().to(dtype, copy=True)) for n, p in parameters.items()}
    decays = {"weight_decay": 0.3, "params": [copies["up.weight"], copies["down.weight"]]}
    others = {"weight_decay": 0.0, "params": [copies["up.bias"], copies["norm.weight"]]}
    options = {"lr": 0.0, "betas": CONFIG.betas, "eps": CONFIG.eps, "foreach": False}
    theirs = torch.optim.AdamW([decays, others], **options)
    for step, lr in enumerate(rates):
        for group in theirs.param_groups:
            group["lr"] = lr
        for name, gradient in gradients(step, dtype).items():
            copies[name].grad = gradient
        theirs.step()
    return copies


RATES = [1e-3, 1e-2, 5e-3, 0.0, 2e-3]


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_updates_are_torchs_with_decay_on_matrices_alone(dtype, rtol):
    parameters = named(dtype)
    expected = plain(parameters, RATES, dtype)
    ours = adamw(parameters, dtype)
    for step, lr in enumerate(RATES):
        ours.step(gradients(step, dtype), lr)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[name], rtol=rtol, atol=rtol)
    assert not [key for key in ours.state() if key.startswith("master")]


def test_16_bit_parameters_are_rounded_from_float32_masters():
    parameters = named(torch.bfloat16)
    expected = plain(parameters, RATES, torch.float32)
    ours = adamw(parameters, torch.bfloat16)
    for step, lr in enumerate(RATES):
        ours.step(gradients(step), lr)
    state = ours.state()
    for name, parameter in parameters.items():
        master = state[f"master/{name}"]
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, expected[name].data, rtol=2e-6, atol=2e-6)
        assert torch.equal(parameter, master.bfloat16())


def test_updates_too_small_for_16_bits_add_up_in_the_masters():
    parameters = {"norm.weight": nn.Parameter(torch.ones(5, dtype=torch.bfloat16))}
    ours = adamw(parameters, torch.bfloat16)
    for _ in range(40):  # of 1e-4 each, where bfloat16 has steps of 4e-3 below 1
        ours.step({"norm.weight": torch.ones(5)}, lr=1e-4)
    torch.testing.assert_close(ours.state()["master/norm.weight"], torch.full((5,), 1 - 4e-3))
    assert (parameters["norm.weight"] < 1.0).all()


def test_state_is_there_before_the_first_step_and_restores_the_run():
    one, other = (adamw(named(torch.float32), torch.float32) for _ in range(2))
    assert {key.partition("/")[0] for key in one.state()} == {"exp_avg", "exp_avg_sq"}
    assert not any(tensor.any() for tensor in one.state().values())
    for step in range(3):
        one.step(gradients(step), 1e-2)
    assert one.updates == 3
    with torch.no_grad():
        for key, tensor in other.state().items():
            tensor.copy_(one.state()[key])
        for name, parameter in other.weights.items():
            parameter.copy_(one.weights[name])
    other.updates = one.updates
    for optimizer in (one, other):
        optimizer.step(gradients(3), 1e-2)
    for name, parameter in one.weights.items():
        assert torch.equal(parameter, other.weights[name])


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
def test_a_rank_that_owns_no_rows_of_a_rule_takes_its_step(name):
    rows = {"up.bias": torch.zeros(0), "up.weight": torch.zeros(0, 5)}
    ours = adamw(rows, torch.float32, OptimizerConfig(name=name))
    ours.step({}, 1e-2)
    assert ours.updates == 1 and ours.state() == {}


def test_masters_follow_weights_that_were_loaded():
    ours = adamw(named(torch.bfloat16), torch.bfloat16)
    with torch.no_grad():
        ours.weights["up.bias"].fill_(0.5)
    ours.reset_masters()
    ours.step({name: torch.zeros(p.shape) for name, p in TABLE.items()}, 0.0)
    assert (ours.weights["up.bias"] == 0.5).all()


def test_narrow_moments_are_rounded_after_each_step_and_steps_are_of_wide_ones():
    parameters, config = named(torch.float32), OptimizerConfig(lr=1e-2, betas=(0.8, 0.97))
    ours = adamw(parameters, torch.float32, config, torch.bfloat16)
    copies = {n: p.detach().double() for n, p in parameters.items()}
    moments = {n: [torch.zeros_like(x), torch.zeros_like(x)] for n, x in copies.items()}
    for step, lr in enumerate(RATES):
        grads = gradients(step)
        ours.step(grads, lr)
        for name, x in copies.items():
            g, (m, v) = grads[name].double(), moments[name]
            m.lerp_(g, 0.2)
            v.lerp_(g * g, 0.03)
            decay = config.weight_decay * ours.update_of(name).decays
            x.mul_(1 - lr * decay)
            root = (v / (1 - 0.97 ** (step + 1))).sqrt() + config.eps
            x.sub_(lr / (1 - 0.8 ** (step + 1)) * m / root)
            for moment in (m, v):
                moment.copy_(moment.float().bfloat16())
    for name, x in copies.items():
        torch.testing.assert_close(parameters[name].double(), x, rtol=2e-6, atol=2e-6)
    kept = [x for key, x in ours.state().items() if key.startswith("exp_avg")]
    assert len(kept) == 2 * len(TABLE) and {x.dtype for x in kept} == {torch.bfloat16}


@pytest.mark.parametrize("moments", [None, torch.bfloat16])
def test_a_step_by_narrow_gradients_is_one_by_the_same_in_float32_times_the_factor(moments):
    narrow, wide = (adamw(named(torch.bfloat16), torch.bfloat16, CONFIG, moments) for _ in "nw")
    for step, lr in enumerate(RATES):
        grads = gradients(step, torch.bfloat16)
        assert narrow.multiplies(grads)
        narrow.step(grads, lr, factor=0.3)
        scaled = {name: grad.float() * 0.3 for name, grad in grads.items()}
        assert not wide.multiplies(scaled)
        wide.step(scaled, lr)
    assert all(torch.equal(x, wide.state()[key]) for key, x in narrow.state().items())
    assert all(torch.equal(x, wide.weights[name]) for name, x in narrow.weights.items())
