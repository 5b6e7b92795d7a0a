"""Ranks that meet through a store in which earlier attempts have left their keys."""

import json
import socket
import threading
import time

import pytest
import torch.distributed as dist

from mtcli.core.config.errors import MtcliError
from mtcli.core.runtime.attempts import Attempt, Join, Meeting, alone, differing

TIMEOUT = 60.0  # seconds that no test waits for, but where it says so
DEAD = json.dumps(["of a dead rank", 0, "cuda", "node-1"])  # has joined before


class Ranks:
    """Ranks of one attempt in threads, and what each has agreed on or raised."""

    def __init__(self, store, world, counts=None, timeout=TIMEOUT, devices=None):
        self.store, self.world, self.timeout = store, world, timeout
        self.devices = devices or {}
        self.counts, self.answers, self.threads = counts or {}, {}, {}

    def start(self, *ranks):
        for rank in ranks:
            self.threads[rank] = threading.Thread(target=self._meet, args=(rank,), daemon=True)
            self.threads[rank].start()
        return self

    def _meet(self, rank):
        environ = {"TORCHELASTIC_RESTART_COUNT": str(self.counts.get(rank, 0))}
        try:
            self.answers[rank] = self._meeting(rank).agree(environ)
        except MtcliError as error:
            self.answers[rank] = error

    def _meeting(self, rank):
        device = self.devices.get(rank, "cuda")
        return Meeting(self.store, rank, self.world, self.timeout, device)

    def together(self):
        """What all have agreed on."""
        for rank, thread in self.threads.items():
            thread.join(timeout=TIMEOUT)
            assert not thread.is_alive(), f"rank {rank} still waits"
        assert len(set(self.answers.values())) == 1, self.answers
        return self.answers[0]


def until(condition):
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


def met(store, world=3, counts=None):
    return Ranks(store, world, counts).start(*range(world)).together()


def test_ranks_that_all_start_go_on_together_and_none_before():
    ranks = Ranks(dist.HashStore(), 3).start(1, 2)
    until(lambda: ranks.store.check(["join/1", "join/2"]))
    time.sleep(0.05)
    assert not ranks.answers
    _, attempt = ranks.start(0).together()
    assert (attempt.number, attempt.restarted) == (1, False)


def test_every_attempt_has_a_name_of_its_own_and_the_launch_of_the_first():
    store = dist.HashStore()
    (first, one), (second, two) = met(store), met(store)
    assert first != second and one.launch == two.launch
    assert [one.number, two.number] == [1, 2]
    assert [one.restarted, two.restarted] == [False, True]
    assert met(dist.HashStore())[1].launch != one.launch


@pytest.mark.parametrize("counts", [{0: 1, 1: 0, 2: 3}, {2: 1}])
def test_nodes_that_count_restarts_differently_meet_and_know_that_they_were_restarted(counts):
    store = dist.HashStore()
    for number in (1, 2):
        _, attempt = met(store, counts=counts)
        assert attempt.restarted and attempt.number == number


def test_a_rank_that_died_after_it_joined_is_not_taken_for_its_successor():
    store = dist.HashStore()
    store.set("join/1", DEAD)
    ranks = Ranks(store, 3).start(0, 2)
    until(lambda: store.check(["seat/of a dead rank/0"]))  # rank 0 has counted it in
    time.sleep(0.05)
    assert not ranks.answers
    ranks.start(1).together()


def test_a_roster_that_a_dead_rank_0_has_left_is_not_followed():
    store = dist.HashStore()
    ranks = Ranks(store, 2).start(1)
    until(lambda: store.check(["join/1"]))
    token, *_ = json.loads(store.get("join/1"))
    store.set(f"seat/{token}/0", "left")  # a rank 0 that was killed before all had answered
    until(lambda: store.check(["left/join/1"]))
    assert not ranks.answers
    store.set("left/verdict", "called off")
    name, _ = Ranks(store, 2).start(1, 0).together()
    assert name != "left"


