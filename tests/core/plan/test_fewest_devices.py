"""The fewest devices that hold a model, beside a search of every smaller number."""

import pytest

from mtcli.core.plan.answer import read_request
from mtcli.core.plan.search import fewest, search


def searched(name, device, gpus, *fixed):
    """What `mtcli plan` finds of a preset on some devices."""
    request = read_request(name, [], fixed, gpus, device)
    return request, search(request.config, gpus, request.device, 1, request.pinned)


@pytest.mark.parametrize(
    ("name", "device", "fixed", "expected"),
    [
        ("llama-3.1-8b", "a100-40gb", (), 4),
        ("gpt2-1.5b", "rtx-5000", (), 2),
        ("gpt2-1.5b", "rtx-5000", ("parallel.zero=0",), 3),
        ("mixtral-8x7b", "h100", (), 16),
    ],
)
def test_no_smaller_number_of_devices_is_enough(name, device, fixed, expected):
    request, found = searched(name, device, 1, *fixed)
    assert not found.best
    asked = request.config, 1, request.device, request.pinned, request.keeps_batch
    enough = fewest(*asked)
    assert enough.prediction.fits and enough.prediction.work.layout.world == expected
    node = request.device.node_size
    for world in range(2, expected):
        if world <= node or world % node == 0:
            assert not searched(name, device, world, *fixed)[1].best, world
    assert searched(name, device, expected, *fixed)[1].best
