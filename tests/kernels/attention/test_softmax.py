import pytest
import torch
from exact import cases_on, check, seeded

from mtcli.kernels.attention.softmax import (
    MAX_KEYS,
    ScoreDropout,
    masked_softmax,
    masked_softmax_reference,
)
from mtcli.kernels.random import keep_mask

KEY, DROP, HEADS, FIRST_HEAD = -7777777777777777777, 0.3, 7, 2


def dropout_of(shape, device="cpu", drop=DROP):
    """Dropout of queries that are tokens number 2**40, 2**40 + 3 and so on."""
    b, _, n, _ = shape
    numbers = 2**40 + 3 * torch.arange(b * n, device=device).view(b, n)
    return ScoreDropout(numbers, HEADS, FIRST_HEAD, KEY, drop)


def kept(shape, drop=DROP):
    """Which probabilities are kept, one head and query at a time."""
    b, h, n, m = shape
    keep = torch.empty(shape)
    for i in range(b):
        for head in range(h):
            for query in range(n):
                token = 2**40 + 3 * (i * n + query)
                index = (token * HEADS + FIRST_HEAD + head) * m + torch.arange(m)
                keep[i, head, query] = keep_mask(KEY, index, drop)
    return keep.double()


def formula(scores, mask, keep):
    weights = scores.exp() * mask
    p = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
    return p * keep / (1.0 - DROP)


def mask_of(b, n, m):
    mask = torch.rand(b, 1, n, m, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[:, :, 0] = False  # a query that sees nothing
    return mask


def test_softmax_with_dropout_and_its_gradient_are_the_formula(device, subtests):
    shapes = [(2, 3, 4, 5), (1, 2, 3, 1031), (3, 1, 7, 64)]
    for i, (shape, dtype) in enumerate(cases_on(device, [*shapes, shapes[0]])):
        b, _, n, m = shape
        mask, keep = mask_of((1, b)[i % 2], n, m), kept(shape)  # one mask, or a mask each
        on_device, dropout = mask.to(device), dropout_of(shape, device)
        with subtests.test(f"{shape} {dtype} {len(mask)}"):
            check(
                lambda x, mask=on_device, dropout=dropout: masked_softmax(x, mask, dropout),
                lambda x, mask=mask, keep=keep: formula(x, mask, keep),
                [2.0 * seeded(*shape, device=device)],
                dtype,
            )


def test_softmax_without_a_mask_is_over_all_keys(device):
    shape = (1, 2, 3, 33)
    dropout, keep = dropout_of(shape, device), kept(shape)
    x = 3.0 * seeded(*shape, device=device)
    check(
        lambda x: masked_softmax(x, None, dropout),
        lambda x: formula(x, 1.0, keep),
        [x],
        torch.float32,
    )


@pytest.mark.parametrize("drop", [0.0, 0.1, 0.75])
def test_what_is_kept_is_what_the_reference_keeps(device, drop):
    shape = (2, 3, 4, 70)
    scores, dropout = torch.zeros(shape, device=device), dropout_of(shape, device, drop)
    found = masked_softmax(scores, None, dropout)
    assert torch.equal(found.cpu() > 0, kept(shape, drop) > 0)
    assert torch.equal(found > 0, masked_softmax_reference(scores, None, dropout) > 0)


def test_a_query_that_sees_nothing_gets_zeros_and_gives_no_gradient(device):
    scores = torch.zeros(1, 1, 2, 4, device=device, requires_grad=True)
    mask = torch.tensor([[False] * 4, [True] * 4], device=device).view(1, 1, 2, 4)
    p = masked_softmax(scores, mask, dropout_of(scores.shape, device, 0.0))
    assert p.flatten().tolist() == [0.0] * 4 + [0.25] * 4
    (grad,) = torch.autograd.grad(p.square().sum(), scores)
    assert not grad.any()


def test_nothing_is_kept_for_backward_but_the_scores_and_a_number_per_row(device):
    scores, saved = torch.zeros(1, 2, 3, 4, device=device, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        masked_softmax(scores * 1, None, dropout_of(scores.shape, device))
    assert sorted(x.numel() for x in saved if x.is_floating_point()) == [6, 24]


def test_the_reference_is_the_formula_and_takes_rows_too_long_for_a_kernel(device):
    shape = (2, 1, 4, 6)
    x, mask = seeded(*shape), mask_of(2, 4, 6)
    found = masked_softmax_reference(x, mask, dropout_of(shape))
    torch.testing.assert_close(found, formula(x, mask, kept(shape)))
    long = torch.zeros(1, 1, 1, MAX_KEYS + 1, device=device)
    whole = masked_softmax(long, None, dropout_of(long.shape, device, 0.0))
    assert whole.sum().item() == pytest.approx(1.0, rel=1e-4)
