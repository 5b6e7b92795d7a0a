"""Which dimensions of which layers rotate, and by which angles: each pair as a complex number."""

import pytest
import torch
from tiny import LLAMA, run_config

from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.parameters import parameters
from mtcli.core.model.attention import Attention
from mtcli.core.model.inputs import make_inputs
from mtcli.core.model.rope import layer_table, rotary_tables
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
    (table,) = rotary_tables(model, torch.arange(S).expand(B, S), torch.float64)
    for found, x in zip(table(q, k), (q, k), strict=True):
        torch.testing.assert_close(found, turned(x, dim, 100.0), atol=1e-6, rtol=1e-5)


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
