from contextvars import Context

import pytest
import torch
from exact import TOLERANCE, distance, seeded
from torch.utils._python_dispatch import TorchDispatchMode

from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import Ownership
from mtcli.kernels.adamw import adamw_, adamw_reference_
from mtcli.kernels.multi_tensor import (
    ALIGNED,
    CHUNK,
    OptimizerStep,
    OptimizerTensors,
    tensor_table,
)

SIZES = [(5,), (3, 7), (CHUNK + 130,), (2, CHUNK), (1,)]
DECAYS = [False, True, True, False, True]
UPDATES = [
    OptimizerStep(lr, (0.8, 0.97), 1e-6, 0.3, count, factor)
    for count, (lr, factor) in enumerate([(1e-2, 1.0), (5e-2, 0.25), (2e-2, 1.0)], start=1)
]


def parts_on(device, dtype, offset=0):
    """Tensors of a flat buffer, `offset` elements from its start, so that nothing is aligned."""

    def cut(seed, kind=torch.float32):
        total = sum(torch.Size(size).numel() for size in SIZES)
        flat = torch.empty(offset + total, dtype=kind, device=device)[offset:]
        flat.copy_(seeded(total, seed=seed) if seed is not None else torch.zeros(total))
        pieces = flat.split([torch.Size(size).numel() for size in SIZES])
        return [piece.view(size) for piece, size in zip(pieces, SIZES, strict=True)]

    masters = cut(1)
    weights = masters if dtype == torch.float32 else cut(1, dtype)
    return OptimizerTensors(masters, cut(None), cut(None), weights, DECAYS), cut


def exact(gradients_of):
    """The masters in float64 by torch.optim.AdamW's loop; gradients are scaled before."""
    total = sum(torch.Size(size).numel() for size in SIZES)
    sizes = [torch.Size(size).numel() for size in SIZES]
    start = seeded(total, seed=1).float().double().split(sizes)
    leaves = [torch.nn.Parameter(x.clone()) for x in start]
    groups = [{"params": [x], "weight_decay": 0.3 * d} for x, d in zip(leaves, DECAYS, strict=True)]
    theirs = torch.optim.AdamW(groups, lr=0.0, betas=(0.8, 0.97), eps=1e-6, foreach=False)
    for i, update in enumerate(UPDATES):
        for group in theirs.param_groups:
            group["lr"] = update.lr
        for leaf, gradient in zip(leaves, gradients_of(i), strict=True):
            leaf.grad = gradient.detach().cpu().double().flatten() * update.factor
        theirs.step()
    return leaves, [theirs.state[leaf] for leaf in leaves]


@pytest.mark.parametrize(
    ("dtype", "offset"),
    [(torch.bfloat16, 0), (torch.float32, 1)],
    ids=["bf16, aligned or not", "fp32, one element off"],
)
def test_one_launch_updates_every_tensor_as_adamw_does(device, dtype, offset):
    parts, cut = parts_on(device, dtype, offset)
    packed = tensor_table(parts)
    grads = [cut(10 + i, torch.bfloat16 if i else torch.float32) for i in range(len(UPDATES))]
    for update, gradients in zip(UPDATES, grads, strict=True):
        adamw_(packed, parts, gradients, update)
    expected, states = exact(lambda i: grads[i])
    for i, theirs in enumerate(expected):
        assert distance(parts.masters[i].flatten(), theirs) < 2e-6
        assert distance(parts.exp_avgs[i].flatten(), states[i]["exp_avg"]) < 2e-6
        assert distance(parts.exp_avg_sqs[i].flatten(), states[i]["exp_avg_sq"]) < 2e-6
        rounded = parts.masters[i].to(dtype)
        if device.type == "cuda" or dtype == torch.float32:
            assert torch.equal(parts.weights[i], rounded)
        else:  # the interpreter cuts bits off
            assert distance(parts.weights[i], rounded) < 2 * TOLERANCE[dtype]


