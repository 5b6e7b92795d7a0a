import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tiny import GPT, LLAMA, run_config

from mtcli.core.config.model import ModelConfig
from mtcli.core.mesh.parameters import parameters
from mtcli.core.mesh.sharding import Box, Parameter
from mtcli.core.model import init
from mtcli.core.model.init import initial_values
from mtcli.core.rehearse.live_memory import LiveMemory
from mtcli.core.runtime.launch import Runtime
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer
from mtcli.kernels.random import BLOCK

MODEL = run_config(GPT).model


def whole(described, model=MODEL, seed=7):
    box = Box((0,) * len(described.shape), described.shape)
    return initial_values(described, model, box, seed)


@st.composite
def boxes(draw):
    """A tensor of one to four dimensions around a block of normals, and a rectangle of it."""
    shape = draw(
        st.sampled_from([(7,), (5, 9), (3, 2, 40), (2, 3, 4, 5), (2, BLOCK + 3), (2, 2, BLOCK)])
    )
    start = [draw(st.integers(0, n)) for n in shape]
    size = [draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True)]
    return shape, Box(tuple(start), tuple(size))


@settings(max_examples=60)
@given(boxes())
def test_any_rectangle_is_bit_identical_to_its_part_of_the_whole(drawn):
    shape, box = drawn
    described = Parameter("some.weight", shape, (None,) * len(shape), "normal", 0)
    assert torch.equal(initial_values(described, MODEL, box, 7), whole(described)[box.slices])


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_matrices_are_normal_residual_ones_smaller_norms_one_and_biases_zero(model):
    model = ModelConfig(**(model | {"hidden_size": 128, "init_std": 0.05}))
    for name, described in parameters(model).items():
        values = whole(described, model).double()
        if name.endswith("bias"):
            assert not values.any(), name
        elif "norm" in name:
            assert (values == 1.0).all(), name
        else:
            before_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.05 / math.sqrt(2.0 * model.num_layers) if before_residual else 0.05
            n = values.numel()
            assert abs(values.mean()) < 4.5 * std / math.sqrt(n), name
            assert abs(values.square().mean() / std**2 - 1.0) < 4.5 * math.sqrt(2.0 / n), name


def test_weights_differ_by_seed_and_by_name():
    a, b = (
        p for p in parameters(MODEL).values() if p.name.endswith("mlp.up.weight") and p.layer < 2
    )
    assert not torch.equal(whole(a, seed=7), whole(a, seed=8))
    assert not torch.equal(whole(a), whole(b))


def test_a_large_table_is_filled_slab_by_slab(monkeypatch):
    config = run_config(GPT | {"vocab_size": 2**15, "hidden_size": 64, "num_layers": 1})
    monkeypatch.setattr(init, "BOX_BYTES", 2**18)
    trainer = Trainer(config, Runtime(0, 1, 0, 1, torch.device("cpu")))
    with LiveMemory() as live:
        initialise(trainer)
    weights = trainer.strategy.shards
    held_bytes = sum(held.tensor.nbytes for held in weights.values())
    assert live.peak < held_bytes + 2**21  # of a table of 2**23
    for name, held in weights.items():
        described = parameters(config.model)[name]
        expected = whole(described, config.model, config.seed)
        assert torch.equal(held.tensor.view(expected.shape), expected), name
