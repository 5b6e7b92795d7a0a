"""SwiGLU and the linear layer after it as one function, beside the two in float64."""

import pytest
import torch

from mtcli.core.parallel.split import WeightWork


def made():
    generator = torch.Generator().manual_seed(4)
    sizes = (7, 2 * 6), (5, 6), (7, 5)  # gate and up, weight, gradient
    return [torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes]


def expected(gate_up, weight, grad):
    """(result, gradients of both inputs) in closed form."""
    gate, up = gate_up.split(6, 1)
    share = 1.0 / (1.0 + (-gate).exp())
    of_x = grad @ weight
    of_gate = of_x * up * share * (1.0 + gate * (1.0 - share))
    x = gate * share * up
    return x @ weight.T, torch.cat([of_gate, of_x * gate * share], 1), grad.T @ x


@pytest.mark.parametrize("later", [False, True], ids=["in the backward", "when it is asked for"])
def test_a_linear_layer_of_swiglu_has_its_values_and_gradients_and_keeps_no_product(later):
    gate_up, weight, grad = made()
    work, leaves, kept = WeightWork(), [gate_up.requires_grad_(), weight.requires_grad_()], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = work.swiglu_linear(*leaves)
    assert [x.shape for x in kept] == [gate_up.shape, weight.shape]
    if later:
        with work.collecting() as pending:
            out.backward(grad)
        assert weight.grad is None
        for half in pending:
            half()
    else:
        out.backward(grad)
    with torch.no_grad():
        found = zip((out, gate_up.grad, weight.grad), expected(*made()), strict=True)
    for mine, exact in found:
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)
