"""Two ranks that call different things are told before either call is made."""

import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny import MOE, Samples, run_config

from mtcli.core.config.errors import MtcliError
from mtcli.core.mesh.layout import ParallelLayout
from mtcli.core.parallel import collectives
from mtcli.core.parallel.groups import make_groups
from mtcli.core.runtime.health.consistency import ConsistencyGuard
from mtcli.core.runtime.health.flight_recorder import FlightRecorder
from mtcli.core.training.loader import MicroBatchLoader
from mtcli.core.training.state import initialise
from mtcli.core.training.step import Trainer

HINT = "the ranks of an axis must make the same calls in the same order; later ones follow from it"


def guarded(runtime, path):
    """(a recorder that compares calls, the connection it has to the other ranks)."""
    store = dist.FileStore(path, runtime.world)
    return FlightRecorder(ConsistencyGuard(store, runtime.rank).compare), store


def told(runtime, path, cases):
    """What each rank is told in each of the cases; the store outlives them."""
    found = []
    for number, case in enumerate(cases):
        recorder, _ = guarded(runtime, f"{path}-{number}")
        layout = ParallelLayout(runtime.world, **({"pp": 2} if "message" in case else {"tp": 2}))
        groups = make_groups(layout, runtime.rank, "cpu", recorder=recorder)
        recorder.step = 7
        try:
            globals()[case](groups, runtime.rank)
        except MtcliError as error:
            found.append(str(error))
    return found


def reduce(x, axis):
    return collectives.all_reduce(x, axis)


def shapes(groups, rank):
    reduce(torch.ones(4 + rank, 2), groups.tp)


def dtypes(groups, rank):
    reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32), groups.tp)


def operators(groups, rank):
    op = dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM
    collectives.all_reduce(torch.ones(4), groups.tp, op)


def orders(groups, rank):
    if rank:
        collectives.gather_values("x", groups.tp)
    reduce(torch.ones(4), groups.tp)


def extra_of_the_same_shape(groups, rank):
    if rank:
        collectives.all_reduce(torch.ones(4), groups.tp)
    reduce(torch.ones(4), groups.tp)


def asynchronous(groups, rank):
    collectives.start_all_reduce(torch.ones(4 + rank), groups.tp)


def splits(groups, rank):
    sent = [[1, 2], [3, 1]][rank]
    received = [[1, 3], [1, 1]][rank]  # of the 2 rows from rank 0, rank 1 expects 1
    collectives.all_to_all_v(torch.ones(sum(sent), 5), sent, received, groups.tp)


def messages(groups, rank):
    axis = groups.axes["pp_forward"]
    if rank:
        collectives.receive(torch.ones(4), axis, 0, "F1.0")
    else:
        collectives.start_send(torch.ones(4), axis, 1, "F0.0")


def message_shapes(groups, rank):
    axis = groups.axes["pp_forward"]
    if rank:
        collectives.receive(torch.ones(5), axis, 0, "F0.0")
    else:
        collectives.start_send(torch.ones(4), axis, 1, "F0.0")


def crossed(groups, rank):
    if rank:
        collectives.all_reduce(torch.ones(4), groups.world)
    else:
        collectives.all_gather(torch.ones(2), groups.tp)


def crossed_messages(groups, rank):
    axis = groups.axes["pp_forward" if rank else "pp_backward"]
    collectives.receive(torch.ones(4), axis, 1 - rank, "F0.0")


AT = r"test_consistency\.py:\d+ in "
MOVED = r"all_to_all_v of \[5\] float32 that"
DIFFERENT = {
    "shapes": (
        "number 1 on tp",
        rf"all_reduce of \[4, 2\] float32 \(SUM\) at {AT}reduce",
        rf"all_reduce of \[5, 2\] float32 \(SUM\) at {AT}reduce",
    ),
    "dtypes": (
        "number 1 on tp",
        rf"all_reduce of \[4\] float32 \(SUM\) at {AT}reduce",
        rf"all_reduce of \[4\] float64 \(SUM\) at {AT}reduce",
    ),
    "operators": (
        "number 1 on tp",
        rf"all_reduce of \[4\] float32 \(SUM\) at {AT}operators",
        rf"all_reduce of \[4\] float32 \(MAX\) at {AT}operators",
    ),
    "orders": (
        "number 1 on tp",
        rf"all_reduce of \[4\] float32 \(SUM\) at {AT}reduce",
        rf"gather_values at {AT}orders",
    ),
    "extra_of_the_same_shape": (
        "number 1 on tp",
        rf"all_reduce of \[4\] float32 \(SUM\) at {AT}reduce",
        rf"all_reduce of \[4\] float32 \(SUM\) at {AT}extra_of_the_same_shape",
    ),
    "asynchronous": (
        "number 1 on tp",
        rf"all_reduce of \[4\] float32 at {AT}asynchronous",
        rf"all_reduce of \[5\] float32 at {AT}asynchronous",
    ),
    "splits": (
        "number 1 on tp",
        rf"{MOVED} sends \[1, 2\] and receives \[1, 3\] rows at {AT}splits",
        rf"{MOVED} sends \[3, 1\] and receives \[1, 1\] rows at {AT}splits",
    ),
}


