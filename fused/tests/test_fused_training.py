"""Steps of B models as one array against each with torch.optim alone, float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from alone import EXACT, assert_same_state, made, seeded
from torch import nn
from torch.optim import lr_scheduler

import mtcli_fused as fused
from mtcli.core.config.errors import MtcliError
from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.optim.lr_schedule import learning_rate
from mtcli.kernels.lamb import lamb_moments_reference_, lamb_step_reference_, trust_ratios
from mtcli.kernels.multi_tensor import OptimizerStep, OptimizerTensors

B, STEPS = 3, 5
LRS = [0.3, 0.01, 0.05]


def make():
    """Weights of all kinds; none has a gradient of only rounding, as a bias before a norm has."""
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, bias=False), nn.BatchNorm1d(8), nn.PReLU(), nn.Flatten(),
        nn.Linear(16, 5),
        nn.LayerNorm(5), nn.Linear(5, 4, bias=False),
    )  # fmt: skip


class Lamb:
    """The reference of mtcli's own LAMB, for the parameters of a model."""

    def __init__(self, parameters, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
        self.parameters, self.count = list(parameters), 0
        self.numbers = lr, betas, eps, weight_decay
        zeros = [[torch.zeros_like(p) for p in self.parameters] for _ in range(2)]
        data = [p.data for p in self.parameters]
        self.tensors = OptimizerTensors(data, *zeros, data, [True] * len(data))

    def step(self):
        self.count += 1
        update = OptimizerStep(*self.numbers, self.count)
        gradients = [p.grad for p in self.parameters]
        squares = lamb_moments_reference_(self.tensors, gradients, update)
        lamb_step_reference_(self.tensors, trust_ratios(squares, (0.01, 10.0)), update)


# fmt: off
BETAS = [(0.9, 0.99), (0.5, 0.9), (0.0, 0.999)]
DECAYS = [0.0, 0.5, 0.01]
OPTIMIZERS = {  # ours, torch's, and hyper-parameters of one model each, or of all
    "sgd": (fused.SGD, torch.optim.SGD, {}),
    "momentum": (fused.SGD, torch.optim.SGD,
                 {"momentum": [0, 0.9, 0.5], "weight_decay": DECAYS, "dampening": [0, 0.3, 0.1]}),
    "nesterov": (fused.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": [True, False, True]}),
    "adam": (fused.Adam, torch.optim.Adam, {"betas": BETAS, "weight_decay": DECAYS}),
    "adam of one kind": (fused.Adam, torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-3}),
    "adamw": (fused.AdamW, torch.optim.AdamW, {"weight_decay": DECAYS, "eps": [1e-8, 1e-2, 1e-5]}),
    "amsgrad": (fused.AdamW, torch.optim.AdamW,
                {"amsgrad": [True, False, True], "betas": (0.9, 0.7)}),
    "lamb": (fused.LAMB, Lamb, {"betas": BETAS, "weight_decay": DECAYS, "eps": [1e-6, 1e-3, 1e-2]}),
}
# fmt: on


def of(values, b):
    return {k: v[b] if isinstance(v, list) else v for k, v in values.items()}


def batch(step):
    labels = torch.arange(B * 6).view(B, 6) * (step + 1) % 4
    return seeded(B, 6, 3, 4, seed=step), labels


def train(array, optimizer, steps=STEPS, clip=None):
    """The losses [steps, B] of an array."""
    losses = []
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        each = fused.cross_entropy(array(x), y)
        each.sum().backward()
        if clip:
            fused.clip_grad_norm_(array, clip)
        optimizer.step()
        losses.append(each.detach())
    return torch.stack(losses)


def train_alone(model, optimizer, b, steps=STEPS, clip=None):
    losses = []
    for step in range(steps):
        x, y = batch(step)
        model.zero_grad()
        loss = F.cross_entropy(model(x[b]), y[b])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


KEEP = pytest.mark.parametrize("keep", [(), ("4",)], ids=["fused", "partial"])


@KEEP
def test_steps_are_those_of_each_model_with_torchs_optimizer(keep, subtests):
    for name, (ours, theirs, values) in OPTIMIZERS.items():
        with subtests.test(name):
            models = made(make)
            array = fused.fuse(models, keep=keep)
            losses = train(array, ours(array, lr=LRS, **values))
            for b, (model, one) in enumerate(zip(models, fused.unfuse(array), strict=True)):
                optimizer = theirs(model.parameters(), lr=LRS[b], **of(values, b))
                alone = train_alone(model, optimizer, b)
                torch.testing.assert_close(losses[:, b], alone, **EXACT)
                assert_same_state(one, model)


def test_gradients_are_clipped_to_each_models_norm():
    models, clips = made(make), [0.1, 1e9, 1.0]
    array = fused.fuse(models, keep=["4"])
    losses = train(array, fused.SGD(array, lr=LRS), clip=clips)
    for b, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=LRS[b])
        torch.testing.assert_close(
            losses[:, b], train_alone(model, optimizer, b, clip=clips[b]), **EXACT
        )


