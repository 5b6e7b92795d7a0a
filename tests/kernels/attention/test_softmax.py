import pytest
import torch
from exact import check, seeded

from mtcli.kernels.attention.softmax import MAX_KEYS, masked_softmax, masked_softmax_reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def formula(scores, mask, scale):
    weights = (scores * scale).exp() * mask
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


def mask_of(b, n, m):
    mask = torch.rand(b, 1, n, m, generator=torch.Generator().manual_seed(4)) < 0.6
    mask[:, :, 0] = False  # a query that sees nothing
    return mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 2, 3, 1031), (3, 1, 7, 64)])
@pytest.mark.parametrize("shared", [False, True], ids=["a mask each", "one mask"])
def test_masked_softmax_and_its_gradient_are_the_formula(device, shape, dtype, shared):
    b, _, n, m = shape
    mask = mask_of(1 if shared else b, n, m)
    on_device = mask.to(device)
    check(
        lambda x: masked_softmax(x, on_device, 0.7),
        lambda x: formula(x, mask, 0.7),
        [3.0 * seeded(*shape, device=device)],
        dtype,
        tolerance=8e-3 if dtype == torch.bfloat16 else None,  # the kept probabilities are rounded
    )


def test_softmax_without_a_mask_is_over_all_keys(device):
    x = 3.0 * seeded(1, 2, 3, 33, device=device)
    check(
        lambda x: masked_softmax(x, None, 1.3), lambda x: formula(x, 1.0, 1.3), [x], torch.float32
    )


def test_a_query_that_sees_nothing_gets_zeros_and_gives_no_gradient(device):
    scores = torch.zeros(1, 1, 2, 4, device=device, requires_grad=True)
    mask = torch.tensor([[False] * 4, [True] * 4], device=device).view(1, 1, 2, 4)
    p = masked_softmax(scores, mask)
    assert p.flatten().tolist() == [0.0] * 4 + [0.25] * 4
    (grad,) = torch.autograd.grad(p.square().sum(), scores)
    assert not grad.any()


def test_the_reference_is_the_formula_and_takes_rows_too_long_for_a_kernel(device):
    x, mask = seeded(2, 1, 4, 6), mask_of(2, 4, 6)
    torch.testing.assert_close(masked_softmax_reference(x, mask, 0.5), formula(x, mask, 0.5))
    long = torch.zeros(1, 1, 1, MAX_KEYS + 1, device=device)
    assert masked_softmax(long, None).sum().item() == pytest.approx(1.0, rel=1e-4)
