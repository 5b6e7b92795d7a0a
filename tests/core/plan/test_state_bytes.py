"""The plan's state bytes are what a run allocates, rank by rank, to the byte."""

import pytest

from mtcli.core.plan.memory import state_bytes
from mtcli.core.plan.workload import Workload
from mtcli.core.training.step import Trainer
from tests.ranks import run_ranks
from tests.tiny import BIASED, GPT, LLAMA, MOE, run_config

ROWS = {
    "one rank": (1, GPT, {}, "fp32"),
    "one rank, masters": (1, GPT, {}, "bf16"),
    "one rank, masters of float16": (1, MOE, {}, "fp16"),
    "tp=2": (2, GPT, {"tp": 2}, "fp32"),
    "pp=2, tied": (2, GPT, {"pp": 2}, "bf16"),
    "pp=2, untied": (2, LLAMA, {"pp": 2}, "fp32"),
    "zero=1 over dp": (2, LLAMA, {"zero": 1}, "fp32"),
    "zero=1 over cp, masters": (2, GPT, {"cp": 2, "zero": 1}, "bf16"),
    "zero=1 of experts": (4, MOE, {"ep": 2, "zero": 1}, "fp32"),
    "zero=3, odd rows": (4, GPT, {"zero": 3}, "fp32"),
    "zero=3 is its own masters": (4, GPT, {"tp": 2, "zero": 3}, "bf16"),
    "zero=3 of experts": (4, MOE, {"pp": 2, "ep": 2, "zero": 3}, "bf16"),
    "zero=3 of nobody": (2, GPT, {"tp": 2, "zero": 3}, "bf16"),
    "biases of experts, masters": (4, BIASED, {"tp": 2, "pp": 2, "zero": 1}, "bf16"),
    "biases of experts, zero=3": (4, BIASED, {"ep": 2, "zero": 3}, "bf16"),
    "biases of experts": (2, BIASED, {"ep": 2}, "fp64"),
    "folded": (4, MOE, {"tp": 2, "ep": 2, "etp": 2}, "fp32"),
    "lamb, zero=1, masters": (4, GPT, {"pp": 2, "zero": 1}, "bf16"),
    "lamb, zero=3 of experts": (4, MOE, {"ep": 2, "zero": 3}, "bf16"),
    "lamb, onebit, one replica": (2, GPT, {"tp": 2}, "bf16"),
    "lamb, onebit": (2, GPT, {}, "fp32"),
    "onebit, one replica": (1, GPT, {}, "fp32"),
}


def _allocated(runtime, config):
    kinds = Trainer(config, runtime).state_bytes_by_kind()
    return kinds["weights"], kinds["gradients"], kinds["optimizer"]


@pytest.mark.parametrize("row", ROWS)
def test_the_planned_state_bytes_are_those_that_the_fullest_rank_allocates(row):
    world, model, parallel, precision = ROWS[row]
    rule = {"name": "lamb" if row.startswith("lamb") else "adamw"}
    sync = {"method": "onebit", "warmup_steps": 2} if "onebit" in row else {}
    train = {"precision": precision}
    config = run_config(model, parallel=parallel, optimizer=rule, sync=sync, train=train)
    work = Workload.of(config, world)
    found = run_ranks(world, _allocated, config)
    for pp_rank in range(work.layout.pp):
        places = [rank for rank in range(world) if work.layout.coordinates(rank)["pp"] == pp_rank]
        most = tuple(max(found[rank][kind] for rank in places) for kind in range(3))
        assert most == state_bytes(work, pp_rank)
