"""A rank that is dry-run holds the bytes that the plan says, whatever rank of whatever world."""

import gc

import pytest
import torch

from mtcli.core.cost.hardware import GPUS
from mtcli.core.dryrun import dry_run
from mtcli.core.live import Live
from mtcli.core.spec.errors import MtcliError
from tests.ranks import run_ranks
from tests.tiny import BIASED, GPT, LLAMA, MOE, run_config

H100 = GPUS["h100"]
FOLDED = {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "zero": 1}
ROWS = {
    "one rank": (1, GPT, {}, "fp32", None),
    "the last of data ranks that do not divide": (3, GPT, {"zero": 1}, "bf16", 2),
    "the last of data ranks that hold their weights' rows": (3, LLAMA, {"zero": 3}, "bf16", 2),
    "the last pipeline rank of a folded mixture": (16, BIASED, FOLDED, "bf16", 15),
    "all gathered": (4, MOE, {"tp": 2, "etp": 2, "dispatcher": "all_gather"}, "fp32", None),
}


def dry(world, model, parallel, precision, rank):
    batch = {"global_batch_size": 2 * world}
    config = run_config(model, parallel=parallel, batch=batch, train={"precision": precision})
    return dry_run(config, world, H100, rank)


def _dry_all(runtime):
    return {row: dry(*arguments) for row, arguments in ROWS.items()}


@pytest.fixture(scope="module")
def found():
    """Every row in one process, apart from this one: the first takes 3 s, the others 0.5 s."""
    (rows,) = run_ranks(1, _dry_all)
    return rows


@pytest.mark.parametrize("row", ROWS)
def test_a_dry_run_rank_holds_the_state_bytes_of_the_plan(found, row):
    assert sum(found[row].state.values()) > 0 and found[row].problems == []


def test_a_rank_that_is_not_there_cannot_be_dry_run():
    with pytest.raises(MtcliError, match="--rank 4 is not one of 4 ranks"):
        dry(4, GPT, {"tp": 2}, "fp32", 4)


def test_live_bytes_are_those_of_the_tensors_that_are_referred_to():
    with Live() as live:
        a = torch.zeros(100)
        b = a[10:]
        live.begin()
        (torch.zeros(50) + 1.0).sum()
        gc.collect()
        assert (live.bytes, live.peak) == (400, 400 + 2 * 200)
        a.untyped_storage().resize_(40)
        assert live.bytes == 40
        del a, b
        assert live.bytes == 0
