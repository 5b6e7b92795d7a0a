"""Products of weights in bfloat16 and int8 are those of the same numbers in float64."""

import pytest
import torch

from mtcli.kernels.embedding import embedding
from mtcli.kernels.gemm import set_bfloat16_in_float32
from mtcli.kernels.stored_weight import BLOCK, FEW_ROWS, float_weight, int8_weight

# Of a sum of D products with activations rounded to bfloat16, itself rounded: 1/512 each at most.
TOLERANCE = 3e-3


def weight_of(*shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw) * torch.rand(shape[0], 1, generator=draw)


def narrow(kind, weight):
    if kind == "int8":
        return int8_weight(weight, weight.abs().amax(1))
    return float_weight(weight.bfloat16() if kind == "bf16" else weight, "packed" in kind, True)


def exact(stored):
    """The numbers of a narrow weight, in float64."""
    values = stored.values.double()
    return values if stored.scales is None else values * stored.scales.double()[:, None]


@pytest.fixture(params=[False, True], ids=["as stored", "in float32"])
def in_float32(request):
    """Whether this CPU multiplies bfloat16 in float32."""
    usual = set_bfloat16_in_float32(request.param)
    yield request.param
    set_bfloat16_in_float32(usual)


@pytest.mark.parametrize("kind", ["fp32 packed", "bf16", "bf16 packed", "int8"])
@pytest.mark.parametrize("channels", [40, BLOCK + 3])
@pytest.mark.parametrize("width", [64, 33])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 70])
def test_a_product_is_that_of_the_numbers(in_float32, kind, channels, width, rows):
    weight, x = weight_of(channels, width), weight_of(rows, width, seed=1)
    stored, bias = narrow(kind, weight), weight_of(channels, 1, seed=2)[:, 0]
    found = stored.linear(x, bias)
    assert found.dtype == torch.float32 and found.shape == (rows, channels)
    x, bias = (x if "fp32" in kind else x.bfloat16()).double(), bias.double()
    expected = x @ exact(stored).T
    error = (found.double() - bias - expected).norm() / expected.norm()
    assert error < (1e-6 if "fp32" in kind else TOLERANCE)


@pytest.mark.parametrize("rows", [3, 40])
def test_a_scale_that_is_one_percent_off_is_seen(rows):
    weight, x = weight_of(40, 64), weight_of(rows, 64, seed=1)
    stored = int8_weight(weight, weight.abs().amax(1))
    expected = x.bfloat16().double() @ exact(stored).T
    stored.scales[7] *= 1.01
    error = (stored.linear(x).double() - expected).norm(dim=0) / expected.norm(dim=0)
    assert error[7] > 2 * TOLERANCE and error[:7].max() < TOLERANCE < error[7]


def test_int8_is_the_nearest_of_255_steps_of_each_channel():
    weight = weight_of(50, 33) * torch.logspace(-20, 20, 50)[:, None]
    weight[3] = 0
    stored = int8_weight(weight, weight.abs().amax(1))
    largest = weight.abs().amax(1).double()
    assert (stored.scales.double() * 127 / largest.clamp(min=1e-300))[4:].sub(1).abs().max() < 2**-8
    off = (exact(stored) - weight.double()).abs().amax(1)
    assert (off <= stored.scales.double() * 0.5 + 1e-12 * largest).all() and off[3] == 0
    assert stored.values.int().abs().amax(1)[4:].min() == stored.values.int().abs().max() == 127
    flipped = int8_weight(-weight, weight.abs().amax(1))
    assert torch.equal(flipped.values, -stored.values), "symmetric"


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_table_has_the_rows_of_its_numbers_and_experts_are_split(kind):
    stored = narrow(kind, weight_of(12, 33))
    ids = torch.tensor([[3, 0], [11, 3]])
    assert torch.equal(embedding(ids, stored).double(), exact(stored)[ids])
    experts = stored.unflatten(0, (3, -1))
    assert len(experts) == 3
    for number, expert in enumerate(experts.unbind(0)):
        assert torch.equal(exact(expert), exact(stored)[4 * number : 4 * number + 4])
