from functools import partial

import pytest
import torch
from exact import cases_on, check, seeded

from mtcli.kernels.norm import add_norm, norm

layer_norm, rms_norm = (partial(norm, eps=1e-3, centred=centred) for centred in (True, False))
add_layer_norm, add_rms_norm = (
    partial(add_norm, eps=1e-3, centred=centred) for centred in (True, False)
)
# Less than a tile, more than the programs hold, long, in whole and broken chunks.
SHAPES = [(5, 7), (70, 130), (2, 1, 2051), (5, 9000)]


def centred(x):
    return x - x.mean(-1, keepdim=True)


def layer_formula(x, weight, bias):
    x = centred(x)
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias


def rms_formula(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def inputs(shape, device, vectors):
    x, y = (2.0 * seeded(*shape, seed=seed, device=device) + 1.0 for seed in (1, 2))
    return [x, y, *(seeded(shape[-1], seed=seed, device=device) for seed in range(3, 3 + vectors))]


def test_norms_and_their_gradients_are_the_formula(device, subtests):
    norms = ((layer_norm, layer_formula, 2), (rms_norm, rms_formula, 1))
    for shape, dtype in cases_on(device, SHAPES):
        for function, formula, vectors in norms:
            x, _, *weights = inputs(shape, device, vectors)
            with subtests.test(f"{formula.__name__} {shape} {dtype}"):
                check(function, formula, [x, *weights], dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_before_a_layer_norm_gets_both_gradients(device, shape):
    check(
        add_layer_norm,
        lambda x, y, *weights: (x + y, layer_formula(x + y, *weights)),
        inputs(shape, device, 2),
        torch.float32,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_before_an_rms_norm_gets_both_gradients(device, dtype):
    def formula(x, y, weight):
        total = x + y
        kept = total + (total.detach().to(dtype).double() - total.detach())  # as it is kept
        return kept, rms_formula(kept, weight)

    check(add_rms_norm, formula, inputs((9, 130), device, 1), dtype)


def test_a_bias_of_what_is_added_gets_its_gradient_with_the_sum(device, subtests):
    kinds = ((add_layer_norm, layer_formula, 2), (add_rms_norm, rms_formula, 1))
    kinds += ((add_layer_norm, lambda x, w: layer_formula(x, w, 0.0), 1),)
    for shape in SHAPES:
        for function, formula, vectors in kinds:

            def whole(x, y, b, *weights, of=formula):
                return x + y + b, of(x + y + b, *weights)

            def ours(x, y, b, *weights, of=function):
                return of(x, y, *weights, y_bias=b)

            x, y, y_bias, *weights = inputs(shape, device, vectors + 1)
            with subtests.test(f"{shape} {vectors}"):
                check(ours, whole, [x, y, y_bias, *weights], torch.float32)


def test_a_sum_with_a_bias_is_rounded_once(device):
    x, y, y_bias, weight = (v.half() for v in inputs((6, 40), device, 2))
    total, _ = add_rms_norm(x, y, weight, y_bias=y_bias)
    assert torch.equal(total, (x.float() + (y.float() + y_bias.float())).half())


def test_a_layer_norm_may_have_no_bias(device):
    x, _, weight = inputs((3, 20), device, 1)
    formula = lambda x, weight: layer_formula(x, weight, 0.0)  # noqa: E731
    check(layer_norm, formula, [x, weight], torch.float32)


def test_an_offset_is_added_to_the_weight_ahead_of_any_rounding(device, subtests):
    norms = ((layer_norm, layer_formula, 2), (rms_norm, rms_formula, 1))
    for shape, dtype in cases_on(device, SHAPES):
        for function, formula, vectors in norms:
            x, _, *weights = inputs(shape, device, vectors)
            with subtests.test(f"{formula.__name__} {shape} {dtype}"):
                check(
                    partial(function, offset=1.0),
                    lambda x, w, *b, of=formula: of(x, 1.0 + w, *b),  # noqa: B023
                    [x, weights[0] * 0.02, *weights[1:]],
                    dtype,
                )
    check(
        partial(add_rms_norm, offset=1.0),
        lambda x, y, w: (x + y, rms_formula(x + y, 1.0 + w)),
        inputs((9, 130), device, 1),
        torch.float32,
    )


def test_on_a_cpu_an_offset_is_added_in_float32_too():
    for function, formula, vectors in ((layer_norm, layer_formula, 2), (rms_norm, rms_formula, 1)):
        x, _, *weights = inputs((9, 130), torch.device("cpu"), vectors)
        check(
            partial(function, offset=1.0),
            lambda x, w, *b, of=formula: of(x, 1.0 + w, *b),
            [x, weights[0] * 0.02, *weights[1:]],
            torch.bfloat16,
        )


def test_one_result_alone_may_be_used(device):
    x, y, weight = inputs((4, 12), device, 1)
    check(
        lambda *a: add_rms_norm(*a)[0],
        lambda x, y, w: x + y + 0 * w.sum(),
        [x, y, weight],
        torch.float32,
    )
    check(
        lambda *a: add_rms_norm(*a)[1],
        lambda x, y, w: rms_formula(x + y, w),
        [x, y, weight],
        torch.float32,
    )


def test_rows_may_lie_apart(device):
    x, _, weight = inputs((8, 12), device, 1)
    check(
        lambda x, w: rms_norm(x[::2], w),
        lambda x, w: rms_formula(x[::2], w),
        [x, weight],
        torch.float32,
    )
    check(
        lambda x, w: rms_norm(x.t()[:, :5], w[:5]),
        lambda x, w: rms_formula(x.t()[:, :5], w[:5]),
        [x, weight],
        torch.float32,
    )
