import math

import pytest
import torch
from exact import cases_on, check, distance, seeded

from mtcli.kernels.gelu import gelu, gelu_backward_


def exact_gelu(x):
    return x * 0.5 * torch.special.erfc(-x / math.sqrt(2.0))


def tanh_gelu(x):
    return 0.5 * x * (1.0 + (math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)).tanh())


FORMULAS = {"none": exact_gelu, "tanh": tanh_gelu}


@pytest.mark.parametrize("approximate", FORMULAS)
def test_bias_and_gelu_and_both_gradients_are_the_formula(device, approximate, subtests):
    formula = FORMULAS[approximate]
    for shape, dtype in cases_on(device, [(1, 131), (70, 10), (2, 3, 1050)]):
        inputs = [2.0 * seeded(*shape, seed=1, device=device), seeded(shape[-1], device=device)]
        with subtests.test(f"{shape} {dtype}"):
            check(lambda x, b: gelu(x, b, approximate), lambda x, b: formula(x + b), inputs, dtype)


@pytest.mark.parametrize("approximate", FORMULAS)
def test_gelu_without_a_bias_is_the_formula(device, approximate):
    x = 2.0 * seeded(7, 19, device=device)
    check(
        lambda x: gelu(x.t(), None, approximate),
        lambda x: FORMULAS[approximate](x.t()),
        [x],
        torch.float32,
    )


@pytest.mark.parametrize("approximate", FORMULAS)
@pytest.mark.parametrize(
    ("shape", "has_bias"), [((7, 26), True), ((70, 10), False), ((3, 1050), True)]
)
def test_the_backward_makes_the_result_again(device, shape, has_bias, approximate):
    x, grad = ((2.0 * seeded(*shape, seed=i, device=device)).float() for i in (1, 2))
    bias = seeded(shape[-1], device=device).float() if has_bias else None
    leaves = [y.cpu().double().requires_grad_() for y in (x, bias) if y is not None]
    result = FORMULAS[approximate](sum(leaves))
    result.backward(grad.cpu().double())
    of_x, of_bias, again = gelu_backward_(grad, x, bias, approximate)
    assert distance(of_x, leaves[0].grad) < 2e-6 and distance(again, result) < 2e-6
    assert again.data_ptr() == grad.data_ptr()
    if has_bias:
        assert distance(of_bias, leaves[1].grad) < 2e-6
    else:
        assert of_bias is None


def test_exact_gelu_has_relative_accuracy_where_it_is_nearly_nothing(device):
    """0.5 (1 + erf(x)) in float32 has lost 5 % of it at -5."""
    x = torch.linspace(-5.0, -3.0, 301, dtype=torch.float64).float()
    expected = exact_gelu(x.double())
    found = gelu(x.to(device)).cpu().double()
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=0.0)
