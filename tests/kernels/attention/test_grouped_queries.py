"""One query a row over keys of fewer heads, as text is generated on a CPU."""

import pytest
import torch

from mtcli.kernels.attention.attention import masked_sdpa


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (5, 1)])
def test_it_is_a_softmax_over_the_keys_of_each_group(dtype, masked, heads, groups):
    draw = torch.Generator().manual_seed(heads)
    q = torch.randn(3, heads, 1, 8, generator=draw).to(dtype)
    # as in slots: memory with room behind the keys
    k, v = (torch.randn(3, groups, 20, 8, generator=draw).to(dtype)[:, :, :11] for _ in "kv")
    ends = torch.tensor([11, 1, 7])
    mask = (torch.arange(11) < ends[:, None])[:, None, None] if masked else None
    found = masked_sdpa(q, k, v, mask)
    assert found.dtype == dtype and found.shape == q.shape
    for row in range(3):
        for head in range(heads):
            end = int(ends[row]) if masked else 11
            keys, values = (x[row, head // (heads // groups), :end].double() for x in (k, v))
            weights = (keys @ q[row, head, 0].double() / 8**0.5).softmax(0)
            expected = weights @ values
            close = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}[dtype]
            error = (found[row, head, 0].double() - expected).norm() / expected.norm()
            assert error < close
