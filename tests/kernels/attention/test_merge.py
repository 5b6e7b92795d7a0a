"""Merging results of attention over blocks of keys, against softmax over the keys of both."""

import pytest
import torch
from exact import TOLERANCE, distance, seeded

from mtcli.kernels.attention.merge import merge_, merge_reference_


def seen(scores, values):
    """(result, log-sum-exp) of what is seen; 0 and -inf where that is nothing."""
    return scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)


@pytest.mark.parametrize("function", [merge_, merge_reference_])
@pytest.mark.parametrize("size", [(2, 3, 37, 20), (1, 2, 16, 64)])
def test_two_blocks_merge_to_the_softmax_over_both(device, function, size):
    b, h, n, d = size
    scores = 3.0 * seeded(b, h, n, 9, device=device)
    scores[:, :, 0, :4] = scores[:, :, 1, 4:] = scores[:, :, 2] = float("-inf")
    values = seeded(b, h, 9, d, seed=1, device=device)
    mine, theirs = seen(scores[..., :4], values[:, :, :4]), seen(scores[..., 4:], values[:, :, 4:])
    expected = seen(scores, values)
    for dtype in TOLERANCE if device.type == "cuda" else [torch.float32]:
        # views, as a ring has them: the late half of the queries, and a result token by token
        out, lse = torch.zeros(b, h, 2 * n, d, device=device), torch.zeros(b, h, 2 * n).to(device)
        out[:, :, n:], lse[:, :, n:] = (x.float() for x in mine)
        part = theirs[0].to(dtype).transpose(1, 2).contiguous().transpose(1, 2)
        function(out[:, :, n:], lse[:, :, n:], part, theirs[1].float())
        assert distance(out[:, :, n:], expected[0]) < TOLERANCE[dtype]
        assert (lse[:, :, n + 2] == float("-inf")).all() and (out[:, :, n + 2] == 0).all()
        finite = expected[1].isfinite()
        assert distance(lse[:, :, n:][finite], expected[1][finite]) < 1e-6
        assert (out[:, :, :n] == 0).all() and (lse[:, :, :n] == 0).all()
