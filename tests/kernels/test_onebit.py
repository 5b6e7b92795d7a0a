import pytest
import torch
from exact import distance, seeded

from mtcli.kernels.onebit import (
    BLOCK,
    add_,
    add_reference_,
    pack_,
    pack_reference_,
    unpack,
    unpack_reference,
)


def signs_of(bits, size):
    """+1 or -1 of each element, a bit at a time."""
    return [1 if bits[i // 8] >> (i % 8) & 1 else -1 for i in range(size)]


@pytest.mark.parametrize("size", [1, 7, 8, 130, BLOCK + 13])
def test_signs_and_error_are_those_of_the_sum(device, size):
    x, error = seeded(size, seed=1).float(), seeded(size, seed=2).float()
    y = x.double() + error.double()
    kept, scale = error.clone().to(device), torch.tensor(0.7, device=device)
    assert distance(add_(x.to(device), kept), y.square().sum()) < 2e-6
    assert distance(kept, y) < 1e-6
    bits = pack_(kept, scale)
    signs = torch.tensor(signs_of(bits.tolist(), size))
    assert torch.equal(signs, torch.where(y >= 0, 1, -1))
    assert int(bits[-1]) < 2 ** ((size - 1) % 8 + 1), "past the end the bits are 0"
    sent = unpack(bits, scale, size)
    assert torch.equal(sent.cpu(), signs * scale.cpu())
    assert distance(sent.double().cpu() + kept.double().cpu(), y) < 1e-6  # nothing is lost
    alike = error.clone()
    assert distance(add_reference_(x, alike), y.square().sum()) < 2e-6
    theirs = pack_reference_(alike, scale.cpu())
    assert torch.equal(theirs, bits.cpu()) and distance(kept, alike) < 2e-6
    assert torch.equal(unpack_reference(theirs, scale.cpu(), size), sent.cpu())


def test_nothing_is_plus_nothing(device):
    zeros, scale = torch.zeros(9, device=device), torch.zeros((), device=device)
    assert pack_(zeros, scale).tolist() == [255, 1]
    bits = torch.tensor([255, 1], dtype=torch.uint8, device=device)
    assert torch.equal(unpack(bits, scale, 9), zeros)


def test_a_chunk_may_have_no_elements(device):
    empty = torch.zeros(0, device=device)
    assert add_(empty, empty) == 0.0 and pack_(empty, torch.ones(())).tolist() == []
    assert unpack(torch.zeros(0, dtype=torch.uint8), torch.ones(()), 0).tolist() == []
