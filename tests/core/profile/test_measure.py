"""Measuring real steps on one rank: ops, phases, memory and tokens are what they are said to be."""

from time import sleep

import numpy as np
import pytest
import torch

from mtcli.core.config.loading import config_of
from mtcli.core.data.loader import CountedTokens
from mtcli.core.optim.optimizer import Optimizer
from mtcli.core.plan.memory import state_bytes
from mtcli.core.profile.figures import Profile
from mtcli.core.profile.measure import measure
from mtcli.core.runtime.launch import Runtime

RUNTIME = Runtime(0, 1, 0, 1, torch.device("cpu"))
TABLE = {
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "vocab_size": 128,
        "max_seq_len": 32,
    },
    "batch": {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 8},
    "train": {"steps": 10},
}


@pytest.fixture(scope="module")
def measured():
    return measure(config_of(TABLE), RUNTIME, warmup=1, steps=4)


@pytest.fixture(scope="module")
def profile(measured):
    return Profile(config_of(TABLE), 1, measured.device, measured.records)


def test_every_op_of_the_schedule_was_timed_in_order(profile):
    ran = [span.op for span in profile.measured.spans]
    assert ran == list(profile.schedule.ops[0])
    ends = [0.0, *(span.end for span in profile.measured.spans)]
    starts = [span.start for span in profile.measured.spans]
    assert all(end <= start for end, start in zip(ends, starts, strict=False))


def test_nearly_all_of_a_step_is_accounted_for(profile):
    shares = profile.as_json()["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["other"] < 0.05  # goals.md C13: 95 % of a step has a name
    assert shares["forward"] > 0.05 and shares["backward"] > 0.05


def test_state_bytes_are_those_that_plan_counts(profile):
    memory = profile.as_json()["memory_bytes"]
    planned = state_bytes(profile.work, 0)
    assert (memory["weights"], memory["gradients"], memory["optimizer"]) == planned
    assert memory["process"] > memory["peak"] > sum(planned)


def test_activations_grow_with_the_micro_batch(profile):
    table = TABLE | {"batch": TABLE["batch"] | {"micro_batch_size": 8}}
    found = measure(config_of(table), RUNTIME, warmup=0, steps=1)
    larger = Profile(config_of(table), 1, found.device, found.records).as_json()["memory_bytes"]
    ratio = larger["activations"] / profile.as_json()["memory_bytes"]["activations"]
    assert 3.0 < ratio < 4.4


def test_the_profiled_step_names_its_products(profile):
    kernels = {row["name"]: row for row in profile.as_json()["kernels"]}
    # A layer has 4 products with weights, forward and twice backward, and the head has 3 in all:
    # 4 micro-batches * (2 layers * 4 + 1) * 3 of them, addmm where there is a bias.
    calls = kernels["aten::mm"]["calls"] + kernels["aten::addmm"]["calls"]
    assert calls == 4 * (2 * 4 + 1) * 3


def test_slow_data_is_seen_as_waiting_for_data(monkeypatch):
    def slow(self, start, count):
        sleep(0.2)
        return np.zeros((count, self.seq_len + 1), dtype=np.int64)

    monkeypatch.setattr(CountedTokens, "batch", slow)
    found = measure(config_of(TABLE), RUNTIME, warmup=0, steps=1)
    data = Profile(config_of(TABLE), 1, found.device, found.records).as_json()
    # 4 micro-batches are read in 0.8 s, of which a step's computation hides some.
    assert data["shares"]["data"] * data["step_seconds"]["median"] > 0.2


def test_a_slow_optimizer_is_seen_in_the_optimizer(monkeypatch):
    step = Optimizer.step

    def slow(self, *arguments):
        sleep(0.2)
        step(self, *arguments)

    monkeypatch.setattr(Optimizer, "step", slow)
    found = measure(config_of(TABLE), RUNTIME, warmup=0, steps=1)
    shares = Profile(config_of(TABLE), 1, found.device, found.records).shares_by_rank[0]
    steps = found.records[0].steps  # shares are of their mean, whatever each of them took
    seconds = sum(step.seconds for step in steps) / len(steps)
    assert 0.2 <= shares["optimizer"] * seconds < 0.6  # a busy machine wakes a sleeper late


def test_counted_tokens_go_on_from_sample_to_sample():
    batch = CountedTokens(seq_len=4, vocab_size=10, num_samples=100).batch(1, 2)
    assert batch.tolist() == [[4, 5, 6, 7, 8], [8, 9, 0, 1, 2]]
    assert batch.dtype == np.int64
    assert (CountedTokens(4, 10, 100).documents(1, 2) == np.zeros((2, 5))).all()
