"""Attention and its blocks against the closed form of softmax attention in float64."""

import pytest
import torch

from mtcli.kernels.attention import (
    attention,
    attention_backward,
    attention_backward_reference,
    attention_reference,
    causal_attention,
    merge_,
)

SHAPES = {"one head": (1, 1, 1, 5, 8), "groups": (2, 6, 2, 7, 4), "many": (2, 4, 4, 33, 16)}


def made(shape, dtype=torch.float64):
    b, h, g, n, d = SHAPES[shape]
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(b, x, n, d, generator=generator, dtype=dtype) for x in (h, g, g, h)]


def dense(q, k, v, causal):
    """(output, log-sum-exp) one query at a time."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            group = h * k.shape[1] // q.shape[1]
            for i in range(q.shape[2]):
                seen = i + 1 if causal else k.shape[2]
                scores = k[b, group, :seen] @ q[b, h, i] / q.shape[3] ** 0.5
                lse[b, h, i] = scores.exp().sum().log()
                out[b, h, i] = (scores - lse[b, h, i]).exp() @ v[b, group, :seen]
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [attention, attention_reference])
def test_attention_and_its_log_sum_exp_are_the_closed_form(function, shape, causal):
    q, k, v, _ = made(shape)
    for found, expected in zip(function(q, k, v, causal), dense(q, k, v, causal), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", [attention_backward, attention_backward_reference])
def test_the_backward_is_autograd_s_of_the_closed_form(function, shape, causal):
    q, k, v, grad = made(shape)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = torch.zeros_like(q)
    for h in range(q.shape[1]):
        group = h * k.shape[1] // q.shape[1]
        scores = leaves[0][:, h] @ leaves[1][:, group].mT / q.shape[3] ** 0.5
        if causal:
            scores = scores + torch.full(scores.shape[1:], float("-inf"), dtype=q.dtype).triu(1)
        out[:, h] = scores.softmax(-1) @ leaves[2][:, group]
    out.backward(grad)
    whole, lse = attention_reference(q, k, v, causal)
    found = function(grad, (q, k, v, whole), lse, causal)
    for gradient, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_blocked_path_has_the_values_and_gradients_of_the_closed_form(shape, dtype):
    q, k, v, grad = made(shape)
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = causal_attention(*leaves)
    out.backward(grad.to(dtype))
    expected, lse = dense(q, k, v, causal=True)
    tight = 1e-11 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(out.double(), expected, rtol=tight, atol=tight)
    gradients = attention_backward_reference(grad, (q, k, v, expected), lse, True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(leaf.grad.double(), gradient, rtol=tight, atol=tight)


def test_long_rows_and_rows_without_gradients_give_the_same_values():
    q, k, v, _ = made("many", torch.float32)
    blocked = causal_attention(*(x.clone().requires_grad_() for x in (q, k, v)))
    with torch.no_grad():
        torch.testing.assert_close(causal_attention(q, k, v), blocked, rtol=1e-5, atol=1e-6)
    long = [x.repeat(1, 1, 20, 1) for x in (q, k, v)]  # 660 tokens: past the blocks' limit
    expected, _ = attention_reference(*(x.double() for x in long), True)
    found = causal_attention(*(x.requires_grad_() for x in long))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_parts_over_blocks_of_keys_merge_to_the_whole():
    q, k, v, _ = made("groups")
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=q.dtype)
    for keys in (slice(0, 2), slice(2, 3), slice(3, None)):
        part, part_lse = attention_reference(q, k[:, :, keys], v[:, :, keys], False)
        merge_(out, lse, part, part_lse)
    whole, whole_lse = dense(q, k, v, causal=False)
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)
