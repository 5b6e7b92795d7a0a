"""LSGD and EASGD through the trainer, against workers that one rank trains one at a time."""

import pytest
import torch
from marks import slow_cases
from ranks import run_ranks
from tiny import GPT, LLAMA, Samples
from trained import checkpoint_of, save_to
from workers import one_at_a_time, train_workers, weights_of, worker_config

from mtcli.core.config.sync import SyncConfig
from mtcli.core.sync.lsgd import elected
from mtcli.core.sync.replica_average import distance
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise, resume
from mtcli.core.training.step import Trainer

PERIODS = {"period": 2, "global_period": 4}
LSGD = {"method": "lsgd", "pull": 0.3, "global_pull": 0.2} | PERIODS
EASGD = {"method": "easgd", "pull": 0.3, "period": 2}

RUNS = {  # method, model, ranks, parallel, sync, workers, data ranks of each
    # The parity table has LSGD's layouts.
    "four workers": ("lsgd", GPT, 4, {}, {}, 4, 1),
    "a group of four": ("lsgd", GPT, 4, {}, {"group_size": 4}, 4, 1),
    "groups of one": ("lsgd", GPT, 4, {}, {"group_size": 1}, 4, 1),
    "a centre of four": ("easgd", GPT, 4, {}, {}, 4, 1),
    "a centre of tp=2": ("easgd", LLAMA, 4, {"tp": 2}, {}, 2, 1),
    "a centre of zero=1": ("easgd", GPT, 4, {"zero": 1}, {"replicas": 2}, 2, 2),
}


QUICK = ("four workers", "a centre of four")


@pytest.mark.parametrize(
    "name", [*QUICK, *slow_cases("2 s each", *(name for name in RUNS if name not in QUICK))]
)
def test_replicas_are_workers_trained_one_at_a_time(tmp_path, name):
    method, model, world, parallel, sync, workers, dp = RUNS[name]
    nesterov = method == "easgd"
    chosen = {"lsgd": LSGD, "easgd": EASGD}[method] | sync
    config = worker_config(model, chosen, parallel, nesterov=nesterov)
    run_ranks(world, train_workers, config, tmp_path)
    ((expected, _),) = run_ranks(1, one_at_a_time, config, workers, dp)
    found = weights_of(tmp_path, 5)
    assert len(found) == workers
    for own, one in zip(expected, found, strict=True):
        for parameter, tensor in own.items():
            torch.testing.assert_close(one[parameter], tensor, rtol=1e-9, atol=1e-11)
    first = next(iter(expected[0]))
    assert not torch.equal(found[0][first], found[1][first])


def test_without_a_pull_each_worker_is_a_run_of_its_own_bit_for_bit(tmp_path):
    sync = {"method": "lsgd", "pull": 0.0, "global_pull": 0.0, "group_size": 2} | PERIODS
    done = run_ranks(2, train_workers, worker_config(GPT, sync, precision="fp32"), tmp_path)
    alone = {"method": "lsgd", "period": 100, "group_size": 2}
    other = tmp_path / "alone"
    other.mkdir()
    run_ranks(2, train_workers, worker_config(GPT, alone, precision="fp32"), other)
    ((_, losses),) = run_ranks(1, one_at_a_time, worker_config(GPT, sync, precision="fp32"), 2)
    mean = [sum(both) / 2 for both in zip(*losses, strict=True)]
    assert [step.loss for step in done[0]] == pytest.approx(mean, rel=1e-6)
    for own, one in zip(weights_of(tmp_path, 5), weights_of(other, 5), strict=True):
        assert all(torch.equal(own[name], one[name]) for name in own)


def test_a_pull_of_1_makes_all_workers_equal_their_leader_and_leaves_that_as_it_was(tmp_path):
    weights, masters = {}, {}
    for name, pulls in {"pulled": {"global_pull": 1.0}, "free": {"global_pull": 0.0}}.items():
        sync = {"method": "lsgd", "pull": 0.0, "period": 2, "global_period": 4} | pulls
        config = worker_config(GPT, sync, precision="bf16")
        (tmp_path / name).mkdir()
        run_ranks(4, train_workers, config, tmp_path / name, 0, 4)
        weights[name] = weights_of(tmp_path / name, 4)
        one, key = checkpoint_of(tmp_path / name, 4), "optimizer.master/embedding.weight"
        masters[name] = [one.replica(r).read(key) for r in range(4)]
    ((_, losses),) = run_ranks(1, one_at_a_time, worker_config(GPT, sync), 4, 1, None, 4)
    leader = elected([sum(run[2:4]) for run in losses])
    pulled, free = weights["pulled"], weights["free"][leader]
    assert all(torch.equal(one[name], free[name]) for one in pulled for name in free)
    assert not torch.equal(
        weights["free"][leader - 1]["embedding.weight"], free["embedding.weight"]
    )
    assert all(torch.equal(one, masters["free"][leader]) for one in masters["pulled"])


