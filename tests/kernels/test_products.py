"""Products of float16 on CPU against float64, and of everything else against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from mtcli.kernels.products import is_slow, linear, matmul

HALF = 2.0**-11  # the relative rounding of one float16 result


def made(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).half()


def apart(found, exact):
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("biased", [True, False])
def test_a_float16_linear_layer_and_its_gradients_are_rounded_once(biased):
    operands = [made(7, 500), made(33, 500, seed=1), made(33, seed=2)][: 3 if biased else 2]
    mine = [x.clone().requires_grad_() for x in operands]
    exact = [x.double().requires_grad_() for x in operands]
    grad = made(7, 33, seed=3)
    found, expected = linear(*mine), F.linear(*exact)
    found.backward(grad)
    expected.backward(grad.double())
    assert found.dtype == torch.float16 and apart(found, expected) < HALF
    for ours, theirs in zip(mine, exact, strict=True):
        assert ours.grad.dtype == torch.float16 and apart(ours.grad, theirs.grad) < HALF


def test_a_float16_product_sums_in_float32():
    a, b = made(2, 5, 3000), made(2, 3000, 9, seed=1)
    found = matmul(a, b)
    assert found.dtype == torch.float16
    assert apart(found, a.double() @ b.double()) < HALF


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(dtype):
    x, weight = made(7, 50).to(dtype), made(33, 50, seed=1).to(dtype)
    assert not is_slow(x)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(matmul(x, weight.T), x @ weight.T)


def test_the_product_that_is_given_is_the_one_that_is_used():
    for dtype in (torch.float32, torch.float16):
        x, weight = made(2, 5).to(dtype), made(3, 5, seed=1).to(dtype)
        found = linear(x, weight, product=lambda x, w, bias: 2 * F.linear(x, w, bias))
        torch.testing.assert_close(found, 2 * linear(x, weight))
