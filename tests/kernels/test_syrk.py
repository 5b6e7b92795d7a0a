import pytest
import torch
from exact import NARROW, TOLERANCE, distance, seeded

from mtcli.kernels.syrk import syrk

SHAPES = ((1, 5, 3), (2, 70, 131), (3, 200, 65), (1, 257, 24))


def products(x, device, dtype):
    """(kernel's X X^T and 0.7 X X^T - 1.3 A, the formulas' in float64 of the same numbers)."""
    x = x.to(dtype)
    exact = x.cpu().double() @ x.cpu().double().mT
    added = exact.to(device, dtype)
    found = syrk(x), syrk(x, 0.7, added, -1.3)
    return found, (exact, 0.7 * exact - 1.3 * added.cpu().double())


def test_a_syrk_is_the_formula(device, subtests):
    # the interpreter multiplies no bfloat16
    narrow = NARROW if device.type == "cuda" else (torch.float16,)
    cases = [(shape, torch.float32) for shape in SHAPES] + [(SHAPES[1], dtype) for dtype in narrow]
    for shape, dtype in cases:
        with subtests.test(f"{shape} {dtype}"):
            found, expected = products(seeded(*shape, device=device), device, dtype)
            assert all(
                distance(a, b) < TOLERANCE[dtype] for a, b in zip(found, expected, strict=True)
            )
            for product in found:
                torch.testing.assert_close(product, product.mT, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 0, 1)])
def test_a_syrk_reads_matrices_that_are_transposed_or_apart(device, order):
    x = seeded(40, 33, 17, device=device).permute(order)
    found, expected = products(x, device, torch.float32)
    assert all(distance(a, b) < 2e-6 for a, b in zip(found, expected, strict=True))