def test_two_workers_are_one_group_by_default_and_a_pull_of_1_makes_them_equal(tmp_path):
    sync = {"method": "lsgd", "pull": 1.0, "global_pull": 0.0, "period": 2, "global_period": 100}
    run_ranks(2, train_workers, worker_config(GPT, sync), tmp_path, 0, 2)
    one, other = weights_of(tmp_path, 2)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_default_group_is_about_the_root_of_all_workers_and_never_one_of_several():
    sizes = {n: SyncConfig(method="lsgd").workers_of_group(n) for n in range(1, 17)}
    assert {n for n, size in sizes.items() if size == n} == {1, 2, 3, 5, 7, 11, 13}
    assert all(n % size == 0 for n, size in sizes.items())
    assert [sizes[n] for n in (4, 6, 8, 9, 12, 15, 16)] == [2, 2, 2, 3, 3, 3, 4]


def test_the_first_of_equal_workers_leads():
    assert elected([2.0, 1.0, 1.0]) == 1 and elected([float("inf"), 3.0]) == 1


def test_one_worker_per_group_and_one_period_is_a_single_leader(tmp_path):
    single = {"method": "lsgd", "period": 2, "global_period": 2, "group_size": 1}
    group = {"method": "lsgd", "period": 2, "global_period": 100, "group_size": 4}
    for name, sync in {"single": single, "group": group}.items():
        (tmp_path / name).mkdir()
        run_ranks(4, train_workers, worker_config(GPT, sync), tmp_path / name)
    pairs = zip(weights_of(tmp_path / "single", 5), weights_of(tmp_path / "group", 5), strict=True)
    assert all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


@pytest.mark.parametrize(
    ("method", "precision"), [("lsgd", "bf16"), *slow_cases("6 s", ("easgd", "fp16"))]
)
def test_a_run_that_resumes_has_the_bits_of_one_that_was_not_stopped(tmp_path, method, precision):
    sync = {"lsgd": LSGD, "easgd": EASGD}[method]
    parallel = {"tp": 2} if method == "lsgd" else {"zero": 1}
    replicas = {} if method == "lsgd" else {"replicas": 2}
    config = worker_config(GPT, sync | replicas, parallel, precision=precision)
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = run_ranks(4, train_workers, config, tmp_path / "whole", 0, 8)
    run_ranks(4, train_workers, config, tmp_path / "stopped", 0, 3)
    after = run_ranks(4, train_workers, config, tmp_path / "stopped", 3, 8)
    assert [s.loss for s in after[0]] == [s.loss for s in whole[0]][3:]
    ends = [weights_of(tmp_path / name, 8) for name in ("whole", "stopped")]
    assert all(torch.equal(a[n], b[n]) for a, b in zip(*ends, strict=True) for n in a)
    names = [n for n in checkpoint_of(tmp_path / "whole", 8).names() if "centre/" in n]
    assert bool(names) == (method == "easgd")
    for name in names:
        both = [checkpoint_of(tmp_path / place, 8).read(name) for place in ("whole", "stopped")]
        assert torch.equal(*both)


def resumed(runtime, config, folder, start, stop):
    """The replica distances before and after, the losses known, and the leader then elected."""
    trainer = Trainer(config, runtime)
    resume(trainer, checkpoint_of(folder, start))
    known = getattr(trainer.exchange, "losses", None)
    before = distance(trainer.exchange), known and list(known)
    done = train_workers(runtime, config, folder, start, stop)
    return before, [step.loss for step in done]


@pytest.mark.parametrize(("method", "world"), [("lsgd", 2), *slow_cases("5 s", ("easgd", 8))])
def test_a_run_whose_leader_has_gone_or_that_a_worker_joins_goes_on_from_the_average(
    tmp_path, method, world, capfd
):
    """Of four workers two are left, the leader maybe not among them, or there are four more."""
    sync = {"lsgd": LSGD, "easgd": EASGD}[method] | {"pull": 0.2}
    config = worker_config(GPT, sync)
    run_ranks(4, train_workers, config, tmp_path, 0, 3)
    mean = {
        name: sum(one[name] for one in weights_of(tmp_path, 3)) / 4
        for name in weights_of(tmp_path, 3)[0]
    }
    found = run_ranks(world, resumed, config, tmp_path, 3, 9)
    for (apart, known), losses in found:
        assert apart == pytest.approx(0.0, abs=1e-12) and not known
        assert losses == found[0][1] and len(losses) == 6
    after = weights_of(tmp_path, 9)
    assert len(after) == world
    assert all(torch.isfinite(x).all() for one in after for x in one.values())
    assert any(not torch.equal(after[0][name], mean[name]) for name in mean)


def losses_of(runtime, config, folder):
    """The losses by which leaders are elected: of a run that stops after three steps, and of one
    that goes on from there."""
    trainer = Trainer(config, runtime)
    initialise(trainer)
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    for _ in range(3):
        trainer.train_step(loader)
    loader.close()
    save_to(folder, trainer)
    again = Trainer(config, runtime)
    resume(again, checkpoint_of(folder, 3))
    return list(trainer.exchange.losses), list(again.exchange.losses)


def test_a_run_that_resumes_elects_by_the_losses_before_it_too(tmp_path):
    first, second = run_ranks(2, losses_of, worker_config(GPT, LSGD), tmp_path)
    for before, after in (first, second):
        assert after == before and len(after) == 2
    assert first != second, "each worker has its own"
