"""An activation and the linear layer after it as one function, beside the two in float64."""

import math
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mtcli.core.parallel.zero_bubble import WeightPasses
from mtcli.core.rehearse.live_memory import LiveMemory
from mtcli.kernels.activation import ACTIVATIONS, ActivatedLinear
from mtcli.kernels.gemm import DEFAULT_GEMMS, LinearFunction


def made(gated):
    generator = torch.Generator().manual_seed(4)
    sizes = (7, 12 if gated else 6), (6,), (5, 6), (7, 5)  # x, bias, weight, gradient
    return [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]


def linear(x, weight, work):
    return LinearFunction.apply(x, weight, None, DEFAULT_GEMMS, work.gradient)


def swiglu(x, bias):
    """(result, what its gradient is multiplied by for x's)."""
    gate, up = x.split(6, 1)
    share = 1.0 / (1.0 + (-gate).exp())
    slopes = up * share * (1.0 + gate * (1.0 - share)), gate * share
    return gate * share * up, torch.cat(slopes, 1)


def geglu(x, bias, inner=None):
    gate, up = x.split(6, 1)
    y, slope = (inner or gelu)(gate, 0.0)
    return y * up, torch.cat([up * slope, y], 1)


def geglu_tanh(x, bias):
    return geglu(x, bias, gelu_tanh)


def relu2(x, bias):
    x = (x + bias).clamp(min=0.0)
    return x * x, 2.0 * x


def gelu(x, bias):
    x = x + bias
    share = 0.5 * torch.special.erfc(-x / math.sqrt(2.0))
    return x * share, share + x * (-0.5 * x * x).exp() / math.sqrt(2.0 * math.pi)


def gelu_tanh(x, bias):
    x, scale = x + bias, math.sqrt(2.0 / math.pi)
    bent = (scale * (x + 0.044715 * x**3)).tanh()
    inner = scale * (1.0 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1.0 + bent), 0.5 * (1.0 + bent) + 0.5 * x * (1.0 - bent * bent) * inner


def expected(formula, x, bias, weight, grad):
    """(result, gradients of x, bias and weight) in closed form."""
    y, slope = formula(x, bias)
    of_x = (grad @ weight).repeat(1, x.shape[1] // 6) * slope
    return y @ weight.T, of_x, of_x.sum(0), grad.T @ y


GATED = swiglu, geglu, geglu_tanh


@pytest.mark.parametrize(
    "formula", [gelu, gelu_tanh, relu2, *GATED], ids=lambda formula: formula.__name__
)
@pytest.mark.parametrize("later", [False, True], ids=["in the backward", "when it is asked for"])
def test_a_linear_layer_of_an_activation_has_its_gradients_and_keeps_no_product(formula, later):
    x, bias, weight, grad = made(formula in GATED)
    leaves = [x.requires_grad_(), bias.requires_grad_(), weight.requires_grad_()]
    leaves[1] = None if formula in GATED else bias
    work, kept = WeightPasses(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        activation = ACTIVATIONS[formula.__name__]
        out = ActivatedLinear.apply(*leaves, activation, DEFAULT_GEMMS, work.gradient)
    assert [x.shape for x in kept] == [leaf.shape for leaf in leaves if leaf is not None]
    if later:
        with work.collecting() as pending:
            out.backward(grad)
        assert weight.grad is None
        for half in pending:
            half()
    else:
        out.backward(grad)
    exact = expected(formula, *made(formula in GATED))
    for mine, theirs in zip((out, x.grad, bias.grad, weight.grad), exact, strict=True):
        if mine is not None:
            torch.testing.assert_close(mine.detach(), theirs, rtol=1e-12, atol=1e-12)


def test_a_wide_copy_of_a_weight_is_made_again_and_never_waits():
    with LiveMemory() as live:
        x, _, weight, grad = made(gated=False)
        x, weight, work = x.requires_grad_(), weight.float().requires_grad_(), WeightPasses()
        leaves = live.bytes
        again = partial(checkpoint, use_reentrant=False)
        out = again(lambda x: linear(x, weight.double(), work), x)
        assert live.bytes == leaves + out.nbytes
        with work.collecting() as pending:
            out.backward(grad)
        assert live.bytes == leaves + out.nbytes + x.grad.nbytes
    for half in pending:
        half()
    torch.testing.assert_close(weight.grad, (grad.T @ x).float())


def test_a_gradient_that_waited_becomes_the_parameters_without_a_copy():
    with LiveMemory() as live:
        x, _, weight, grad = made(gated=False)
        weight, work = weight.requires_grad_(), WeightPasses()
        out = linear(x.requires_grad_(), weight, work)
        with work.collecting() as pending:
            out.backward(grad)
        waiting = live.bytes
        live.begin()
        (half,) = pending
        half()
    assert live.peak - waiting < 1.5 * weight.nbytes


def test_a_half_that_waits_holds_what_it_multiplies_and_not_the_stages_input():
    with LiveMemory() as live:
        x, _, weight, grad = made(gated=False)
        x, weight, work = x.requires_grad_(), weight.requires_grad_(), WeightPasses()
        kept = live.bytes
        out = linear(2.0 * x, weight, work)
        with work.collecting() as pending:
            out.backward(grad)
        del x, out
    assert len(pending) == 1
    assert live.bytes == kept  # 2 x, in the place of x, whose gradient is gone with it
