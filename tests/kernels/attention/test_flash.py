"""Flash attention's values, log-sum-exps and gradients against softmax attention in float64."""

import pytest
import torch
from exact import TOLERANCE, check, distance, seeded, softmax_attention, triangle

from mtcli.kernels.attention.attention import attention, attention_backward
from mtcli.kernels.attention.flash_backward import flash_backward
from mtcli.kernels.attention.flash_forward import flash
from mtcli.kernels.attention.merge import merge_
from mtcli.kernels.attention.tiles import KeyRanges
from mtcli.kernels.softcap import softcap, softcap_slope
from mtcli.kernels.triton_launch import TritonKernel

SHAPES = {  # b, h, g, n, m, d
    "groups, odd": (2, 4, 2, 37, 37, 20),
    "tiles of 64 and a part": (1, 1, 1, 133, 133, 16),
    "more keys than queries": (1, 2, 2, 5, 100, 64),
    "wide groups": (1, 2, 1, 70, 70, 160),
}
DOCUMENTS = [[40, 1, 1, 70, 21], [3, 130]]  # of 133 tokens


def made(shape, device, queries=1.0):
    b, h, g, n, m, d = shape
    q = queries * seeded(b, h, n, d, device=device)
    return [q, *(seeded(b, g, m, d, seed=i, device=device) for i in (1, 2))]


def spans_of(mask):
    """Where the keys begin and end that each query sees."""
    seen = mask[:, 0].int()
    first = seen.argmax(-1)
    return KeyRanges(first.int(), (first + seen.sum(-1)).int())


def dtypes(device):
    """The interpreter has no products in 16 bits."""
    return [torch.float32] if device.type == "cpu" else list(TOLERANCE)


def agrees(device, shape, causal, mask, spans=None, cap=0.0):
    for dtype in dtypes(device):
        bound = 2.5 * TOLERANCE[dtype]  # probabilities are rounded too
        results = []

        def ours(q, k, v, results=results):
            results += flash(q, k, v, causal, *(spans or (None, None)), cap)
            return results[0]

        inputs = made(shape, device)
        formula = lambda *x: softmax_attention(*x, mask, cap)[0]  # noqa: E731
        check(ours, formula, inputs, dtype, tolerance=bound)
        lse = results[1]
        assert lse.dtype == torch.float32
        exact = softmax_attention(*(x.to(dtype).cpu().double() for x in inputs), mask, cap)[1]
        assert distance(lse, exact) < 2e-6


@pytest.mark.parametrize(
    ("shape", "causal"),
    [
        ("groups, odd", True),
        ("groups, odd", False),
        ("tiles of 64 and a part", True),
        ("more keys than queries", False),
        ("wide groups", True),
    ],
)
def test_flash_attention_is_softmax_attention_and_so_are_its_gradients(device, shape, causal):
    b, _, _, n, m, _ = SHAPES[shape]
    mask = torch.ones(b, 1, n, m, dtype=torch.bool)
    agrees(device, SHAPES[shape], causal, mask.tril() if causal else mask)


@pytest.mark.parametrize(
    "shape", ["groups, odd", "tiles of 64 and a part", "more keys than queries", "wide groups"]
)
def test_capped_scores_and_their_gradients_are_the_formula(device, shape):
    b, _, _, n, m, _ = SHAPES[shape]
    mask, causal = torch.ones(b, 1, n, m, dtype=torch.bool), n == m
    agrees(device, SHAPES[shape], causal, mask.tril() if causal else mask, cap=1.5)


@pytest.mark.parametrize(
    "shape", ["groups, odd", "tiles of 64 and a part", "more keys than queries", "wide groups"]
)
def test_sinks_join_the_softmax_and_have_the_formula_s_gradients(device, shape):
    b, h, _, n, m, _ = SHAPES[shape]
    sinks, causal = torch.linspace(-1.0, 4.0, b * h).view(b, h), n == m
    mask = torch.ones(b, 1, n, m, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    for dtype in dtypes(device):
        check(
            lambda *x: flash(*x[:3], causal, None, None, 0.0, x[3])[0],
            lambda *x: softmax_attention(*x[:3], mask, 0.0, x[3])[0],
            (*made(SHAPES[shape], device), sinks.to(device)),
            dtype,
            tolerance=2.5 * TOLERANCE[dtype],
        )


@pytest.mark.parametrize(
    ("causal", "rows"),
    [(True, DOCUMENTS), (False, DOCUMENTS[:1])],
    ids=["causal, a list each", "one list"],
)
def test_queries_see_their_own_documents_alone(device, causal, rows):
    documents = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in rows])
    mask = (documents[:, None, :, None] == documents[:, None, None, :]) & (
        triangle(133) if causal else True
    )
    spans = KeyRanges(*(x.to(device) for x in spans_of(mask)))
    agrees(device, (len(rows), 2, 1, 133, 133, 16), False, mask, spans)


