"""`mtcli calibrate` on this CPU, end to end: measured, written, and read by plan."""

import json

import pytest
from ranks import run_ranks

from mtcli.core.profile.device_rates import measure_device


def run(capsys, *arguments):
    from mtcli.__main__ import run as run_command

    code = int(run_command([*arguments]))
    return code, capsys.readouterr()


def _measured(runtime):
    return measure_device(runtime, "fp32")


def test_a_plan_takes_the_rates_that_were_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("mtcli.core.plan.measure_cpu.SECONDS", 0.02)
    file = str(tmp_path / "cpu.json")
    code, said = run(capsys, "calibrate", "--device", "cpu", "--output", file)
    assert code == 0 and f"wrote {file}" in said.err and "GEMMs" in said.out
    found = json.loads((tmp_path / "cpu.json").read_text())
    assert found["device"] == "cpu" and found["ranks"] == 1 and found["collectives"] == []
    flops = max(2 * m * n * k / seconds for m, n, k, seconds in found["gemms"])
    assert (
        1e9 < flops < 1e13 and 1e8 < found["copy"] < 1e12 and 1e8 < found["attention"] < flops * 2
    )

    plan = ["plan", "tiny", "--device", "cpu", "--json", "-"]
    measured = json.loads(run(capsys, *plan, "--calibration", file)[1].out)
    same = {"flops": flops, "memory_bandwidth": found["copy"]}
    same |= {name: found[name] for name in ("element", "call", "socket", "widens")}
    (tmp_path / "known.json").write_text(json.dumps(same))
    monkeypatch.setenv("MTCLI_CALIBRATION", str(tmp_path / "known.json"))
    known = json.loads(run(capsys, *plan)[1].out)
    assert measured["device_rates"] == "calibration"
    assert measured["step_seconds"] == pytest.approx(known["step_seconds"], rel=1e-12)


def test_two_ranks_measure_their_collectives_by_size():
    first, second = run_ranks(2, _measured)
    assert first["ranks"] == 2 and first["nodes"] == 1
    kinds = {(kind, moved) for kind, moved, _ in first["collectives"]}
    assert len(kinds) == 9 and {kind for kind, _ in kinds} == {
        "all_reduce", "all_gather", "reduce_scatter",
    }  # fmt: skip
    assert first["collectives"] == second["collectives"], "the slowest rank's on every rank"
    assert all(1e-6 < seconds < 10 for *_, seconds in first["collectives"])