def test_a_second_rank_0_ends_the_first():
    ranks = Ranks(dist.HashStore(), 2).start(0)
    until(lambda: ranks.store.check(["join/0"]))
    ranks.store.set("join/0", DEAD)
    ranks.store.set("join/1", DEAD)
    ranks.threads[0].join(timeout=TIMEOUT)
    assert "another process has joined as rank 0" in str(ranks.answers[0])


@pytest.mark.parametrize(("rank", "there", "missing"), [(0, [2], "1, 3"), (2, [0], "1, 3")])
def test_ranks_that_do_not_start_are_named(rank, there, missing):
    store = dist.HashStore()
    for one in there:
        store.set(f"join/{one}", DEAD)
    with pytest.raises(MtcliError) as caught:
        Meeting(store, rank, 4, 0.2, "cpu").agree({})
    (problem,) = caught.value.problems
    assert problem.message == f"after 0.2 s, of 4 ranks these have not started: {missing}"
    assert problem.hint == "raise train.timeout if they need longer" and caught.value.code == 1


def test_a_rank_that_joined_and_died_is_named_too():
    store = dist.HashStore()
    store.set("join/1", DEAD)
    ranks = Ranks(store, 3, timeout=0.5).start(0, 2)
    for thread in ranks.threads.values():
        thread.join(timeout=TIMEOUT)
    assert "of 3 ranks these have not started: 1" in str(ranks.answers[0])


def test_a_rank_on_another_kind_of_device_is_named_on_every_rank_and_nobody_waits():
    ranks = Ranks(dist.HashStore(), 4, devices={2: "cpu"}).start(*range(4))
    for thread in ranks.threads.values():
        thread.join(timeout=TIMEOUT)
    host = socket.gethostname()
    for rank in range(4):
        (problem,) = ranks.answers[rank].problems
        assert problem.message == (
            f"ranks compute on different devices: rank 2 on {host} has cpu; 3 of 4 ranks have cuda"
        )
        assert "nvidia-smi" in problem.hint and ranks.answers[rank].code == 1


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        (["cuda"] * 3, ""),
        (["cpu", "cuda"], "rank 0 on n0 has cpu; 1 of 2 ranks have cuda"),
        (["cpu", "cuda", "cpu"], "rank 1 on n1 has cuda; 2 of 3 ranks have cpu"),
        (["cuda"] * 6 + ["cpu"] * 6, "rank 9 on n9 has cpu, 2 more ranks differ; 6 of 12 ranks"),
    ],
)
def test_ranks_that_differ_are_those_unlike_most_or_those_without_a_gpu(devices, said):
    found = differing([Join("", 0, kind, f"n{rank}") for rank, kind in enumerate(devices)])
    assert said in found and bool(said) is bool(found)


@pytest.mark.parametrize(
    ("attempt", "record", "continues"),
    [
        (Attempt("a", "j", 2, True), {"launch": "a", "job": "k"}, True),
        (Attempt("a", "j", 2, True), {"launch": "b", "job": "j"}, False),  # one that was refused
        (Attempt("a", "j", 1, True), {"launch": "b", "job": "j"}, True),  # the store's node is new
        (Attempt("a", "j", 1, True), {"launch": "b", "job": "k"}, False),
        (Attempt("a", "j", 1, False), {"launch": "a", "job": "j"}, False),  # started by hand
        (Attempt("a", "", 1, True), {}, False),
        (Attempt("", "", 1, True), {"launch": "", "job": ""}, True),  # nothing has a name
    ],
)
def test_an_attempt_goes_on_from_what_its_own_launch_has_written(attempt, record, continues):
    assert attempt.continues(record) is continues


def test_alone_a_requeued_job_goes_on_and_a_second_step_of_it_does_not():
    job = {"SLURM_JOB_ID": "77"}
    record = alone(job).record()
    assert not alone(job).continues(record)
    assert alone(job | {"SLURM_RESTART_COUNT": "1"}).continues(record)
    assert not alone({"SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "1"}).continues(record)
