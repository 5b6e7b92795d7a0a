"""The numbers of this machine are measured once per kind of run, kept, and never half read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtcli.core.cost import calibration
from mtcli.core.cost.calibration import Calibration, calibrated, facts_of, kept_or_measured
from mtcli.core.cost.hardware import device_named, for_run, measure_cpu
from mtcli.core.spec.errors import MtcliError
from mtcli.core.spec.load import load_config

FIXED = Path(__file__).parents[2] / "calibration.json"
FACTS = {"version": 1, "ranks": 2, "precision": "fp32"}


class Meter:
    """Says the same each time, and counts how often it is asked."""

    def __init__(self, text=None):
        self.text, self.asked = text or FIXED.read_text(), 0

    def __call__(self, facts):
        self.asked += 1
        return self.text


def test_what_was_measured_is_kept_and_read_again(tmp_path, capsys):
    meter = Meter()
    first = kept_or_measured(FACTS, tmp_path / "new", meter)
    assert "measuring this CPU for 2 ranks of fp32" in capsys.readouterr().err
    assert kept_or_measured(FACTS, tmp_path / "new", meter) == first
    assert meter.asked == 1 and capsys.readouterr().err == ""
    assert first.update == (2e-4, 2e-9) and first.links["hop"] == (2e-4, 6e-10)
    assert [file.suffix for file in (tmp_path / "new").iterdir()] == [".json"]


@pytest.mark.parametrize("other", [{"version": 2}, {"ranks": 1}, {"precision": "bf16"}])
def test_other_facts_are_measured_for_themselves(tmp_path, other):
    meter = Meter()
    kept_or_measured(FACTS, tmp_path, meter)
    kept_or_measured(FACTS | other, tmp_path, meter)
    assert meter.asked == 2 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "\x00" * 64,
        lambda text: text.replace('"update"', '"updates"'),
        lambda text: text.replace('"version": 1', '"version": 0'),
        lambda text: json.dumps(json.loads(text) | {"attention": []}),
        lambda text: json.dumps(json.loads(text) | {"forward": [1.0]}),
        lambda text: json.dumps(json.loads(text) | {"ranks": 0}),
    ],
)
def test_a_damaged_file_is_measured_again(tmp_path, spoil):
    meter = Meter()
    first = kept_or_measured(FACTS, tmp_path, meter)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(spoil(whole))
    assert kept_or_measured(FACTS, tmp_path, meter) == first
    assert meter.asked == 2 and file.read_text() == whole


def test_a_folder_that_cannot_be_written_is_told_of_and_the_numbers_are_used(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    found = kept_or_measured(FACTS, tmp_path / "file", Meter())
    assert found == Calibration.of(json.loads(FIXED.read_text()))
    assert f"is not kept: {tmp_path / 'file'}" in capsys.readouterr().err


def test_numpys_rates_are_used_where_measuring_fails(tmp_path, capsys, monkeypatch):
    def fail(facts):
        raise RuntimeError("its processes ended with [1]")

    monkeypatch.delenv("MTCLI_CALIBRATION")
    monkeypatch.setattr(calibration, "_folder", lambda: tmp_path)
    monkeypatch.setattr(calibration, "_measure", fail)
    device = for_run(device_named("cpu"), load_config("tiny"), 2)
    said = capsys.readouterr().err
    assert "could not be measured (its processes ended with [1]); numpy's rates are used" in said
    assert device.flops["fp32"] == measure_cpu().flops["fp32"] / 2
    assert device.calibration is None and list(tmp_path.iterdir()) == []


def test_a_process_that_fails_is_no_measurement(monkeypatch):
    monkeypatch.setattr(calibration.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match=r"ended with \[1, 1\]"):
        calibration._measure({"ranks": 2, "cores": 2})


def test_a_named_file_is_taken_and_one_without_numbers_is_an_error(tmp_path, monkeypatch):
    known = calibrated(load_config("tiny"), 2)
    assert known == Calibration.of(json.loads(FIXED.read_text()))
    assert Calibration.of(json.loads(json.dumps(known.as_json()))) == known
    monkeypatch.setenv("MTCLI_CALIBRATION", str(tmp_path / "none.json"))
    with pytest.raises(MtcliError, match=r"none.json holds no calibration"):
        calibrated(load_config("tiny"), 2)


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
    monkeypatch.setattr("mtcli.core.cost.hardware.calibrated", lambda config, world: few)
    cpu, tiny = device_named("cpu"), load_config("tiny")
    rates = {world: for_run(cpu, tiny, world).peak("fp32") for world in (1, 2, 8)}
    assert rates == {1: few.flops, 2: few.flops, 8: few.flops / 4}
    assert for_run(cpu, tiny, 8).memory_bytes == cpu.memory_bytes / 8
