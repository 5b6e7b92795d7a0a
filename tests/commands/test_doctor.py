"""`mtcli doctor`, end to end: the table, the JSON, the exit codes, and ranks of launchers."""

import json

import pytest
from command_line import in_process, launched

from mtcli.core.doctor.diagnosis import broken, ok, warn

CHECKS = "mtcli.core.doctor.checks.checks"


@pytest.fixture
def plant(monkeypatch):
    """Plants diagnoses in place of all checks."""

    def planted(**diagnoses):
        found = {name: (lambda one=one: one) for name, one in diagnoses.items()}
        monkeypatch.setattr(CHECKS, lambda nproc, device: found)

    return planted


FINE, SLOW = ok("3 of 4", cores=3), warn("1 left", "add [one]", room=1)
GONE = broken("none", "sudo mend it")


def test_each_line_is_fine_or_has_what_mends_it(plant):
    plant(memory=FINE, disk=SLOW, clock=GONE)
    done = in_process("doctor")
    assert done.stdout.splitlines() == [
        "ok      memory  3 of 4",
        "warn    disk    1 left",
        "                -> add [one]",
        "broken  clock   none",
        "                -> sudo mend it",
        "1 ok, 1 warn, 1 broken",
    ]
    assert done.returncode == 1 and "3 checks" in done.stderr


def test_a_warning_is_no_failure(plant):
    plant(memory=FINE, disk=SLOW)
    assert in_process("doctor").returncode == 0


def test_json_has_every_check_and_the_broken_ones_as_problems(plant, tmp_path):
    plant(memory=FINE, disk=SLOW, clock=GONE)
    done = in_process("doctor", "--json", "-")
    data = json.loads(done.stdout)
    assert done.returncode == 1 and not data["ok"]
    assert data["problems"] == [{"field": "clock", "message": "none", "hint": "sudo mend it"}]
    assert data["checks"] == [
        {"name": "memory", "state": "ok", "found": "3 of 4", "numbers": {"cores": 3}, "fix": ""},
        {"name": "disk", "state": "warn", "found": "1 left", "numbers": {"room": 1},
         "fix": "add [one]"},
        {"name": "clock", "state": "broken", "found": "none", "numbers": {}, "fix": "sudo mend it"},
    ]  # fmt: skip
    file = tmp_path / "doctor.json"
    done = in_process("doctor", "--json", file, "--only", "disk")
    assert done.returncode == 0 and done.stdout.startswith("warn  disk")
    data = json.loads(file.read_text())
    assert data["ok"] and [one["name"] for one in data["checks"]] == ["disk"]


def test_an_unknown_check_is_refused_with_the_nearest():
    done = in_process("doctor", "--only", "disc", "--only", "disk", "--only", "x")
    assert done.returncode == 2 and done.stderr.count("there is no check") == 2
    assert "--only: there is no check 'disc'" in done.stderr
    assert "did you mean 'disk'?" in done.stderr


def test_this_machine_s_ranks_exchange_and_what_is_broken_is_told():
    done = launched("doctor", "--only", "exchange", "--only", "open-files", "--json", "-")
    data = json.loads(done.stdout)
    assert [one["name"] for one in data["checks"]] == ["open-files", "exchange"], done.stderr
    exchange = data["checks"][1]
    assert exchange["state"] == "ok" and exchange["numbers"]["ranks"] == 2, exchange
    assert exchange["numbers"]["transport"] == "shared memory" and done.returncode == 0
    words = ("doctor", "--only", "exchange", "--only", "interfaces")
    done = launched(*words, GLOO_SOCKET_IFNAME="none0")
    assert done.returncode == 1 and done.stdout.count("broken ") == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_ranks_of_a_launcher_check_how_they_reach_each_other():
    done = launched("doctor", "--only", "exchange", "--nproc", "3")
    assert done.returncode == 0 and done.stdout.count("ok  exchange  3 ranks by shared") == 1
    done = launched("doctor", "--only", "exchange", "--nproc", "2", "--device", "cuda")
    assert done.returncode == 2 and "there is no CUDA device here" in done.stderr
