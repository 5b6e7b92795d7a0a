"""The factor that clips gradients, on the device as on the host."""

import math
from itertools import product

import pytest
import torch

from mtcli.core.optim.grad_norm import clip_factor, device_factor

NORMS = (0.0, 1e-30, 0.3, 0.7, 1.0, 1.0000001, 3.7, 1e19)


@pytest.mark.parametrize(("clip", "scale"), product((0.0, 0.7, 1.0), (1.0, 2.0**16)))
def test_the_factor_of_the_device_is_that_of_the_host_to_the_last_bit(clip, scale):
    for norm in NORMS:
        square = (norm * scale) ** 2
        expected = clip_factor(math.sqrt(square) / scale, clip) / scale
        found = device_factor(torch.tensor([5.0, square], dtype=torch.float64), clip, scale)
        assert found.dtype == torch.float32 and found.shape == ()
        assert found == torch.tensor(expected, dtype=torch.float32), (norm, clip, scale)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_the_factor_is_nan_where_a_loss_or_norm_is_not_finite(broken, clip):
    for sums in ((broken, 1.0), (1.0, abs(broken)), (broken, abs(broken))):
        found = device_factor(torch.tensor(sums, dtype=torch.float64), clip, 1.0)
        assert found.isnan(), (sums, clip)