@KEEP
def test_norms_are_those_of_each_model_and_say_which_are_finite(keep):
    models = made(make)
    array = fused.fuse(models, keep=keep)
    x, y = batch(0)
    fused.cross_entropy(array(x), y).sum().backward()
    norms = fused.grad_norms(array)
    for b, model in enumerate(models):
        F.cross_entropy(model(x[b]), y[b]).backward()
        expected = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.testing.assert_close(norms[b], expected, **EXACT)
    assert fused.finite(array).tolist() == [True] * B


@pytest.mark.parametrize(
    ("name", "value", "keep"),
    [
        ("sgd", float("nan"), ("4",)),
        ("amsgrad", float("inf"), ()),
        ("amsgrad", float("nan"), ("4",)),
        ("lamb", float("inf"), ("4",)),
        ("lamb", float("nan"), ()),
    ],
)
def test_an_inf_or_nan_of_one_model_never_touches_another(name, value, keep):
    cls, _, values = OPTIMIZERS[name]
    models = made(make)
    torch.nn.init.constant_(models[1][4].weight, value)
    array, two = fused.fuse(models, keep=keep), fused.fuse([models[0], models[2]], keep=keep)
    optimizer = cls(array, lr=LRS, **values)
    pair = {k: [v[0], v[2]] if isinstance(v, list) else v for k, v in values.items()}
    other = cls(two, lr=[LRS[0], LRS[2]], **pair)
    for step in range(3):
        x, y = batch(step)
        for model, one, at in ((array, optimizer, [0, 1, 2]), (two, other, [0, 2])):
            one.zero_grad()
            fused.cross_entropy(model(x[at]), y[at]).sum().backward()
            fused.clip_grad_norm_(model, 1.0)
            assert fused.finite(model).tolist() == [b != 1 for b in at]
            one.step(active=fused.finite(model))
    assert optimizer.counts == [3, 0, 3]
    ours, theirs = fused.unfuse(array), fused.unfuse(two)
    assert_same_state(ours[0], theirs[0])
    assert_same_state(ours[2], theirs[1])
    for p, q in zip(ours[1].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p.nan_to_num(7.0, 7.0), q.nan_to_num(7.0, 7.0))


def test_a_gradient_of_a_huge_number_is_finite():
    array = fused.fuse([nn.Linear(2, 2) for _ in range(2)])
    for p in array.parameters():
        p.grad = torch.full_like(p, 1e30)
    array.model.bias.grad[0, 0] = float("-inf")
    assert fused.finite(array).tolist() == [False, True]


@pytest.mark.parametrize("name", ["momentum", "amsgrad", "lamb"])
def test_a_saved_optimizer_goes_on_with_the_same_curve(name):
    cls, _, values = OPTIMIZERS[name]
    array = fused.fuse(made(make))
    optimizer = cls(array, lr=LRS, **values)
    train(array, optimizer, 4)
    other = fused.fuse(made(make, seed=5))
    other.load_state_dict(array.state_dict())
    again = cls(other, lr=1.0, **values)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(train(array, optimizer, 3), train(other, again, 3))


def test_two_optimizers_may_have_parameters_of_one_array():
    decays = lambda name: name.endswith("weight") and ".5." not in name  # noqa: E731
    models = made(make)
    array = fused.fuse(models)
    optimizers = [
        fused.AdamW(array, lr=LRS, weight_decay=0.5, only=decays),
        fused.AdamW(array, lr=LRS, weight_decay=0.0, only=lambda name: not decays(name)),
    ]
    x, y = batch(0)
    fused.cross_entropy(array(x), y).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for b, (model, one) in enumerate(zip(models, fused.unfuse(array), strict=True)):
        names = [f"model.{name}" for name, _ in model.named_parameters()]
        groups = [
            {
                "params": [
                    p for n, p in zip(names, model.parameters(), strict=True) if decays(n) == d
                ]
            }
            | {"weight_decay": 0.5 * d}
            for d in (True, False)
        ]
        train_alone(model, torch.optim.AdamW(groups, lr=LRS[b]), b, steps=1)
        assert_same_state(one, model)


def test_parameters_without_a_gradient_and_frozen_ones_are_left_alone():
    models = made(make)
    for model in models:
        model[0].requires_grad_(False)
    array = fused.fuse(models)
    optimizer = fused.AdamW(array, lr=0.1)
    assert not any(name.startswith("model.0") for name in optimizer.names)
    x, y = batch(0)
    fused.cross_entropy(array(x), y).sum().backward()
    array.model[6].weight.grad = None
    before = [p.detach().clone() for p in array.parameters()]
    optimizer.step()
    moved = [not torch.equal(p, q) for p, q in zip(array.parameters(), before, strict=True)]
    names = [name for name, _ in array.named_parameters()]
    assert [n for n, changed in zip(names, moved, strict=True) if not changed] == [
        "model.0.weight", "model.6.weight"
    ]  # fmt: skip


