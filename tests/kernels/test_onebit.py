import pytest
import torch
from exact import distance, seeded

from mtcli.kernels.onebit import (
    BLOCK,
    compress_,
    compress_reference_,
    decompress,
    decompress_reference,
)

SIZES = [1, 7, 8, 130, BLOCK + 13]


def signs_of(bits, size):
    """+1 or -1 of each element, a bit at a time."""
    return [1 if bits[i // 8] >> (i % 8) & 1 else -1 for i in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_signs_scale_and_error_are_those_of_the_sum(device, size):
    x, error = seeded(size, seed=1).float(), seeded(size, seed=2).float()
    y = x.double() + error.double()
    kept = error.clone().to(device)
    bits, scale = compress_(x.to(device), kept)
    expected = y.norm() / size**0.5
    assert distance(scale, expected) < 2e-6
    signs = torch.tensor(signs_of(bits.tolist(), size))
    assert torch.equal(signs, torch.where(y >= 0, 1, -1))
    assert int(bits[-1]) < 2 ** ((size - 1) % 8 + 1), "past the end the bits are 0"
    sent = decompress(bits, scale, size)
    assert torch.equal(sent.cpu(), signs * scale.cpu())
    assert distance(sent.double().cpu() + kept.double().cpu(), y) < 1e-6  # nothing is lost
    alike = error.clone()
    theirs, their_scale = compress_reference_(x, alike)
    assert torch.equal(theirs, bits.cpu()) and distance(kept, alike) < 2e-6
    found = decompress_reference(theirs, their_scale, size)
    assert distance(found, sent) < 2e-6


def test_nothing_is_plus_nothing(device):
    bits, scale = compress_(torch.zeros(9, device=device), torch.zeros(9, device=device))
    assert bits.tolist() == [255, 1] and scale == 0.0
    assert torch.equal(decompress(bits, scale, 9).cpu(), torch.zeros(9))