@pytest.fixture(scope="module")
def different(tmp_path_factory):
    """What ranks 0 and 1 are told, by case."""
    path = str(tmp_path_factory.mktemp("different") / "store")
    answers = run_ranks(2, told, path, list(DIFFERENT))
    return dict(zip(DIFFERENT, zip(*answers, strict=True), strict=True))


@pytest.mark.parametrize("case", DIFFERENT)
def test_both_ranks_are_told_both_calls_before_they_hang(different, case):
    where, first, second = DIFFERENT[case]
    for rank, other, mine, theirs in ((0, 1, first, second), (1, 0, second, first)):
        expected = rf"error: rank {rank} and rank {other} differ at {where} \(step 7\): "
        expected += rf"rank {rank} calls {mine}; rank {other} calls {theirs}\n\nhint: {HINT}"
        assert re.fullmatch(expected, different[case][rank]), different[case][rank]


def test_a_receiver_is_told_what_was_sent_and_the_sender_goes_on(tmp_path):
    sender, receiver = run_ranks(2, told, str(tmp_path / "s"), ["messages", "message_shapes"])
    assert sender == []
    calls = [
        (r"\[4\] float32 \(F1\.0\)", r"\[4\] float32 \(F0\.0\)", "messages"),
        (r"\[5\] float32 \(F0\.0\)", r"\[4\] float32 \(F0\.0\)", "message_shapes"),
    ]
    for error, (mine, theirs, where) in zip(receiver, calls, strict=True):
        expected = (
            r"error: rank 1 and rank 0 differ at number 1 on pp_forward from 0 to 1 \(step 7\)"
        )
        expected += rf": rank 1 calls recv of {mine} at {AT}{where}; "
        expected += rf"rank 0 calls send of {theirs} at {AT}{where}\n\nhint: {HINT}"
        assert re.fullmatch(expected, error), error


def test_two_ranks_that_wait_for_each_other_in_different_calls_are_told(tmp_path):
    cases = ["crossed", "crossed_messages"]
    first, second = run_ranks(2, told, str(tmp_path / "store"), cases)
    gather = rf"number 1 on tp, all_gather of \[2\] float32 at {AT}crossed"
    whole = rf"number 2 on world, all_reduce of \[4\] float32 \(SUM\) at {AT}crossed"
    sent = rf"recv of \[4\] float32 \(F0\.0\) at {AT}crossed_messages"
    back, forth = "number 1 on pp_backward from 1 to 0", "number 1 on pp_forward from 0 to 1"
    for one, errors, here in ((0, first, (gather, back)), (1, second, (whole, forth))):
        other = (whole, f"{forth}, {sent}") if one == 0 else (gather, f"{back}, {sent}")
        for error, mine, theirs in zip(errors, (here[0], f"{here[1]}, {sent}"), other, strict=True):
            expected = rf"error: rank {one} and rank {1 - one} wait for each other \(step 7\): "
            expected += rf"rank {one} in {mine}; rank {1 - one} in {theirs}\n\nhint: {HINT}"
            assert re.fullmatch(expected, error), error


def trained(runtime, path, config):
    """[(losses and weights of two steps, keys in the store)] without and with comparisons."""
    found = []
    for recorder, store in ((FlightRecorder(), None), guarded(runtime, path)):
        trainer = Trainer(config, replace(runtime, recorder=recorder))
        initialise(trainer)
        loader = MicroBatchLoader(Samples(config), config, trainer.groups)
        losses = [trainer.train_step(loader).loss for _ in range(2)]
        loader.close()
        weights = {n: p.data for s in trainer.stages.values() for n, p in s.named_parameters()}
        found.append((losses, weights, store.num_keys() if store else 0, dict(recorder.counts)))
    return found


@pytest.mark.parametrize(
    "parallel",
    [{"tp": 2, "pp": 2, "vpp": 1}, {"cp": 2, "ep": 2, "zero": 1}],
    ids=["tp pp", "cp ep zero"],
)
def test_comparing_changes_no_bit_and_leaves_few_keys(tmp_path, parallel):
    config = run_config(MOE, parallel=parallel, train={"precision": "fp32"})
    for plain, compared in run_ranks(4, trained, str(tmp_path / "store"), config):
        assert compared[0] == plain[0] and compared[3] == plain[3]
        assert all(torch.equal(compared[1][name], plain[1][name]) for name in plain[1])
        assert sum(compared[3].values()) > 60
        assert compared[2] <= 4 * (1 + len(compared[3])) + 4, "one per rank, and per axis and rank"
