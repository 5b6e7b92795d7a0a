import pytest
import torch
import torch.nn.functional as F

from mtcli.kernels.cross_entropy import (
    cross_entropy_backward_,
    exp_and_target_,
    row_max,
)
from mtcli.kernels.limits import CPU_BLOCK_BYTES

T = 11


def made(columns, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(T, columns, generator=generator, dtype=torch.float64) * 4
    targets = torch.randint(columns, (T,), generator=generator)
    return logits.to(dtype), targets


def ours(logits, targets, valid, grad):
    """(losses, gradient) by the three parts, as one shard that is the whole vocabulary."""
    top = row_max(logits[:, :valid])
    exps, sums, at_target = exp_and_target_(logits.clone(), top, targets, valid)
    losses = sums.log() - at_target
    owned = torch.ones_like(targets, dtype=torch.bool)
    return losses, cross_entropy_backward_(exps, sums, targets, owned, grad)


TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


# 40,000 float32 columns are 160 kB: more rows than a block of 1 MiB holds
@pytest.mark.parametrize("columns", [1, 2, 129, 40_000])
def test_the_parts_are_cross_entropy_and_its_gradient(columns):
    for dtype, tolerance in TOLERANCE.items():
        logits, targets = made(columns, dtype)
        grad = torch.linspace(0.5, 2.0, T, dtype=torch.promote_types(dtype, torch.float32))
        losses, gradient = ours(logits, targets, columns, grad)
        exact = logits.double().requires_grad_()
        expected = F.cross_entropy(exact, targets, reduction="none")
        expected.backward(grad.double())
        assert losses.dtype == grad.dtype and gradient.dtype == dtype
        torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        error = (gradient.double() - exact.grad).norm() / max(exact.grad.norm(), 1.0)
        assert error < tolerance, dtype


def test_a_small_gradient_of_float16_logits_is_rounded_element_by_element():
    """1 / 2**18 tokens over a vocabulary of 40,000: grad / sums is far below float16's normals."""
    logits, targets = made(40_000, torch.float16)
    logits /= 100  # near uniform, as at the start of training
    grad = torch.full((T,), 2.0**16 / 2**18)
    _, gradient = ours(logits, targets, 40_000, grad)
    exact = logits.double().softmax(-1) * 2.0**-2
    exact[torch.arange(T), targets] -= 2.0**-2
    excess = gradient.double().sum(-1) - exact.sum(-1)  # a rounded factor would shift a whole row
    assert excess.abs().max() < 2e-3 * 2.0**-2


def test_a_block_holds_fewer_rows_than_the_test_has():
    assert CPU_BLOCK_BYTES // (40_000 * 4) < T


def test_padding_columns_take_no_part():
    logits, targets = made(40, torch.float64)
    padded = F.pad(logits, (0, 9), value=1e4)
    grad = torch.ones(T, dtype=torch.float64)
    losses, gradient = ours(padded, targets, 40, grad)
    expected_losses, expected = ours(logits, targets, 40, grad)
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(gradient[:, :40], expected)
    assert not gradient[:, 40:].any()


def test_a_shard_of_padding_alone_adds_nothing():
    logits = torch.full((T, 5), 7.0)
    assert row_max(logits[:, :0]).tolist() == [float("-inf")] * T
    top, targets = torch.zeros(T), torch.zeros(T, dtype=torch.int64)
    exps, sums, at_target = exp_and_target_(logits, top, targets, 0)
    assert not exps.any() and not sums.any() and not at_target.any()


def test_a_target_of_another_shard_has_the_softmax_alone_as_gradient():
    logits, targets = made(30, torch.float64)
    exps, sums, _ = exp_and_target_(logits.clone(), row_max(logits), targets, 30)
    owned = torch.arange(T) % 2 == 0
    grad = torch.ones(T, dtype=torch.float64)
    gradient = cross_entropy_backward_(exps, sums, targets, owned, grad)
    onehot = F.one_hot(targets, 30) * owned[:, None]
    torch.testing.assert_close(gradient, logits.softmax(-1) - onehot)


def test_the_logits_memory_is_the_gradient():
    logits, targets = made(30, torch.float32)
    exps, sums, _ = exp_and_target_(logits, row_max(logits), targets, 30)
    owned = torch.ones_like(targets, dtype=torch.bool)
    gradient = cross_entropy_backward_(exps, sums, targets, owned, torch.ones(T))
    assert gradient.data_ptr() == logits.data_ptr()


def test_the_row_maximum_is_wide():
    logits, _ = made(30, torch.bfloat16)
    assert row_max(logits).dtype == torch.float32
    assert torch.equal(row_max(logits), logits.float().max(-1).values)
