"""What the numbers of this machine depend on, and who shares it."""

import json
from dataclasses import replace
from pathlib import Path

from mtcli.core.config.loading import load_config
from mtcli.core.plan.calibration import Calibration, facts_of
from mtcli.core.plan.hardware import device_named, for_run

FIXED = Path(__file__).parents[2] / "calibration.json"


def test_a_calibration_is_its_json():
    known = Calibration.of(json.loads(FIXED.read_text()))
    assert Calibration.of(json.loads(json.dumps(known.as_json()))) == known
    assert known.update == (2e-4, 2e-9) and known.links["hop"] == (2e-4, 6e-10)


def test_numbers_are_kept_apart_by_what_they_depend_on():
    tiny = load_config("tiny")
    alone = facts_of(tiny, 1)
    assert alone["torch"].startswith("2.") and alone["ranks"] == 1
    assert facts_of(tiny, 10**6)["ranks"] == alone["cores"]
    others = ("train.precision=bf16", "model.activation=gelu", "model.dropout=0.1")
    for name in (*others, "optimizer.name=lamb"):
        assert facts_of(load_config("tiny", [name]), 1) != alone, name
    fp8 = facts_of(load_config("tiny", ["train.precision=fp8"]), 1)
    blocks = ["train.precision=fp8", "train.fp8_scaling=blockwise"]
    assert facts_of(load_config("tiny", blocks), 1) != fp8 != alone
    for name in ("model.num_layers=2", "batch.seq_len=128", "optimizer.lr=1e-5"):
        assert facts_of(load_config("tiny", [name]), 1) == alone, name


def test_processes_beyond_the_measured_ones_share_the_machine(monkeypatch):
    few = replace(Calibration.of(json.loads(FIXED.read_text())), ranks=2)
    monkeypatch.setattr("mtcli.core.plan.hardware.calibrated", lambda config, world: few)
    cpu, tiny = device_named("cpu"), load_config("tiny")
    rates = {world: for_run(cpu, tiny, world).peak("fp32") for world in (1, 2, 8)}
    assert rates == {1: few.flops, 2: few.flops, 8: few.flops / 4}
    assert for_run(cpu, tiny, 8).memory_bytes == cpu.memory_bytes / 8
