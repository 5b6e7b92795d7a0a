"""Operators: what is saved for their backward, and what gradients their inputs get."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mtcli.kernels.custom_op import custom_op


@custom_op(
    "test_scaled_add(Tensor x, Tensor? y, float scale, Tensor places) -> (Tensor, Tensor)",
    fake=lambda x, y, scale, places: (torch.empty_like(x), x.new_empty(1)),
    saved=lambda outputs, x, y, scale, places: (outputs[1], scale, y is not None, None),
    backward=lambda grad, _, total, scale, adds, nothing: (
        grad * scale * total if nothing is None else None,
        grad if adds else None,
    ),
)
def scaled_add(x, y, scale, places):
    """(scale * x + y, a number that the gradient of x is multiplied by)."""
    return scale * x + (0.0 if y is None else y), x.new_full((1,), 5.0)


@custom_op("test_overwrite_(Tensor(a!) x) -> ()")
def overwrite_(x):
    x.zero_()


@custom_op("test_negate(Tensor x) -> Tensor")
def negate(x):
    return -x.contiguous()


@pytest.mark.parametrize("adds", [True, False])
def test_leading_inputs_get_gradients_of_saved_tensors_and_values_and_the_rest_none(adds):
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    places, kept = torch.ones(3, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out, _ = scaled_add(x, y if adds else None, 2.0, places)
    assert [t.tolist() for t in kept] == [[5.0]]
    out.sum().backward()
    assert x.grad.tolist() == [10.0] * 3
    assert (y.grad is not None) == adds and (not adds or y.grad.tolist() == [1.0] * 3)
    assert places.grad is None


def test_without_a_fake_rule_an_output_is_contiguous_and_like_the_first_input():
    with FakeTensorMode():
        x = torch.empty(3, 4, dtype=torch.float16, device="cuda").T
        y = negate(x)
        assert overwrite_(x) is None
    assert (y.shape, y.dtype, y.device.type) == ((4, 3), torch.float16, "cuda")
    assert y.is_contiguous()
