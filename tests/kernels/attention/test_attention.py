"""Attention and its blocks against the closed form of softmax attention in float64."""

from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mtcli.kernels.attention import attention as dispatch
from mtcli.kernels.attention import cpu
from mtcli.kernels.attention.attention import (
    attention,
    attention_backward,
    attention_backward_reference,
    attention_reference,
    document_sdpa,
    sdpa,
)
from mtcli.kernels.attention.merge import merge_

SHAPES = {"one head": (1, 1, 1, 5, 8), "groups": (2, 6, 2, 7, 4), "many": (2, 4, 4, 33, 16)}
SHAPES |= {"long": (1, 2, 1, 70, 4), "longer": (1, 1, 1, 260, 4)}  # where other kernels take over


CASES = [(shape, causal) for shape in SHAPES for causal in (True, False)]


@pytest.fixture(params=[0, 2048], ids=["intel", "other"])
def on_any_cpu(monkeypatch, request):
    """Rows that GEMMs take on a CPU, by its maker."""
    monkeypatch.setattr(dispatch, "CPU_ATTENTION_ROW_BYTES", request.param)
    monkeypatch.setattr(dispatch, "CPU_ATTENTION_LSE_ROW_BYTES", request.param // 4)


def made(shape, dtype=torch.float64):
    b, h, g, n, d = SHAPES[shape]
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(b, x, n, d, generator=generator, dtype=dtype) for x in (h, g, g, h)]