def test_narrow_moments_are_read_as_they_are_and_rounded_after_the_step(device):
    parts, cut = parts_on(device, torch.bfloat16)
    first, second = cut(2, torch.bfloat16), [x.square_() for x in cut(3, torch.bfloat16)]
    parts = parts._replace(exp_avgs=first, exp_avg_sqs=second)
    exact_parts = OptimizerTensors(
        *([x.cpu().double() for x in role] for role in parts[:3]),
        weights=[x.cpu().double() for x in parts.masters], decays=DECAYS,
    )  # fmt: skip
    gradients, update = cut(10), UPDATES[1]
    adamw_(tensor_table(parts), parts, gradients, update)
    adamw_reference_(exact_parts, [x.cpu() for x in gradients], update)
    # the interpreter cuts bits off where a GPU rounds
    bounds = (2e-6, 2 * TOLERANCE[torch.bfloat16], 2 * TOLERANCE[torch.bfloat16])
    for bound, ours, theirs in zip(bounds, parts[:3], exact_parts[:3], strict=True):
        assert all(distance(a, b) < bound for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_does_so_too(dtype):
    parts, cut = parts_on("cpu", dtype)
    for i, update in enumerate(UPDATES):
        adamw_reference_(parts, cut(10 + i), update)
    for ours, theirs in zip(parts.masters, exact(lambda i: cut(10 + i))[0], strict=True):
        assert distance(ours.flatten(), theirs) < 2e-6


@pytest.mark.parametrize("factor", [0.25, float("nan")])
def test_a_factor_of_the_device_is_one_of_the_host_and_updates_nothing_where_it_is_nan(
    device, factor
):
    def updated(factor):
        parts, cut = parts_on(device, torch.bfloat16, offset=1)
        adamw_(tensor_table(parts), parts, cut(10), UPDATES[1]._replace(factor=factor))
        return [x for role in parts[:4] for x in role]

    start = [x for role in parts_on(device, torch.bfloat16, offset=1)[0][:4] for x in role]
    expected = start if factor != factor else updated(factor)
    found = updated(torch.tensor(factor, device=device))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_what_lies_between_the_tensors_is_left_alone(device):
    flat = torch.full((3 * 16,), 7.0, device=device)
    mine = [flat[0:13], flat[16:33], flat[36:40]]
    moments = [[torch.zeros_like(x) for x in mine] for _ in range(2)]
    parts = OptimizerTensors(mine, *moments, mine, [True] * 3)
    adamw_(tensor_table(parts), parts, [torch.ones_like(x) for x in mine], UPDATES[0])
    untouched = torch.cat([flat[13:16], flat[33:36], flat[40:]])
    assert (untouched == 7.0).all() and all((x != 7.0).all() for x in mine)


@pytest.mark.parametrize("rule", ["adamw", "lamb"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_makes_the_updates_that_it_makes_on_a_cpu(device, dtype, rule):
    table = {
        "a.weight": Parameter("a.weight", (6, 5), (None, None), "normal", 0),
        "a.bias": Parameter("a.bias", (6,), (None,), "zeros", 0),
    }
    config = OptimizerConfig(name=rule, lr=1e-2, betas=(0.8, 0.97), eps=1e-6, weight_decay=0.3)

    def made(on):
        named = {name: seeded(*p.shape, seed=3).to(dtype).to(on) for name, p in table.items()}
        groups = make_groups(ParallelLayout(1), 0, torch.device(on))
        return Optimizer(named, Ownership(groups, table, False, False), config, dtype)

    ours = made(device)
    assert ours.by_kernels
    theirs = Context().run(made, "cpu")  # outside the interpreter
    assert not theirs.by_kernels
    for step in range(3):
        gradients = {name: seeded(*p.shape, seed=step) for name, p in table.items()}
        ours.step({n: g.float().to(device) for n, g in gradients.items()}, 1e-2, 0.5)
        theirs.step({n: g.float() * 0.5 for n, g in gradients.items()}, 1e-2)
    assert ours.updates == theirs.updates == 3
    for key, expected in theirs.state().items():
        assert distance(ours.state()[key], expected) < 2e-6
    for name, expected in theirs.weights.items():
        assert distance(ours.weights[name], expected) < 2 * TOLERANCE[dtype]


class Operators(TorchDispatchMode):
    """The operators that are called inside, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_a_step_sends_addresses_only_where_one_has_changed_and_calls_two_operators(device):
    parts, cut = parts_on(device, torch.float32)
    packed = tensor_table(parts)
    kept, moved = cut(10), [*cut(11)[:-1], cut(12)[-1]]
    order, sent, calls = (kept, kept, moved), [], []
    for update, gradients in zip(UPDATES, order, strict=True):
        update = update._replace(factor=torch.tensor(update.factor, device=device))
        # A mark on the device, which takes the path of unaligned tensors.
        packed.table[:, ALIGNED] = 0
        with Operators() as operators:
            adamw_(packed, parts, gradients, update)
        sent.append(bool(packed.table[0, ALIGNED]))
        calls.append(operators.names)
    assert sent == [True, False, True]
    assert calls == [["mtcli::point_", "mtcli::adamw_"]] * 3
    for ours, theirs in zip(parts.masters, exact(lambda i: order[i])[0], strict=True):
        assert distance(ours.flatten(), theirs) < 2e-6


def test_a_table_of_other_tensors_is_refused(device):
    parts, cut = parts_on(device, torch.float32)
    others, _ = parts_on(device, torch.float32)
    with pytest.raises(AssertionError, match="the table is of these tensors"):
        adamw_(tensor_table(others), parts, cut(10), UPDATES[0])
    with pytest.raises(AssertionError, match="5 elements"):
        adamw_(tensor_table(parts), parts, cut(10)[::-1], UPDATES[0])
