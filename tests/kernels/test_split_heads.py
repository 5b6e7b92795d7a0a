"""Fused projections split into heads, and their gradients joined, beside slices in float64."""

import pytest
import torch
from exact import NARROW, check, seeded

from mtcli.kernels.split_heads import split_heads

B, S = 3, 37


def parts(qkv):
    """Queries, keys and values by slices."""
    heads = qkv[:, :, :, :-2].flatten(2, 3), qkv[:, :, :, -2], qkv[:, :, :, -1]
    return tuple(x.transpose(1, 2) for x in heads)


@pytest.mark.parametrize(("groups", "members", "d"), [(4, 1, 8), (2, 3, 20), (1, 5, 6)])
def test_parts_are_slices_and_the_bias_that_a_gemm_added_gets_its_gradient(
    device, groups, members, d
):
    def of_bias(x, bias):
        return parts(x + bias.view(x.shape[2:]))

    def ours(x, bias):
        return split_heads(x + bias.detach().view(x.shape[2:]), bias)

    qkv = seeded(B, S, groups, members + 2, d, device=device)
    bias = seeded(groups * (members + 2) * d, seed=1, device=device)
    check(ours, of_bias, [qkv, bias], torch.float32)


@pytest.mark.parametrize("dtype", NARROW)
def test_without_a_bias_the_gradient_is_a_copy(device, dtype):
    qkv = seeded(B, S, 2, 4, 8, device=device)
    check(split_heads, parts, [qkv], dtype, tolerance=1e-9)


def test_gradients_of_any_layout_are_joined(device):
    qkv = seeded(B, S, 2, 3, 8, device=device).float().requires_grad_()
    bias, outs = torch.zeros(48, device=device, requires_grad=True), []
    outs = split_heads(qkv, bias)
    grads = [seeded(B, 2, S, 8, seed=i, device=device).float() for i in range(3)]
    strided = [grads[0].mT.contiguous().mT, grads[1], grads[2].transpose(1, 2).contiguous()]
    strided[2] = strided[2].transpose(1, 2)
    torch.autograd.backward(outs, strided)
    expected = torch.stack(grads, 3).transpose(1, 2)  # [b, s, g, 3, d]
    assert torch.equal(qkv.grad, expected)
    torch.testing.assert_close(bias.grad, expected.sum((0, 1)).flatten())


def test_parts_are_views(device):
    qkv = seeded(B, S, 2, 3, 8, device=device).float()
    assert all(x.untyped_storage().data_ptr() == qkv.data_ptr() for x in split_heads(qkv))
