"""The loss scale's rule against torch's GradScaler and Megatron-LM's DynamicGradScaler."""

import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import run_config

from mtcli.core.optim.loss_scale import LossScale


def overflows(seed, count=400):
    """Steps that overflow or not, in runs as a training has them."""
    source = random.Random(seed)
    found = []
    while len(found) < count:
        found += [source.random() < 0.4] * source.randint(1, 7)
    return found[:count]


def scales(loss_scale, steps):
    """The scale of each step and the one after the last."""
    found = [loss_scale.scale]
    for overflow in steps:
        loss_scale.update(overflow)
        found.append(loss_scale.scale)
    return found


def grad_scaler_s(scale, window, steps):
    """The same from torch's GradScaler, fed gradients that are infinite or not."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=window)
    scaler.scale(torch.zeros(1))
    found = [scaler.get_scale()]
    for overflow in steps:
        weight.grad = torch.full((1,), float("inf") if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


@pytest.mark.parametrize(("window", "start"), [(1, 2.0**40), (3, 2.0**90)])
def test_without_hysteresis_it_is_torch_s_grad_scaler(window, start):
    steps = overflows(0, 150)
    found = scales(LossScale(start, window=window), steps)
    assert found == grad_scaler_s(start, window, steps)
    assert len(set(found)) > 10 and min(found) > 1.0, "grows, falls, and is not at its end"


@pytest.fixture
def dynamic_grad_scaler(monkeypatch):
    """Megatron-LM's class from its one file, with its tensors on CPU."""
    parent = importlib.util.find_spec("megatron")
    if parent is None:
        pytest.skip("megatron-core is not installed")
    path = Path(parent.submodule_search_locations[0]) / "core" / "optimizer" / "grad_scaler.py"
    spec = importlib.util.spec_from_file_location("grad_scaler_alone", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    on_cpu = lambda values, dtype, device: torch.tensor(values, dtype=dtype)  # noqa: E731
    module.torch = SimpleNamespace(tensor=on_cpu, float=torch.float, max=torch.max)
    return module.DynamicGradScaler


@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_with_hysteresis_it_is_megatron_s(dynamic_grad_scaler, hysteresis):
    theirs, steps = dynamic_grad_scaler(2.0**8, 1.0, 2.0, 0.5, 5, hysteresis), overflows(0)
    expected = [theirs.scale.item()]
    for overflow in steps:
        theirs.update(overflow)
        expected.append(theirs.scale.item())
    assert scales(LossScale(2.0**8, window=5, hysteresis=hysteresis), steps) == expected
    assert 1.0 in expected and len(set(expected)) > 4


def test_it_cannot_fall_below_one_and_says_so():
    scale = LossScale(3.0, window=9)
    assert scale.can_fall
    assert scales(scale, [True] * 3) == [3.0, 1.5, 1.0, 1.0]
    assert not scale.can_fall


def test_a_fixed_scale_stays_and_keeps_no_state():
    scale = LossScale(128.0)
    assert set(scales(scale, overflows(0))) == {128.0}
    scale.load({"scale": 2.0, "good_steps": 1, "patience": 1})
    assert (scale.scale, scale.can_fall, scale.state()) == (128.0, False, None)


def test_its_state_goes_on_where_it_stopped():
    steps = overflows(4, 60)
    whole = scales(LossScale(2.0**20, window=4, hysteresis=3), steps)
    for stop in range(12):
        first, second = (LossScale(2.0**s, window=4, hysteresis=3) for s in (20, 5))
        start = scales(first, steps[:stop])
        second.load(first.state())
        assert start[:-1] + scales(second, steps[stop:]) == whole
        second.load(None)  # of a run in another precision: nothing changes
        assert second.scale == whole[-1]


@pytest.mark.parametrize(
    ("train", "scale", "can_fall"),
    [
        ({"precision": "fp32"}, 1.0, False),
        ({"precision": "bf16", "initial_loss_scale": 4.0}, 1.0, False),
        ({"precision": "fp16"}, 65536.0, True),
        ({"precision": "fp16", "initial_loss_scale": 4.0}, 4.0, True),
        ({"precision": "fp16", "loss_scale": 0.5}, 0.5, False),
    ],
)
def test_the_config_says_whether_it_is_one_or_fixed_or_dynamic(train, scale, can_fall):
    found = LossScale.of(run_config(train=train).train)
    assert (found.scale, found.can_fall) == (scale, can_fall)


def test_the_config_s_window_and_hysteresis_are_the_scale_s():
    train = {"precision": "fp16", "loss_scale_window": 2, "loss_scale_hysteresis": 3}
    found = scales(LossScale.of(run_config(train=train).train), [True] * 3 + [False] * 2)
    assert found == [2.0**16, 2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**16]
