"""Attention and its blocks against the closed form of softmax attention in float64."""

import pytest
import torch
import torch.nn.functional as F
from exact import distance, softmax_attention, triangle
from torch._subclasses.fake_tensor import FakeTensorMode

from mtcli.kernels import limits
from mtcli.kernels.attention import attention as dispatch
from mtcli.kernels.attention import cpu
from mtcli.kernels.attention.attention import (
    attention,
    attention_backward,
    attention_backward_reference,
    attention_reference,
    document_sdpa,
    masked_sdpa,
    sdpa,
)
from mtcli.kernels.attention.merge import merge_

SHAPES = {"one head": (1, 1, 1, 5, 8), "groups": (2, 6, 2, 7, 4), "many": (2, 4, 4, 33, 16)}
SHAPES |= {"long": (1, 2, 1, 70, 4), "longer": (1, 1, 1, 260, 4)}  # where other kernels take over


@pytest.fixture(params=[0, 2048], ids=["intel", "other"])
def on_any_cpu(monkeypatch, request):
    """Rows that GEMMs take on a CPU, by its maker."""
    monkeypatch.setattr(dispatch, "CPU_ATTENTION_ROW_BYTES", request.param)
    monkeypatch.setattr(dispatch, "CPU_ATTENTION_LSE_ROW_BYTES", request.param // 4)


def made(shape, dtype=torch.float64):
    b, h, g, n, d = SHAPES[shape]
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(b, x, n, d, generator=generator, dtype=dtype) for x in (h, g, g, h)]


def exact(shape, mask=None, dtype=torch.float64):
    """(inputs, results, gradients of q, k and v) in float64, of inputs rounded to a dtype."""
    inputs = [x.to(dtype) for x in made(shape)]
    leaves = [x.clone().double().requires_grad_() for x in inputs[:3]]
    results = softmax_attention(*leaves, mask)
    gradients = torch.autograd.grad(results[0], leaves, inputs[3].double())
    return inputs, [x.detach() for x in results], gradients


def masks(shape):
    """(causal, what it sees)."""
    return (False, None), (True, triangle(SHAPES[shape][3]))


def assert_close(found, expected, tight):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tight, atol=tight)


def test_attention_and_its_backward_are_the_closed_form_and_autograd_s(on_any_cpu, subtests):
    ways = (attention, attention_backward), (attention_reference, attention_backward_reference)
    for shape in SHAPES:
        for causal, mask in masks(shape):
            (q, k, v, grad), (whole, lse), gradients = exact(shape, mask)
            for forward, backward in ways:
                with subtests.test(f"{shape}, {causal=}, {forward.__name__}"):
                    assert_close(forward(q, k, v, causal), (whole, lse), 1e-12)
                    found = backward(grad, (q, k, v, whole), lse, causal)
                    assert_close(found, gradients, 1e-11)


def half_seen(shape):
    """A mask of every second key or so; some queries see none, others only the last."""
    b, _, _, n, _ = SHAPES[shape]
    mask = torch.rand(b, 1, n, n, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[0, 0, 2:4] = False
    mask[0, 0, 3, -1] = True
    mask[-1, 0, n - 1] = False
    return mask


@pytest.mark.parametrize("function", [attention, attention_reference])
def test_a_query_sees_what_its_mask_says_and_nothing_where_that_is_nothing(function):
    for shape in SHAPES:
        (q, k, v, _), mask = made(shape), half_seen(shape)
        out, lse = function(q, k, v, False, mask)
        assert_close((out, lse), softmax_attention(q, k, v, mask), 1e-12)
        assert lse[0, 0, 2] == float("-inf") and (out[0, :, 2] == 0).all()


@pytest.mark.parametrize("function", [attention_backward, attention_backward_reference])
def test_the_backward_through_a_mask_is_autograd_s_over_all_blocks(function):
    for shape in SHAPES:
        n = SHAPES[shape][3]
        # everyone sees itself, though not in every block
        mask = half_seen(shape) | torch.eye(n, dtype=torch.bool)
        (q, k, v, grad), (whole, lse), gradients = exact(shape, mask)
        dq, parts = torch.zeros_like(q), []
        for keys in (slice(0, n // 2), slice(n // 2, None)):
            saved = q, k[:, :, keys], v[:, :, keys], whole
            part, *of_kv = function(grad, saved, lse, False, mask[..., keys])
            dq += part
            parts.append(of_kv)
        found = dq, *(torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))
        assert_close(found, gradients, 1e-11)


CAP = 0.7


@pytest.mark.parametrize("blocks", [1, 2**20], ids=["of a query", "of many"])
def test_capped_attention_is_the_closed_form_under_any_mask(monkeypatch, blocks, subtests):
    monkeypatch.setattr(limits, "CPU_BLOCK_BYTES", blocks)
    for shape in SHAPES:
        q, k, v, grad = made(shape)
        hidden = half_seen(shape) | torch.eye(q.shape[2], dtype=torch.bool)
        for causal, given in (*masks(shape), (False, hidden)):
            mask = None if causal else given
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            expected = softmax_attention(*leaves, given, CAP)
            gradients = torch.autograd.grad(expected[0], leaves, grad)
            whole, lse = (x.detach() for x in expected)
            forwards = attention, attention_reference
            backwards = attention_backward, attention_backward_reference
            for forward, backward in zip(forwards, backwards, strict=True):
                with subtests.test(f"{shape}, {causal=}, {forward.__name__}"):
                    assert_close(forward(q, k, v, causal, mask, CAP), (whole, lse), 1e-12)
                    found = backward(grad, (q, k, v, whole), lse, causal, mask, CAP)
                    assert_close(found, gradients, 1e-11)
            mine = [x.clone().requires_grad_() for x in (q, k, v)]
            out = sdpa(*mine, causal, CAP) if mask is None else masked_sdpa(*mine, mask, CAP)
            assert_close((out, *torch.autograd.grad(out, mine, grad)), (whole, *gradients), 1e-11)


@pytest.mark.parametrize("cap", [0.0, CAP])
def test_sinks_join_the_softmax_under_any_mask(cap, subtests):
    for shape in SHAPES:
        q, k, v, grad = made(shape)
        sinks = torch.linspace(-2.0, 3.0, q.shape[0] * q.shape[1]).to(q.dtype).view(q.shape[:2])
        for causal, given in masks(shape):
            with subtests.test(f"{shape}, {causal=}"):
                mask = None if causal else given
                leaves, mine = (
                    [x.clone().requires_grad_() for x in (q, k, v, sinks)] for _ in "ab"
                )
                expected, _ = softmax_attention(*leaves[:3], given, cap, leaves[3])
                gradients = torch.autograd.grad(expected, leaves, grad)
                options = (cap, mine[3])
                if mask is None:
                    out = sdpa(*mine[:3], causal, *options)
                else:
                    out = masked_sdpa(*mine[:3], mask, *options)
                found = (out, *torch.autograd.grad(out, mine, grad))
                assert_close(found, (expected, *gradients), 1e-11)


def test_capped_documents_see_themselves_alone():
    q, k, v, _ = made("groups")
    lengths = [3, 4, 7]
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [2] * 7])
    mask = (documents[:, :, None] == documents[:, None])[:, None] & triangle(7)
    expected, _ = softmax_attention(q, k, v, mask, CAP)
    assert_close([document_sdpa(q, k, v, True, lengths, CAP)], [expected], 1e-12)


