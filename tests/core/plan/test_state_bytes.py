"""The plan's state bytes are what a run allocates, rank by rank, to the byte."""

from ranks import run_ranks
from tiny import BIASED, GPT, LLAMA, MOE, run_config

from mtcli.core.plan.memory import state_bytes
from mtcli.core.plan.workload import Workload
from mtcli.core.training.step import Trainer

ODD = GPT | {"hidden_size": 18, "num_heads": 3}  # no dimension that four ranks divide
ROWS = {
    "masters": (1, GPT, {}, "bf16"),
    "masters of float16": (1, MOE, {}, "fp16"),
    "onebit, one replica": (1, GPT, {}, "fp32"),
    "narrow sums": (1, GPT, {}, "bf16"),
    "pp=2, untied": (2, LLAMA, {"pp": 2}, "fp32"),
    "zero=1 over cp, masters": (2, GPT, {"cp": 2, "zero": 1}, "bf16"),
    "zero=3 of nobody": (2, GPT, {"tp": 2, "zero": 3}, "bf16"),
    "biases of experts": (2, BIASED, {"ep": 2}, "fp64"),
    "lamb, onebit": (2, GPT, {}, "fp32"),
    "narrow sums, zero=1 of experts": (2, BIASED, {"zero": 1}, "fp8"),
    "narrow sums, zero=1, odd rows": (4, ODD, {"zero": 1}, "bf16"),
    "narrow sums, zero=3": (4, BIASED, {"ep": 2, "zero": 3}, "bf16"),
    "zero=1, odd rows": (4, ODD, {"zero": 1}, "bf16"),
    "zero=3, odd rows": (4, ODD, {"zero": 3}, "fp32"),
    "zero=3 of experts": (4, MOE, {"pp": 2, "ep": 2, "zero": 3}, "bf16"),
    "biases of experts, masters": (4, BIASED, {"tp": 2, "pp": 2, "zero": 1}, "bf16"),
    "biases of experts, zero=3": (4, BIASED, {"ep": 2, "zero": 3}, "bf16"),
    "ema, masters": (2, MOE, {"ep": 2}, "bf16"),
    "ema, zero=1, odd rows": (4, ODD, {"zero": 1}, "bf16"),
    "ema, zero=3 of experts": (4, MOE, {"ep": 2, "zero": 3}, "fp32"),
    "folded": (4, MOE, {"tp": 2, "ep": 2, "etp": 2}, "fp32"),
    "lamb, zero=1, masters": (4, GPT, {"pp": 2, "zero": 1}, "bf16"),
    "lamb, zero=3 of experts": (4, MOE, {"ep": 2, "zero": 3}, "bf16"),
}


def _config_of(row):
    _, model, parallel, precision = ROWS[row]
    rule = {"name": "lamb" if row.startswith("lamb") else "adamw"}
    sync = {"method": "onebit", "warmup_steps": 2} if "onebit" in row else {}
    train = {"precision": precision, "gradients": "bf16" if "narrow" in row else "fp32"}
    train |= {"ema": 0.99} if row.startswith("ema") else {}
    return run_config(model, parallel=parallel, optimizer=rule, sync=sync, train=train)


def _allocated(runtime):
    """Of each row of this world (bytes of weights, of gradients, of the optimizer)."""
    found = {}
    for row in ROWS:
        if ROWS[row][0] == runtime.world:
            kinds = Trainer(_config_of(row), runtime).state_bytes_by_kind()
            found[row] = kinds["weights"], kinds["gradients"], kinds["optimizer"]
    return found


def test_the_planned_state_bytes_are_those_that_the_fullest_rank_allocates(subtests):
    found = {world: run_ranks(world, _allocated) for world in (1, 2, 4)}
    for row, (world, *_) in ROWS.items():
        work = Workload.of(_config_of(row), world)
        for stage in range(work.layout.pp):
            ranks = [rank for rank in range(world) if work.layout.coordinates(rank)["pp"] == stage]
            with subtests.test(row, stage=stage):
                held = zip(*(found[world][rank][row] for rank in ranks), strict=True)
                assert tuple(map(max, held)) == state_bytes(work, stage)
