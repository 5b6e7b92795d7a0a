"""Oracles of kernels: a formula in float64 and its gradients, beside a kernel's and its own."""

import torch


def check(function, formula, inputs, dtype, *, tolerance=None):
    """That function(*inputs) and its gradients are the formula's, for inputs rounded to dtype.

    Each result's distance from float64's is measured as a part of its norm: an error of 1 % in all
    of it is 0.01, and is over every tolerance here. `tolerance` is for results of another dtype.
    """
    mine = [_leaf(x.to(dtype)) for x in inputs]
    exact = [_leaf(x.detach().cpu().double()) for x in mine]
    found, expected = _tuple(function(*mine)), _tuple(formula(*exact))
    generator = torch.Generator().manual_seed(99)
    grads = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in expected]
    torch.autograd.backward(found, [g.to(y) for g, y in zip(grads, found, strict=True)])
    rounded = [g.to(y.dtype).double() for g, y in zip(grads, found, strict=True)]
    torch.autograd.backward(expected, rounded)
    bound = TOLERANCE[dtype] if tolerance is None else tolerance
    pairs = [*zip(found, expected, strict=True)]
    pairs += [(x.grad, y.grad) for x, y in zip(mine, exact, strict=True)]
    for i, (ours, theirs) in enumerate(pairs):
        assert distance(ours, theirs) < bound, f"result {i}: {distance(ours, theirs):.2e}"


# A rounding of the result, and what sums in float32 add; 1 % is 1e-2.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}
NARROW = (torch.bfloat16, torch.float16)


def cases_on(device, shapes):
    """(shape, dtype): compiled all pairs; interpreted, where a dtype is a cast of what is read and
    written, each shape in float32 and each 16 bits once."""
    if device.type == "cuda":
        return [(shape, dtype) for shape in shapes for dtype in TOLERANCE]
    return [*((shape, torch.float32) for shape in shapes), *zip(shapes, NARROW, strict=False)]


def distance(ours, theirs):
    """|ours - theirs| / |theirs| in float64, over all elements."""
    theirs = theirs.detach().cpu().double()
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} is not {tuple(theirs.shape)}"
    error = (ours.detach().cpu().double() - theirs).norm()
    return float(error / theirs.norm().clamp(min=1e-30))


def softmax_attention(q, k, v, mask=None, cap=0.0, sinks=None):
    """(output, log-sum-exp) under a mask [b, 1, n, m]; 0 and -inf where nothing is seen.

    `sinks` [b, h] are scores of one more key, which has the value 0.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[3] ** 0.5
    if cap:
        scores = cap * (scores / cap).tanh()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks[:, :, None, None].expand(*scores.shape[:3], 1)
        scores, v = (
            torch.cat([scores, column], -1),
            torch.cat([v, torch.zeros_like(v[:, :, :1])], 2),
        )
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


def triangle(n):
    """What causal attention sees."""
    return torch.ones(n, n, dtype=torch.bool).tril()


def seeded(*shape, seed=0, device="cpu"):
    """Standard normals in float64, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device)


def _leaf(x):
    return x.detach().clone().requires_grad_()


def _tuple(y):
    return y if isinstance(y, tuple) else (y,)
