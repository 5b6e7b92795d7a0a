"""Where LSGD and EASGD come to rest on functions whose minimisers are known (arXiv:1905.10395,
section 2): four ranks, each a worker with one parameter, and exact gradients."""

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.schema import OptimizerConfig
from mtcli.core.config.sync import SyncConfig
from mtcli.core.exchange.facts import ReplicaShare
from mtcli.core.exchange.methods import METHODS
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.mesh.sharding import Parameter
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.parallel.groups import make_groups
from mtcli.core.parallel.ownership import Ownership
from mtcli.core.sync.all_reduce import BucketedDataParallel
from mtcli.core.sync.easgd import ElasticPulls
from mtcli.core.sync.lsgd import LeaderPulls
from mtcli.kernels.gradient_sink import GradientSinks

H = torch.diag(torch.tensor([1.0, 0.8, 1.4], dtype=torch.float64))
MINIMISER = torch.tensor([0.5, -2.0, 1.0], dtype=torch.float64)
STARTS = {
    "quadratic": [[3.0, 1.0, -2.0], [-1.0, 0.0, 4.0], [2.0, 2.0, 2.0], [0.0, -5.0, 1.0]],
    "double well": [[0.9], [-0.9], [0.9], [-0.9]],
}


def loss_of(function, x):
    if function == "quadratic":
        return 0.5 * (x - MINIMISER) @ H @ (x - MINIMISER)
    return ((x * x - 1.0) ** 2).sum() / 4.0  # minima at -1 and 1, a maximum at 0


class Point(nn.Module):
    """A point, which is all that a worker trains."""

    def __init__(self, start):
        super().__init__()
        self.x = nn.Parameter(torch.tensor(start, dtype=torch.float64))


def exchange_of(runtime, sync, start, lr):
    """A worker's exchange, its strategy and its point."""
    module = Point(start)
    layout = ParallelLayout(runtime.world, replicas=runtime.world)
    groups = make_groups(layout, runtime.rank, runtime.device)
    table = {"x": Parameter("x", tuple(module.x.shape), (None,), "normal", 0)}
    strategy = BucketedDataParallel(
        {0: module}, Ownership(groups, table, True, False), 1e6, GradientSinks()
    )
    config = OptimizerConfig(name="sgd", lr=lr, weight_decay=0.0)
    optimizer = Optimizer(strategy.weights(), strategy.ownership, config, torch.float64)
    share = ReplicaShare(sync, 100, runtime.world, {"x": module.x.numel()}, 8)
    kind = LeaderPulls if sync.method == "lsgd" else ElasticPulls
    exchange = kind(strategy, optimizer, METHODS[sync.method](share))
    exchange.begin()
    return exchange, strategy, module


def path(runtime, function, sync, steps, lr=0.5):
    """The points of this worker after each step."""
    exchange, strategy, module = exchange_of(runtime, sync, STARTS[function][runtime.rank], lr)
    if sync.method == "easgd":
        exchange.centre["x"].zero_()  # the middle of the workers
    points = []
    for _ in range(steps):
        strategy.before_step()
        strategy.before_last_backward(0)
        loss = loss_of(function, module.x)
        loss.backward()
        strategy.after_backward()
        exchange.note_loss(loss.item())
        exchange.update(lr, 1.0)
        points.append(module.x.detach().clone())
    return torch.stack(points)


def sync_of(method, pull, **fields):
    if method == "lsgd":
        fields = {"global_period": 1, "global_pull": pull, "group_size": 2} | fields
    return SyncConfig(method=method, pull=pull, period=1, **fields)


@pytest.mark.parametrize("method", ["lsgd", "easgd"])
def test_on_a_quadratic_all_workers_come_to_its_minimiser(method):
    for points in run_ranks(4, path, "quadratic", sync_of(method, 0.2), 60):
        torch.testing.assert_close(points[-1], MINIMISER, rtol=0.0, atol=1e-8)


