"""Asynchronous workers: rounds under a written order of tickets, and on a real clock."""

import time

import pytest
import torch
from marks import slow_cases
from ranks import run_ranks
from tiny import GPT, MOE, Samples, Weighted
from workers import Scripted, one_at_a_time, train_workers, turns, weights_of, worker_config

from mtcli.core.config.schema import TrainConfig
from mtcli.core.config.sync import SyncConfig
from mtcli.core.exchange.facts import ReplicaShare
from mtcli.core.exchange.lsgd import LsgdFacts
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.rounds import Rounds, StoreTickets, next_meeting
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

LSGD = {"method": "lsgd", "pull": 0.3, "period": 2, "global_period": 4, "global_pull": 0.2}
EASGD = {"method": "easgd", "pull": 0.2, "period": 2}
# Who makes each of 24 steps: a fast one and a slow one; in the third round worker 3 makes none.
ORDER_OF_4 = [0, 1, 1, 2, 1, 1, 0, 3, 2, 1, 0, 1, 2, 2, 3, 1, 1, 1, 0, 2, 1, 2, 0, 0]
ORDER_OF_2 = [0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1]
CASES = {
    "lsgd": (LSGD, GPT, 4, {}, ORDER_OF_4),
    "lsgd, pp=2": (LSGD, GPT, 4, {"pp": 2}, ORDER_OF_2),
    "easgd": (EASGD, GPT, 4, {}, ORDER_OF_4),
    "easgd, ep=2": (EASGD, MOE, 4, {"ep": 2}, ORDER_OF_2),
}


@pytest.mark.parametrize("name", ["lsgd", *slow_cases("2 s each", *list(CASES)[1:])])
def test_under_a_scripted_clock_workers_do_what_the_script_says(tmp_path, name):
    """They meet when n l tau divides the sum of their steps; the oracle is one worker at a time."""
    sync, model, world, parallel, order = CASES[name]
    workers, per_round = len(set(order)), 2 * len(set(order))
    config = worker_config(model, sync | {"asynchronous": True}, parallel)
    done = run_ranks(world, train_workers, config, tmp_path, 0, 6, order)
    rounds = [order[i : i + per_round] for i in range(0, len(order), per_round)]
    for steps in done:
        assert [s.step for s in steps] == [2, 4, 6]
        assert [s.replica_steps for s in steps] == [
            tuple(one.count(worker) for worker in range(workers)) for one in rounds
        ]
    dp = parallel.get("ep", 1)
    ((expected, losses),) = run_ranks(1, one_at_a_time, config, workers, dp, order)
    for own, one in zip(expected, weights_of(tmp_path, 6), strict=True):
        for parameter, tensor in own.items():
            torch.testing.assert_close(one[parameter], tensor, rtol=1e-9, atol=1e-11)
    every = sum(map(sum, losses)) / len(order)
    assert sum(s.loss for s in done[0]) / 3 == pytest.approx(every, rel=1e-9)


@pytest.mark.parametrize(("method", "data"), [("lsgd", Weighted), ("easgd", Samples)])
def test_workers_of_one_speed_make_the_steps_of_a_synchronous_run_bit_for_bit(
    tmp_path, method, data
):
    """With loss weights too, of which some workers have none in a step."""
    sync = {"lsgd": LSGD, "easgd": EASGD}[method]
    orders = {"synchronous": None, "asynchronous": turns(4, 6)}
    for name, order in orders.items():
        (tmp_path / name).mkdir()
        config = worker_config(GPT, sync | {"asynchronous": bool(order)}, precision="fp32")
        run_ranks(4, train_workers, config, tmp_path / name, 0, 6, order, data)
    pairs = zip(*(weights_of(tmp_path / name, 6) for name in orders), strict=True)
    assert all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def test_an_asynchronous_run_that_resumes_has_the_bits_of_one_that_was_not_stopped(tmp_path):
    config = worker_config(GPT, LSGD | {"asynchronous": True}, precision="bf16")
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = run_ranks(4, train_workers, config, tmp_path / "whole", 0, 6, ORDER_OF_4)
    run_ranks(4, train_workers, config, tmp_path / "stopped", 0, 2, ORDER_OF_4)
    after = run_ranks(4, train_workers, config, tmp_path / "stopped", 2, 6, ORDER_OF_4)
    assert [s.loss for s in after[0]] == [s.loss for s in whole[0]][1:]
    pairs = zip(*(weights_of(tmp_path / name, 6) for name in ("whole", "stopped")), strict=True)
    assert all(torch.equal(a[name], b[name]) for a, b in pairs for name in a)