@pytest.mark.parametrize("window", [1, 40])
def test_queries_see_a_window_on_both_sides(device, window):
    distance = torch.arange(133)[:, None] - torch.arange(133)
    mask = (distance.abs() <= window)[None, None]
    spans = KeyRanges(*(x.to(device) for x in spans_of(mask)))
    agrees(device, (1, 2, 1, 133, 133, 16), False, mask, spans)


def test_sequences_and_heads_are_more_than_the_second_dimension_of_a_grid_holds(
    monkeypatch, device
):
    grids = []

    def noted(kernel, grid, arguments, constants, config):
        grids.append(grid({**config, **constants}))

    monkeypatch.setattr(TritonKernel, "_launch_as", noted)
    q = torch.zeros(8, 8200, 3, 16, device=device)
    lse = q[..., 0].clone()
    flash_backward(q, q, q, q, q, lse, True, None, None)
    flash(q, q, q, True, None, None)
    merge_(q, lse, q, lse)
    assert len(grids) == 4
    for grid in grids:
        assert grid[0] >= 8 * 8200 and all(n < 2**16 for n in grid[1:])  # CUDA's limit


def test_what_sees_nothing_is_nothing_and_merges_so(device):
    q, k, v = (x.float() for x in made((1, 2, 2, 70, 70, 16), device))
    first = torch.full((1, 70), 50, dtype=torch.int32, device=device)
    end = torch.where(torch.arange(70, device=device) < 66, 50, 70).int()[None]
    out, lse = attention(q, k, v, False, KeyRanges(first, end))
    assert (out[:, :, :66] == 0).all() and (lse[:, :, :66] == float("-inf")).all()
    assert lse[:, :, 66:].isfinite().all()
    whole = attention(q, k, v, True)
    merged, total = (x.clone() for x in whole)
    merge_(merged[:, :, :66], total[:, :, :66], out[:, :, :66], lse[:, :, :66])
    assert torch.equal(merged, whole[0]) and torch.equal(total, whole[1])
    grads = attention_backward(
        torch.ones_like(q), (q, k, v, out), lse, False, KeyRanges(first, end)
    )
    assert (grads[0][:, :, :66] == 0).all() and all(x.isfinite().all() for x in grads)
    assert (grads[1][:, :, :50] == 0).all() and (grads[2][:, :, :50] == 0).all()


def test_gradients_of_blocks_of_keys_add_up_to_those_of_all(device):
    q, k, v = (x.float() for x in made((1, 4, 2, 70, 70, 16), device))
    grad = seeded(1, 4, 70, 16, seed=9, device=device).float()
    out, lse = attention(q, k, v, False)
    expected = attention_backward(grad, (q, k, v, out), lse, False)
    dq, parts = torch.zeros_like(q), []
    for keys in (slice(0, 29), slice(29, None)):  # as they come round a ring, and not contiguous
        saved = q, k[:, :, keys], v[:, :, keys], out
        part, *of_kv = attention_backward(grad, saved, lse, False)
        dq += part
        parts.append(of_kv)
    assert distance(dq, expected[0]) < 2e-6
    for whole, pieces in zip(expected[1:], zip(*parts, strict=True), strict=True):
        assert distance(torch.cat(pieces, 2), whole) < 2e-6


def test_large_scores_do_not_overflow(device):
    inputs = made((1, 1, 1, 37, 37, 16), device, queries=200.0)
    q, k, v = (x.float() for x in inputs)
    out, lse = attention(q, k, v, True)
    expected = softmax_attention(*(x.cpu().double() for x in (q, k, v)), triangle(37))
    assert distance(out, expected[0]) < 1e-4 and distance(lse, expected[1]) < 2e-6


def test_a_soft_cap_and_its_slope_are_those_of_tanh(device):
    x = 3.0 * seeded(40, 7, device=device).double().requires_grad_()
    capped = softcap(x, 1.5)
    torch.testing.assert_close(capped, 1.5 * torch.tanh(x / 1.5))
    (slope,) = torch.autograd.grad(capped.sum(), x)
    torch.testing.assert_close(softcap_slope(capped.detach(), 1.5), slope)
    assert softcap(x, 0.0) is x
