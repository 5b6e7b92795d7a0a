"""Which dimensions of which layers rotate, and by which angles: each pair as a complex number."""

import pytest
import torch
from tiny import LLAMA, run_config

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.attention import Attention
from mtcli.core.model.inputs import make_inputs
from mtcli.core.model.rope import frequencies, halves, layer_table, rotary_tables
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.tensor import TensorParallelLayers

B, S = 2, 7
SIZES = LLAMA | {"head_dim": 10, "rope_theta": 100.0}
LINEAR = {"kind": "linear", "factor": 4.0}


def turned(x, dim, theta, factor=1.0):
    """x [b, h, s, d] with the pairs of its first `dim` dimensions times exp(i position f)."""
    first, second, unrotated = x.split([dim // 2, dim // 2, x.shape[-1] - dim], -1)
    frequencies = theta ** (-torch.arange(0, dim, 2).double() / dim) / factor
    angles = torch.arange(S).double()[:, None] * frequencies
    pairs = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag, unrotated], -1)


@pytest.mark.parametrize(("fraction", "dim"), [(1.0, 10), (0.6, 6), (0.499, 4), (0.25, 2)])
def test_the_first_dimensions_of_a_head_rotate_and_the_others_pass(fraction, dim):
    model = run_config(SIZES | {"rotary_fraction": fraction}).model
    q, k = (torch.randn(B, heads, S, 10, dtype=torch.float64) for heads in (4, 2))
    (table,) = rotary_tables(model, torch.arange(S).expand(B, S), torch.float64, S)
    for found, x in zip(table(q, k), (q, k), strict=True):
        torch.testing.assert_close(found, turned(x, dim, 100.0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("r", [2, 6, 10])
def test_neighbours_rotate_as_pairs_where_they_are_interleaved(r):
    q, k = (torch.randn(B, heads, S, 10, dtype=torch.float64) for heads in (4, 4))
    model = run_config(SIZES | {"rotary_fraction": r / 10, "rope_interleaved": True}).model
    (table,) = rotary_tables(model, torch.arange(S).expand(B, S), torch.float64, S)
    found = [x @ y.mT for x, y in [table(halves(q, r), halves(k, r))]]
    angles = torch.arange(S).double()[:, None] * 100.0 ** (-torch.arange(0, r, 2).double() / r)
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = [torch.view_as_complex(x[..., :r].unflatten(-1, (-1, 2)).contiguous()) for x in (q, k)]
    q_r, k_r = (x * turns for x in pairs)
    expected = (q_r @ k_r.mH).real + q[..., r:] @ k[..., r:].mT
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)


# layers 0 and 2 are local
LOCAL = {"window": 9, "window_pattern": "LG", "rope_scaling": LINEAR}
CASES = {
    "all alike": ({}, [(100.0, 1.0)] * 4),
    "scaled": (LOCAL, [(100.0, 4.0)] * 4),
    "local base": (LOCAL | {"rope_local_theta": 30.0}, [(30.0, 1.0), (100.0, 4.0)] * 2),
    "local base that is the other": (
        LOCAL | {"rope_local_theta": 100.0}, [(100.0, 1.0), (100.0, 4.0)] * 2),
    "pattern": ({"rope_pattern": "RNN"}, [(100.0, 1.0), None, None, (100.0, 1.0)]),
    "both": (
        LOCAL | {"rope_local_theta": 30.0, "rope_pattern": "RRN"},
        [(30.0, 1.0), (100.0, 4.0), None, (100.0, 4.0)]),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "bases"), CASES.values(), ids=CASES)
def test_a_layer_rotates_by_its_own_base(fields, bases):
    model = run_config(SIZES | fields).model
    positions = torch.arange(S).expand(B, S)
    inputs = make_inputs(model, torch.float64, torch.zeros(B, S).long(), positions=positions)
    build = TensorParallelLayers(
        parameters(model), make_groups(ParallelLayout(1), 0, torch.device("cpu")), torch.float64
    )
    qkv = torch.randn(B, S, 2, 4, 10, dtype=torch.float64)
    for layer, base in enumerate(bases):
        assert (layer_table(model, layer) is None) == (base is None)
        found = Attention(layer, model, build, 0).mix(qkv.view(B * S, -1), inputs)
        q, k, v = (x.flatten(2, 3).transpose(1, 2) for x in qkv.split([2, 1, 1], 3))
        if base is not None:
            q, k = (turned(x, 10, *base) for x in (q, k))
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        expected = expected.transpose(1, 2).reshape(B * S, -1)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def hugging_face_frequencies(scaling, length, dim, theta):
    """(frequencies, factor of cosines and sines) of transformers, for sequences of a length."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    names = {"kind": "rope_type", "original_max_seq_len": "original_max_position_embeddings"}
    names |= {f"{x}_factors": f"{x}_factor" for x in ("short", "long")}
    given = {names.get(name, name): value for name, value in scaling.items()}
    config = LlamaConfig(
        hidden_size=40, num_attention_heads=4, head_dim=10, max_position_embeddings=12
    )
    config.rope_parameters = given | {"rope_theta": theta, "partial_rotary_factor": dim / 10}
    return ROPE_INIT_FUNCTIONS[scaling["kind"]](config, torch.device("cpu"), seq_len=length)


LONG = {"kind": "longrope", "factor": 3.0, "original_max_seq_len": 12}
LONG |= {"short_factors": [1.0, 1.5, 2.0], "long_factors": [1.25, 7.0, 40.0]}


@pytest.mark.parametrize("length", [5, 12, 13, 90])
@pytest.mark.parametrize(
    "scaling",
    [
        {"kind": "dynamic", "factor": 2.5, "original_max_seq_len": 12},
        LONG,
        LONG | {"attention_factor": 1.7},
        LONG | {"factor": 1.0},
    ],
    ids=str,
)
def test_a_scaling_by_length_is_transformers_for_the_length_of_the_run(scaling, length):
    fields = {"rotary_fraction": 0.6, "rope_scaling": scaling, "max_seq_len": length}
    model = run_config(SIZES | fields).model
    expected, factor = hugging_face_frequencies(scaling, length, 6, 100.0)
    found = frequencies(6, 100.0, model.rope_scaling, length, torch.device("cpu"))
    torch.testing.assert_close(found, expected)
    for context in (None, length):  # the model's own
        shorter = model.model_copy(update={"max_seq_len": 3}) if context else model
        inputs = make_inputs(shorter, torch.float32, torch.zeros(1, 4).long(), context=context)
        (table,) = inputs.rotations
        angles = torch.arange(4.0)[:, None] * expected.repeat(2)
        torch.testing.assert_close(table.cos[0, 0], angles.cos() * factor)