def dense(q, k, v, causal, mask=None):
    """(output, log-sum-exp) one query at a time, of the keys that it sees."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            group = h * k.shape[1] // q.shape[1]
            for i in range(q.shape[2]):
                seen = torch.arange(i + 1 if causal else k.shape[2])
                if mask is not None:
                    seen = seen[mask[b, 0, i]]
                scores = k[b, group, seen] @ q[b, h, i] / q.shape[3] ** 0.5
                lse[b, h, i] = scores.exp().sum().log()  # of none it is -inf
                out[b, h, i] = (scores - lse[b, h, i]).exp() @ v[b, group, seen]
    return out, lse


@cache
def exact(shape, causal):
    return dense(*made(shape)[:3], causal)


def test_attention_and_its_log_sum_exp_are_the_closed_form(on_any_cpu, subtests):
    for shape, causal in CASES:
        q, k, v, _ = made(shape)
        for function in (attention, attention_reference):
            with subtests.test(f"{shape}, {causal=}, {function.__name__}"):
                pairs = zip(function(q, k, v, causal), exact(shape, causal), strict=True)
                for found, expected in pairs:
                    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_backward_is_autograd_s_of_the_closed_form(on_any_cpu, subtests):
    for shape, causal in CASES:
        q, k, v, grad = made(shape)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = torch.zeros_like(q)
        for h in range(q.shape[1]):
            group = h * k.shape[1] // q.shape[1]
            scores = leaves[0][:, h] @ leaves[1][:, group].mT / q.shape[3] ** 0.5
            if causal:
                scores = scores + torch.full(scores.shape[1:], -torch.inf, dtype=q.dtype).triu(1)
            out[:, h] = scores.softmax(-1) @ leaves[2][:, group]
        out.backward(grad)
        whole, lse = exact(shape, causal)
        for function in (attention_backward, attention_backward_reference):
            with subtests.test(f"{shape}, {causal=}, {function.__name__}"):
                found = function(grad, (q, k, v, whole), lse, causal)
                for gradient, leaf in zip(found, leaves, strict=True):
                    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-11)


def half_seen(q):
    """A mask of every second key or so; some queries see none, others only the last."""
    b, _, n, _ = q.shape
    mask = torch.rand(b, 1, n, n, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[0, 0, 2:4] = False
    mask[0, 0, 3, -1] = True
    mask[-1, 0, n - 1] = False
    return mask


def test_a_query_sees_what_its_mask_says_and_nothing_where_that_is_nothing(subtests):
    for shape in SHAPES:
        q, k, v, _ = made(shape)
        mask = half_seen(q)
        expected, expected_lse = dense(q, k, v, False, mask)
        for function in (attention, attention_reference):
            with subtests.test(f"{shape}, {function.__name__}"):
                out, lse = function(q, k, v, False, mask)
                torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
                torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
                assert lse[0, 0, 2] == float("-inf") and (out[0, :, 2] == 0).all()


def test_the_backward_through_a_mask_is_autograd_s_over_all_blocks(subtests):
    for shape in SHAPES:
        q, k, v, grad = made(shape)
        mask, n = half_seen(q), q.shape[2]
        mask |= torch.eye(n, dtype=torch.bool)  # everyone sees itself, though not in every block
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        spread = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:]]
        scores = leaves[0] @ spread[0].mT / q.shape[3] ** 0.5
        out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ spread[1]
        out.backward(grad)
        whole, lse = dense(q, k, v, False, mask)
        for function in (attention_backward, attention_backward_reference):
            with subtests.test(f"{shape}, {function.__name__}"):
                dq, parts = torch.zeros_like(q), []
                for keys in (slice(0, n // 2), slice(n // 2, None)):
                    saved = q, k[:, :, keys], v[:, :, keys], whole
                    part, *of_kv = function(grad, saved, lse, False, mask[..., keys])
                    dq += part
                    parts.append(of_kv)
                found = dq, *(torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))
                for gradient, leaf in zip(found, leaves, strict=True):
                    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_blocked_path_has_the_values_and_gradients_of_the_closed_form(
    on_any_cpu, dtype, subtests
):
    tight = 1e-11 if dtype == torch.float64 else 2e-5
    for shape, causal in CASES:
        with subtests.test(f"{shape}, {causal=}"):
            q, k, v, grad = made(shape)
            leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
            out = sdpa(*leaves, causal)
            out.backward(grad.to(dtype))
            expected, lse = exact(shape, causal)
            torch.testing.assert_close(out.double(), expected, rtol=tight, atol=tight)
            gradients = attention_backward_reference(grad, (q, k, v, expected), lse, causal)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                torch.testing.assert_close(leaf.grad.double(), gradient, rtol=tight, atol=tight)


def test_float16_on_a_cpu_is_rounded_at_the_ends_only(on_any_cpu, subtests):
    for shape in SHAPES:
        q, k, v, grad = (x.half() for x in made(shape))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = sdpa(*leaves, True)
        out.backward(grad)
        expected, lse = dense(*(x.double() for x in (q, k, v)), causal=True)
        saved = (q.double(), k.double(), v.double(), expected)
        gradients = attention_backward_reference(grad.double(), saved, lse, True)
        found = [out, *(leaf.grad for leaf in leaves)]
        for mine, formula in zip(found, [expected, *gradients], strict=True):
            with subtests.test(shape):
                assert mine.dtype == torch.float16
                assert (mine.double() - formula).norm() < 2.0**-11 * formula.norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_documents_of_rows_have_the_values_and_gradients_that_each_has_alone(
    on_any_cpu, dtype, causal
):
    lengths, generator = [5, 27, 1, 12, 19], torch.Generator().manual_seed(3)
    shapes = ((2, 4, 32, 8), (2, 2, 32, 8), (2, 2, 32, 8), (2, 4, 32, 8))
    *qkv, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    q, k, v = (x.double().requires_grad_() for x in qkv)
    ends = torch.tensor(lengths).cumsum(0)
    of = torch.searchsorted(ends, torch.arange(64), right=True).view(2, 1, 32)
    mask = of[..., None] == of[..., None, :]
    mask = mask.tril() if causal else mask
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    expected.backward(grad.double())
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    found = document_sdpa(*leaves, causal, lengths)
    found.backward(grad)
    tight = 1e-12 if dtype == torch.float64 else 2e-2
    pairs = zip((found, *(x.grad for x in leaves)), (expected, q.grad, k.grad, v.grad), strict=True)
    for mine, formula in pairs:
        assert (mine.double() - formula).norm() < tight * formula.norm()


def test_short_documents_of_a_row_share_gemms_until_their_masked_scores_cost_more():
    assert cpu.document_groups([5, 27, 1, 12, 19], 4, 32) == [[5, 27], [1, 12, 19]]
    long = int((cpu.MASKED_SCORES / 8) ** 0.5) + 1
    assert cpu.document_groups([long, long, 3], 4, 2 * long + 3) == [[long], [long, 3]]


@pytest.mark.parametrize("causal", [True, False])
def test_long_rows_and_rows_without_gradients_give_the_same_values(on_any_cpu, causal):
    q, k, v, _ = made("many", torch.float32)
    blocked = sdpa(*(x.clone().requires_grad_() for x in (q, k, v)), causal)
    with torch.no_grad():
        torch.testing.assert_close(sdpa(q, k, v, causal), blocked, rtol=1e-5, atol=1e-6)
    long = [x.repeat(1, 1, 20, 1) for x in (q, k, v)]  # 660 tokens: past the blocks' limit
    expected, _ = attention_reference(*(x.double() for x in long), causal)
    found = sdpa(*(x.requires_grad_() for x in long), causal)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_parts_over_blocks_of_keys_merge_to_the_whole():
    q, k, v, _ = made("groups")
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=q.dtype)
    for keys in (slice(0, 2), slice(2, 3), slice(3, None)):
        part, part_lse = attention_reference(q, k[:, :, keys], v[:, :, keys], False)
        merge_(out, lse, part, part_lse)
    whole, whole_lse = exact("groups", False)
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)


def test_a_block_that_nobody_sees_merges_as_nothing_whenever_it_comes():
    q, k, v, _ = made("groups")
    none = torch.zeros(1, 1, 7, 7, dtype=torch.bool)
    expected, lse = attention_reference(q, k, v, True)
    out, total = torch.zeros_like(q), torch.full(lse.shape, float("-inf"), dtype=q.dtype)
    for causal, mask in ((False, none), (True, None), (False, none)):
        merge_(out, total, *attention(q, k, v, causal, mask))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("b", [1, 2])
def test_a_compiler_is_told_the_memory_that_operators_over_blocks_give(b):
    x = torch.randn(b, 6, 3, 4).transpose(1, 2)  # as projections are: token by token
    out = cpu._op(x, x, x, True)
    strides = [y.stride() for y in (out, *cpu._backward_op(x, x, x, x, out, True))]
    with FakeTensorMode() as mode:
        x, out = mode.from_tensor(x), mode.from_tensor(out)
        told = [cpu._op(x, x, x, True)]
        told += cpu._backward_op(x, x, x, x, out, True)
    assert [y.stride() for y in told] == strides