def test_a_query_without_keys_is_nothing_with_a_cap_too():
    (q, k, v, _), mask = made("many"), half_seen("many")
    out, lse = attention(q, k, v, False, mask, CAP)
    assert_close((out, lse), softmax_attention(q, k, v, mask, CAP), 1e-12)
    assert lse[0, 0, 2] == float("-inf") and (out[0, :, 2] == 0).all()


def differentiated(shape, causal, dtype):
    """`sdpa`'s result and gradients."""
    *leaves, grad = (x.to(dtype) for x in made(shape))
    out = sdpa(*(x.requires_grad_() for x in leaves), causal)
    return out, *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_blocked_path_has_the_values_and_gradients_of_the_closed_form(
    on_any_cpu, dtype, subtests
):
    for shape in SHAPES:
        for causal, mask in masks(shape):
            _, (whole, _), gradients = exact(shape, mask)
            with subtests.test(f"{shape}, {causal=}"):
                found = differentiated(shape, causal, dtype)
                tight = 1e-11 if dtype == torch.float64 else 2e-5
                assert_close(found, (whole, *gradients), tight)


def test_float16_on_a_cpu_is_rounded_at_the_ends_only(on_any_cpu):
    for shape in SHAPES:
        _, (whole, _), gradients = exact(shape, masks(shape)[1][1], torch.float16)
        found = differentiated(shape, True, torch.float16)
        for ours, theirs in zip(found, (whole, *gradients), strict=True):
            assert ours.dtype == torch.float16 and distance(ours, theirs) < 2.0**-11, shape


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_documents_of_rows_have_the_values_and_gradients_that_each_has_alone(
    on_any_cpu, dtype, causal
):
    lengths, generator = [5, 27, 1, 12, 19], torch.Generator().manual_seed(3)
    shapes = ((2, 4, 32, 8), (2, 2, 32, 8), (2, 2, 32, 8), (2, 4, 32, 8))
    *qkv, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    wide = [x.double().requires_grad_() for x in qkv]
    ends = torch.tensor(lengths).cumsum(0)
    of = torch.searchsorted(ends, torch.arange(64), right=True).view(2, 1, 32)
    mask = of[..., None] == of[..., None, :]
    mask = mask.tril() if causal else mask
    expected, _ = softmax_attention(*wide, mask)
    expected.backward(grad.double())
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    found = document_sdpa(*leaves, causal, lengths)
    found.backward(grad)
    tight = 1e-12 if dtype == torch.float64 else 2e-2
    pairs = zip(
        (found, *(x.grad for x in leaves)), (expected, *(x.grad for x in wide)), strict=True
    )
    assert all(distance(ours, theirs) < tight for ours, theirs in pairs)


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
    assert_close((out, lse), softmax_attention(q, k, v), 1e-12)


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


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_masked_row_on_a_gpu_is_given_to_the_kernel_that_takes_masks(monkeypatch, groups):
    given = []

    def attend(q, k, v, attn_mask, enable_gqa):
        given.append((k.shape[1], v.shape[1], enable_gqa))
        return q

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    q, k = (torch.empty(2, heads, 8, 16) for heads in (4, groups))
    masked_sdpa(q.as_subclass(OnGpu), k, k, mask)
    masked_sdpa(q, k, k, mask)
    # Groups are no kernel's business there: the fallback would hold the scores of all heads.
    assert given == [(4, 4, False), (groups, groups, groups < 4)]
