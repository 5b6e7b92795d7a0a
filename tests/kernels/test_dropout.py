import torch
from exact import cases_on, check, seeded

from mtcli.kernels.dropout import dropout, dropout_reference
from mtcli.kernels.random import keep_mask

KEY, DROP = -7777777777777777777, 0.3


def mask(rows, columns):
    """Which elements of rows number 5, 7, 9 and so on are kept."""
    index = torch.arange(5, 5 + 2 * rows, 2)[:, None] * columns + torch.arange(columns)
    return keep_mask(KEY, index, DROP).double() / (1.0 - DROP)


def test_dropout_onto_a_residual_is_the_formula_and_so_are_both_gradients(device, subtests):
    for shape, dtype in cases_on(device, [(3, 11), (2, 1030), (17, 3)]):
        numbers, keep = torch.arange(5, 5 + 2 * shape[0], 2, device=device), mask(*shape)
        inputs = [seeded(*shape, seed=seed, device=device) for seed in (1, 2)]
        with subtests.test(f"{shape} {dtype}"):
            check(
                lambda y, x, numbers=numbers: dropout(y, numbers, KEY, DROP, onto=x),
                lambda y, x, keep=keep: x + y * keep,
                inputs,
                dtype,
            )


def test_dropout_alone_keeps_what_the_reference_keeps(device):
    y, numbers = (
        seeded(9, 130, device=device).float(),
        torch.arange(2**40, 2**40 + 9, device=device),
    )
    y.requires_grad_()
    found, expected = dropout(y, numbers, KEY, DROP), dropout_reference(y, numbers, KEY, DROP)
    assert torch.equal(found == 0, expected == 0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    (grad,) = torch.autograd.grad(found.sum(), y)
    assert torch.equal(grad == 0, expected == 0)