# fmt: off
SCHEDULES = {
    "step": (
        fused.step_lr(LRS, [2, 3, 1], [0.1, 0.5, 0.9]),
        lambda o, b: lr_scheduler.StepLR(o, [2, 3, 1][b], [0.1, 0.5, 0.9][b]),
    ),
    "multi step": (
        fused.multi_step_lr(LRS, [(2, 3), (5,), ()], [0.1, 0.5, 0.9]),
        lambda o, b: lr_scheduler.MultiStepLR(o, [[2, 3], [5], []][b], [0.1, 0.5, 0.9][b]),
    ),
    "multi step of one kind": (
        fused.multi_step_lr(LRS, (2, 5), 0.5), lambda o, b: lr_scheduler.MultiStepLR(o, [2, 5], 0.5)
    ),
    "exponential": (
        fused.exponential_lr(LRS, [0.9, 0.5, 1.0]),
        lambda o, b: lr_scheduler.ExponentialLR(o, [0.9, 0.5, 1.0][b]),
    ),
}
# fmt: on


def test_rates_follow_torchs_scheduler_of_each_model():
    for name, (schedule, make_scheduler) in SCHEDULES.items():
        for b in range(B):
            optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LRS[b])
            scheduler = make_scheduler(optimizer, b)
            for step in range(8):
                expected = pytest.approx(scheduler.get_last_lr()[0], rel=1e-12)
                assert schedule(step)[b] == expected, name
                optimizer.step()
                scheduler.step()


def test_a_cosine_with_warm_up_is_that_of_a_training_run_for_each_model():
    schedule = fused.cosine_lr(
        LRS, steps=[6, 8, 8], warmup_steps=[0, 2, 3], min_lr=[0.0, 0.0, 0.01]
    )
    for b, (steps, warm, least) in enumerate([(6, 0, 0.0), (8, 2, 0.0), (8, 3, 0.01)]):
        config = OptimizerConfig(lr=LRS[b], warmup_steps=warm, min_lr=least, schedule="cosine")
        for step in range(steps):
            assert schedule(step)[b] == learning_rate(config, step + 1, steps)
    assert schedule(1)[1] == LRS[1] and schedule(5)[0] == pytest.approx(0.0)


def test_a_schedule_sets_the_rates_of_the_next_update():
    models = made(make)
    array = fused.fuse(models)
    optimizer, schedule = fused.SGD(array), fused.exponential_lr(LRS, 0.5)
    x, y = batch(0)
    for step in range(2):
        optimizer.lr = schedule(step)
        optimizer.zero_grad()
        fused.cross_entropy(array(x), y).sum().backward()
        before = array.model[6].weight.detach().clone()
        optimizer.step()
        for b in range(B):
            moved = before[b] - LRS[b] * 0.5**step * array.model[6].weight.grad[b]
            torch.testing.assert_close(array.model[6].weight[b].data, moved, **EXACT)


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 2}, {"weight": seeded(4).abs(), "ignore_index": 1}]
    + [{"weight": seeded(4).abs(), "label_smoothing": 0.1}],
    ids=lambda options: ", ".join(options),
)
def test_cross_entropy_is_that_of_each_model_whatever_it_ignores(options):
    logits = seeded(B, 5, 4, 3).requires_grad_()
    targets = torch.randint(4, (B, 5, 3), generator=torch.Generator().manual_seed(1))
    targets[1, :, 1:] = options.get("ignore_index", 0)
    each = fused.cross_entropy(logits, targets, **options)
    (each * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    gradient, logits.grad = logits.grad, None
    for b in range(B):
        expected = F.cross_entropy(logits[b], targets[b], **options)
        torch.testing.assert_close(each[b], expected, **EXACT)
        (expected * (b + 1)).backward()
    torch.testing.assert_close(gradient, logits.grad, **EXACT)


def test_any_loss_is_taken_model_by_model():
    y, targets = seeded(B, 5, 2), seeded(B, 5, 2, seed=3)
    each = fused.losses(F.smooth_l1_loss, y, targets, beta=0.5)
    expected = [F.smooth_l1_loss(y[b], targets[b], beta=0.5) for b in range(B)]
    torch.testing.assert_close(each, torch.stack(expected))


def test_wrong_hyper_parameters_are_refused_with_both_numbers():
    array = fused.fuse(made(make))
    with pytest.raises(MtcliError, match="lr has 2 values for 3 models"):
        fused.SGD(array, lr=[0.1, 0.2])
    with pytest.raises(
        MtcliError, match=r"unknown hyper-parameters momentun\n\nhint: lr, momentum"
    ):
        fused.SGD(array, momentun=0.9)
    with pytest.raises(MtcliError, match="gamma has 2 values for 3 models"):
        fused.step_lr([0.1] * 3, 1, [0.1] * 2)
    with pytest.raises(MtcliError, match="no parameter to train"):
        fused.SGD(array, only=lambda name: False)
    with pytest.raises(MtcliError, match="max_norm has 1 values for 3"):
        fused.cross_entropy(array(batch(0)[0]), batch(0)[1]).sum().backward()
        fused.clip_grad_norm_(array, [1.0])
