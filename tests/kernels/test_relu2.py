import pytest
import torch
from exact import cases_on, check, distance, seeded

from mtcli.kernels.relu2 import relu2, relu2_backward_


def formula(x):
    return x * x * (x > 0)


def test_squared_relu_and_its_gradients_are_the_formula(device, subtests):
    for shape, dtype in cases_on(device, [(1, 131), (70, 10), (2, 3, 1050)]):
        x, bias = 2.0 * seeded(*shape, seed=1, device=device), seeded(shape[-1], device=device)
        with subtests.test(f"{shape} {dtype}"):
            check(relu2, formula, [x], dtype)
            check(relu2, lambda x, b: formula(x + b), [x, bias], torch.float32)


def test_squared_relu_reads_rows_that_are_apart(device):
    x = 2.0 * seeded(7, 19, device=device)
    check(lambda x: relu2(x.t()), lambda x: formula(x.t()), [x], torch.float32)


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_backward_makes_the_result_again(device, has_bias):
    x, grad = ((2.0 * seeded(7, 1050, seed=i, device=device)).float() for i in (1, 2))
    bias = seeded(1050, device=device).float() if has_bias else None
    leaves = [y.cpu().double().requires_grad_() for y in (x, bias) if y is not None]
    result = formula(sum(leaves))
    result.backward(grad.cpu().double())
    of_x, of_bias, again = relu2_backward_(grad, x, bias)
    assert distance(of_x, leaves[0].grad) < 2e-6 and distance(again, result) < 2e-6
    assert again.data_ptr() == grad.data_ptr()
    assert of_bias is None if bias is None else distance(of_bias, leaves[1].grad) < 2e-6
