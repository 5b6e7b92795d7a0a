"""The oracle of fused models: each model by itself, in plain torch."""

import copy

import torch
from torch import nn

import mtcli_fused as fused

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def seeded(*shape, seed=0):
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape))
    )


def made(make, size=3, seed=0):
    """Models with other weights each, and norms that are not 1 and 0."""
    torch.manual_seed(seed)
    models = [make().double() for _ in range(size)]
    for model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if isinstance(tensor, nn.Parameter) or "running" in name:
                tensor.data += 0.3 * torch.rand_like(tensor)
    return models


def assert_runs_as_its_models(make, *inputs, train=True, size=3, weigh=None, **options):
    """Outputs, gradients of inputs and parameters, and buffers, against each model alone.

    `inputs` are [B, ...]; integers, booleans and Shared have no gradient. Returns the fused model.
    """
    models = made(make, size)
    array = fused.fuse(models, **options)
    array.train(train)
    ours = [_leaf(x) for x in inputs]
    outputs = _tensors(array(*ours))
    weights = [seeded(*y.shape, seed=i) for i, y in enumerate(outputs)]
    sum((y * w).sum() for y, w in zip(outputs, weights, strict=True)).backward()
    for b, (model, one) in enumerate(zip(models, fused.unfuse(array), strict=True)):
        model.train(train)
        mine = [_leaf(_of(x, b)) for x in inputs]
        expected = _tensors(model(*mine))
        sum((y * w[b]).sum() for y, w in zip(expected, weights, strict=True)).backward()
        for y, z in zip(outputs, expected, strict=True):
            torch.testing.assert_close(y[b], z, **EXACT)
        for x, x_b in zip(ours, mine, strict=True):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                torch.testing.assert_close(x.grad[b], x_b.grad, **EXACT)
        assert_same_state(one, model)
    assert_same_gradients(array, models)
    return array


def assert_same_state(one, other):
    """Classes, parameters and buffers of two models are the same, to rounding of a sum."""
    assert [type(m) for m in one.modules()] == [type(m) for m in other.modules()]
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], **EXACT, msg=name)


def assert_same_gradients(array, models, **tolerance):
    """The gradients of all parameters, by making them the weights of models taken out."""
    with_gradients = copy.deepcopy(array)
    pairs = zip(with_gradients.parameters(), array.parameters(), strict=True)
    for one, parameter in pairs:
        one.data = torch.zeros_like(one) if parameter.grad is None else parameter.grad
    for one, model in zip(fused.unfuse(with_gradients), models, strict=True):
        for (name, ours), (_, p) in zip(
            one.named_parameters(), model.named_parameters(), strict=True
        ):
            expected = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(ours.data, expected, **(tolerance or EXACT), msg=name)


def _of(x, b):
    if isinstance(x, fused.Shared):
        return x.value
    return x[b] if isinstance(x, torch.Tensor) else x


def _leaf(x):
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        return x.detach().clone().requires_grad_()
    return x


def _tensors(y):
    return [one for one in (y if isinstance(y, tuple) else (y,)) if one is not None]


class Wrapped(nn.Module):
    """A module with arguments by name, of which one has no batch."""

    def __init__(self, module, **arguments):
        super().__init__()
        self.module, self.arguments = module, arguments

    def forward(self, *inputs):
        return self.module(*inputs, **self.arguments)
