"""The GPU's passes of cross entropy, in one launch and in two, against its formula in float64."""

import torch
import torch.nn.functional as F
from exact import TOLERANCE, cases_on, distance, seeded

from mtcli.kernels.cross_entropy import (
    logits_gradient_,
    logits_gradient_reference,
    losses_and_gradient_,
    row_parts,
    row_parts_reference,
)

T = 5


def made(width, dtype, device):
    logits = (4.0 * seeded(T, width, device=device)).to(dtype)
    return logits, torch.randint(width, (T,), generator=torch.Generator().manual_seed(1)).to(device)


def test_losses_and_the_gradient_of_a_whole_vocabulary_are_cross_entropys(device, subtests):
    for width, dtype in cases_on(device, [129, 9001, 1]):  # 9001: more than a block
        logits, target = made(width, dtype, device)
        exact = logits.detach().cpu().double().requires_grad_()
        expected = F.cross_entropy(exact, target.cpu(), reduction="none")
        grad = torch.linspace(0.5, 2.0, T, device=device)
        expected.backward(grad.cpu().double())
        with subtests.test(f"{width} {dtype}"):
            top, sums, at_target = row_parts(logits, target, width)
            lse = top + sums.log()
            losses = (lse - at_target).cpu().double()
            torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
            gradient = logits_gradient_(logits, lse, target, grad, width)
            assert gradient.data_ptr() == logits.data_ptr()
            if width > 1:
                assert distance(gradient, exact.grad) < TOLERANCE[dtype]
            else:
                assert gradient.abs().max() < 1e-6


def test_capped_logits_have_their_losses_and_gradients(device, subtests):
    for width, dtype in cases_on(device, [129, 9001]):
        logits, target = made(width, dtype, device)
        exact = logits.detach().cpu().double().requires_grad_()
        expected = F.cross_entropy(3.0 * (exact / 3.0).tanh(), target.cpu(), reduction="none")
        grad = torch.linspace(0.5, 2.0, T, device=device)
        expected.backward(grad.cpu().double())
        references = row_parts_reference, logits_gradient_reference
        for parts, gradient in ((row_parts, logits_gradient_), references):
            with subtests.test(f"{width} {dtype} {parts.__name__}"):
                top, sums, at_target = parts(logits, target, width, 3.0)
                lse = top + sums.log()
                losses = (lse - at_target).cpu().double()
                torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
                found = gradient(logits.clone(), lse, target, grad, width, 3.0)
                assert distance(found, exact.grad) < TOLERANCE[dtype]


def test_one_launch_has_losses_and_gradients(device, subtests):
    for width, dtype in cases_on(device, [129, 20_001, 16_384]):  # more than a block, and one
        for cap in (0.0, 3.0):
            logits, target = made(width, dtype, device)
            padded = F.pad(logits, (0, 9), value=1e4)
            exact = logits.detach().cpu().double().requires_grad_()
            capped = cap * (exact / cap).tanh() if cap else exact
            expected = F.cross_entropy(capped, target.cpu(), reduction="none")
            grad = torch.linspace(0.5, 2.0, T, device=device)
            expected.backward(grad.cpu().double())
            with subtests.test(f"{width} {dtype} {cap}"):
                losses = losses_and_gradient_(padded, target, grad, width, cap).cpu().double()
                torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
                assert distance(padded[:, :width], exact.grad) < TOLERANCE[dtype]
                assert not padded[:, width:].any()


def test_padding_columns_count_nothing_and_get_no_gradient(device):
    logits, target = made(40, torch.float32, device)
    padded = F.pad(logits, (0, 9), value=1e4)
    top, sums, at_target = row_parts(padded, target, 40)
    expected = row_parts(logits, target, 40)
    torch.testing.assert_close((top, sums, at_target), expected)
    gradient = logits_gradient_(padded, top + sums.log(), target, torch.ones_like(top), 40)
    assert gradient[:, :40].any() and not gradient[:, 40:].any()


def test_a_target_of_another_shard_counts_nothing_here(device):
    logits, target = made(30, torch.float32, device)
    target[::2] = -1
    top, sums, at_target = row_parts(logits, target, 30)
    assert at_target[::2].tolist() == [0.0] * 3
    assert at_target[1] == logits[1, target[1]]
    grad = torch.ones_like(top)
    gradient = logits_gradient_(logits.clone(), top + sums.log(), target, grad, 30)
    rows = gradient.sum(1).cpu()  # softmax alone sums to 1, less the target to 0
    torch.testing.assert_close(rows, torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0]), rtol=0, atol=1e-5)


def test_a_shard_of_padding_alone_has_the_parts_of_nothing(device):
    logits = torch.full((T, 5), 7.0, device=device)
    target = torch.full((T,), -1, device=device)
    top, sums, at_target = row_parts(logits, target, 0)
    assert top.tolist() == [float("-inf")] * T
    assert not sums.any() and not at_target.any()
    gradient = logits_gradient_(logits, torch.zeros_like(top), target, torch.ones_like(top), 0)
    assert not gradient.any()


def test_the_kernels_are_their_references(device):
    logits, target = made(77, torch.float32, device)
    target[2] = -1
    parts = row_parts(logits, target, 70)
    torch.testing.assert_close(parts, row_parts_reference(logits, target, 70))
    facts = (parts[0] + parts[1].log(), target, torch.linspace(1.0, 3.0, T, device=device), 70)
    expected = logits_gradient_reference(logits, *facts)
    torch.testing.assert_close(logits_gradient_(logits, *facts), expected)