def with_a_store(runtime, config, waits=False):
    """Each round's steps of workers, and the tickets that this rank took.

    Where the last worker `waits`, it holds its first ticket until the others have taken the rest.
    """
    trainer = Trainer(config, runtime)
    initialise(trainer)
    is_slow = waits and trainer.groups.replicas.rank == trainer.layout.replicas - 1
    loader = MicroBatchLoader(Samples(config), config, trainer.groups)
    rounds, taken = Rounds(trainer), []
    tickets, take = rounds.tickets, rounds.tickets.take

    def slow_take(first, end):
        if (ticket := take(first, end)) is not None:
            taken.append(ticket)
            while is_slow and tickets.store.add("next", 0) - tickets.counted < end - first:
                time.sleep(0.01)
        return ticket

    tickets.take = slow_take
    steps = [rounds.train(loader).replica_steps for _ in range(3)]
    return steps, taken


@pytest.mark.parametrize(("world", "parallel"), [(3, {}), *slow_cases("4 s", (4, {"tp": 2}))])
def test_a_slow_worker_makes_fewer_steps_and_each_part_of_the_data_is_trained_on_once(
    world, parallel
):
    config = worker_config(
        GPT, LSGD | {"period": 4, "asynchronous": True, "group_size": 1}, parallel
    )
    workers = world // parallel.get("tp", 1)
    if workers == 3:
        config = config.model_copy(
            update={"batch": config.batch.model_copy(update={"global_batch_size": 3})}
        )
    found = run_ranks(world, with_a_store, config, True)
    for steps, _ in found:
        assert steps == found[0][0]
        assert [sum(counts) for counts in steps] == [4 * workers] * 3
        assert all(counts[-1] <= 1 for counts in steps)
    tickets = sorted(ticket for _, own in found for ticket in own)
    assert tickets == list(range(12 * workers))


def test_a_run_of_one_process_has_tickets_too():
    ((steps, tickets),) = run_ranks(
        1, with_a_store, worker_config(GPT, LSGD | {"asynchronous": True})
    )
    assert steps == [(2,)] * 3 and tickets == list(range(6))


def test_tickets_go_on_where_the_last_round_ended():
    a, b = StoreTickets(2), StoreTickets(2)
    b.store = a.store
    assert [a.take(6, 8), b.take(6, 8), b.take(6, 8), a.take(6, 8)] == [6, 7, None, None]
    assert [b.take(8, 11), b.take(8, 11), a.take(8, 11), a.take(8, 11)] == [8, 9, 10, None]


def test_a_script_gives_each_worker_its_own_tickets():
    clock = Scripted([0, 1, 1, 0], worker=1)
    assert [clock.take(0, 4) for _ in range(3)] == [1, 2, None]


@pytest.mark.parametrize(
    ("fields", "meetings"),
    [
        ({}, [4, 8, 12, 16, 20]),
        ({"save_every": 6}, [4, 6, 8, 12, 16, 18, 20]),
        ({"eval_every": 10, "steps": 11}, [4, 8, 10, 11]),
    ],
)
def test_workers_meet_for_exchanges_saves_evaluations_and_the_end(fields, meetings):
    train = TrainConfig(**{"steps": 20, "save_every": 0} | fields)
    share = ReplicaShare(SyncConfig(method="lsgd", asynchronous=True), train.steps, 4, {}, 4)
    step, found = 0, []
    while step < train.steps:
        step = next_meeting(train, LsgdFacts(share).turns, step)
        found.append(step)
    assert found == meetings


def test_a_global_period_that_the_period_does_not_divide_has_meetings_of_its_own():
    sync = SyncConfig(method="lsgd", period=4, global_period=6, asynchronous=True)
    turns, train = LsgdFacts(ReplicaShare(sync, 20, 4, {}, 4)).turns, TrainConfig(steps=20)
    assert [next_meeting(train, turns, step) for step in (0, 4, 6, 8)] == [4, 6, 8, 12]