def test_between_two_wells_easgd_comes_to_rest_beside_the_minima_and_lsgd_in_one():
    """EASGD's centre stays in the middle, where the loss is largest, and (1 - a)(x - lr f'(x)) = x
    has x^2 = 1 - a / (lr (1 - a)): no minimum of f. LSGD's workers all come to the leader's."""
    pull, lr = 0.2, 0.5
    off = np.sqrt(1.0 - pull / (lr * (1.0 - pull)))
    ends = [
        points[-1].item()
        for points in run_ranks(4, path, "double well", sync_of("easgd", pull), 45)
    ]
    assert ends == pytest.approx([off, -off, off, -off], abs=1e-9) and off < 0.71
    together = sync_of("lsgd", pull)
    ends = [points[-1].item() for points in run_ranks(4, path, "double well", together, 45)]
    assert ends == pytest.approx([1.0] * 4, abs=1e-9)


def test_a_leader_comes_to_a_minimum_even_where_others_are_held_beside_theirs():
    """With a pull too weak to leave its well, u (1 - u) = a / (lr (1 - a)) holds a worker at -u."""
    weak, lr = 0.05, 0.5
    held = (1.0 + np.sqrt(1.0 - 4.0 * weak / (lr * (1.0 - weak)))) / 2.0
    sync = sync_of("lsgd", weak, group_size=1)  # one pull, to the first of equal workers
    ends = [points[-1].item() for points in run_ranks(4, path, "double well", sync, 45)]
    assert ends == pytest.approx([1.0, -held, 1.0, -held], abs=1e-9) and held < 0.9


@pytest.mark.parametrize("method", ["lsgd", "easgd"])
def test_workers_are_pulled_as_written_out(method):
    """Every step of four workers on the quadratic, with periods 2 and 4, in numpy."""
    if method == "lsgd":
        sync = SyncConfig(method=method, pull=0.4, period=2, global_pull=0.3, global_period=4)
    else:
        sync = SyncConfig(method=method, pull=0.2, period=2)
    found = np.stack([points.numpy() for points in run_ranks(4, path, "quadratic", sync, 9)])
    x, centre, h, a = np.array(STARTS["quadratic"]), np.zeros(3), H.numpy(), MINIMISER.numpy()
    losses = np.zeros((4, 0))
    for step in range(1, 10):
        now = 0.5 * np.einsum("wi,ij,wj->w", x - a, h, x - a)
        losses = np.concatenate([losses, now[:, None]], axis=1)
        x = x - 0.5 * (x - a) @ h
        means = losses[:, -2:].mean(axis=1)
        if method == "lsgd" and step % 2 == 0:
            leaders = [means[:2].argmin()] * 2 + [2 + means[2:].argmin()] * 2
            x = x - 0.4 * (x - x[leaders])
        if method == "lsgd" and step % 4 == 0:
            x = x - 0.3 * (x - x[means.argmin()])
        if method == "easgd" and step % 2 == 0:
            x, centre = x - 0.2 * (x - centre), centre + 0.2 * (x - centre).sum(axis=0)
        np.testing.assert_allclose(found[:, step - 1], x, rtol=1e-12, atol=1e-13)


def test_workers_of_one_loss_follow_the_first():
    """From mirrored starts all losses are equal at each exchange, and worker 0 leads."""
    sync = sync_of("lsgd", 1.0)
    for points in run_ranks(4, path, "double well", sync, 1):
        assert points[0].item() == pytest.approx(0.9 - 0.5 * 0.9 * (0.81 - 1.0), abs=1e-15)


def loaded(runtime, counters):
    exchange, _, _ = exchange_of(runtime, sync_of("lsgd", 0.1, group_size=1), [0.0], 0.1)
    try:
        exchange.load_counters(counters)
    except MtcliError as error:
        return str(error)
    return list(exchange.losses)


@pytest.mark.parametrize("losses", ["abc", [["1.0"]], [None], [[float("nan")]], {"0": 1.0}])
def test_losses_of_a_checkpoint_that_are_no_numbers_are_refused(losses):
    (said,) = run_ranks(1, loaded, {"losses": losses})
    assert f"the checkpoint's losses of workers are {losses}" in said
    assert "each worker's are a list of numbers" in said


def test_losses_of_another_number_of_workers_are_forgotten():
    assert run_ranks(1, loaded, {"losses": [[1.0], [2.0]]}) == [[]]
    assert run_ranks(1, loaded, {"losses": [[1.5]]}) == [[1.5]]
    assert run_ranks(1, loaded, {}) == [[]]
