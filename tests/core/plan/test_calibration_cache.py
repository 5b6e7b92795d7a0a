"""A machine is measured once per kind of run, by one process at a time, and failures are kept."""

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config
from mtcli.core.plan import calibration as cache
from mtcli.core.plan.calibration import Calibration, calibrated, kept_or_measured
from mtcli.core.plan.hardware import device_named, for_run, measure_cpu
from mtcli.core.runtime.launch import cores

FIXED = Path(__file__).parents[2] / "calibration.json"
FACTS = {"version": 1, "ranks": 2, "precision": "fp32"}
KNOWN = Calibration.of(json.loads(FIXED.read_text()))


class Meter:
    """Says or raises the same each time, and counts how often it is asked."""

    def __init__(self, error=None):
        self.error, self.asked = error, 0

    def __call__(self, facts):
        self.asked += 1
        if self.error:
            raise self.error
        return FIXED.read_text()


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """No other calibration on this machine holds a test up."""
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def files(folder):
    return [file for file in folder.iterdir() if file.is_file()]


def test_what_was_measured_is_kept_and_read_again(folder, capsys):
    meter = Meter()
    assert kept_or_measured(FACTS, [folder], meter) == KNOWN
    said = capsys.readouterr().err
    assert said == (
        "measuring this CPU for 2 ranks of fp32, once: at most 20 s of processor time\n"
    )
    assert kept_or_measured(FACTS, [folder], meter) == KNOWN
    assert meter.asked == 1 and capsys.readouterr().err == ""
    assert [file.suffix for file in files(folder)] == [".json"]


@pytest.mark.parametrize("other", [{"version": 2}, {"ranks": 1}, {"precision": "bf16"}])
def test_other_facts_are_measured_for_themselves(folder, other):
    meter = Meter()
    kept_or_measured(FACTS, [folder], meter)
    kept_or_measured(FACTS | other, [folder], meter)
    assert meter.asked == 2 and len(files(folder)) == 2


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
        lambda text: json.dumps(json.loads(text) | {"failed": {}}),
        lambda text: json.dumps(json.loads(text) | {"failed": {"reason": "", "at": "now"}}),
    ],
)
def test_a_damaged_file_is_measured_again(folder, spoil):
    meter = Meter()
    kept_or_measured(FACTS, [folder], meter)
    (file,) = files(folder)
    whole = file.read_text()
    file.write_text(spoil(whole))
    assert kept_or_measured(FACTS, [folder], meter) == KNOWN
    assert meter.asked == 2 and file.read_text() == whole


def test_a_failure_is_kept_with_its_reason_and_tried_again_after_an_hour(
    folder, capsys, monkeypatch
):
    meter, began = Meter(RuntimeError("no memory")), time.time()
    for _ in range(3):
        assert kept_or_measured(FACTS, [folder], meter) is None
        (file,) = files(folder)
        again = time.strftime(
            "%H:%M", time.localtime(json.loads(file.read_text())["failed"]["at"] + 3600)
        )
        said = capsys.readouterr().err
        assert "this CPU could not be measured (no memory): a roofline takes its place" in said
        assert f"tried again after {again}, or when {file} is deleted" in said
    assert meter.asked == 1
    monkeypatch.setattr(cache.time, "time", lambda: began + 3700)
    meter.error = None
    assert kept_or_measured(FACTS, [folder], meter) == KNOWN and meter.asked == 2


def test_an_interrupted_measurement_is_no_failure(folder):
    with pytest.raises(KeyboardInterrupt):
        kept_or_measured(FACTS, [folder], Meter(KeyboardInterrupt()))
    assert files(folder) == []


def test_the_next_folder_keeps_it_where_the_first_cannot_be_written(tmp_path, folder, capsys):
    (tmp_path / "file").write_text("")
    meter, folders = Meter(), [tmp_path / "file" / "mtcli", folder]
    for _ in range(2):
        assert kept_or_measured(FACTS, folders, meter) == KNOWN
    assert meter.asked == 1 and len(files(folder)) == 1


def test_what_cannot_be_kept_anywhere_is_not_measured(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    places = [tmp_path / "file" / "a", tmp_path / "file" / "b"]
    meter = Meter()
    assert kept_or_measured(FACTS, places, meter) is None and meter.asked == 0
    said = capsys.readouterr().err
    assert f"no calibration can be kept in {places[0]} or {places[1]}: a roofline" in said
    assert "XDG_CACHE_HOME" in said


def test_a_folder_that_others_can_write_is_not_read(tmp_path, monkeypatch):
    """In a place that all users share, anyone may have made the private folder's name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    home, private = cache.cache_folders()
    assert home == tmp_path / "home" / "mtcli"
    assert private.stat().st_mode & 0o777 == 0o700
    private.chmod(0o777)
    assert cache.cache_folders() == [home]
    private.rmdir()
    private.symlink_to(tmp_path)
    assert cache.cache_folders() == [home]
    private.unlink()
    private.mkdir(0o700)
    mine = os.getuid()
    monkeypatch.setattr(cache.os, "getuid", lambda: mine + 1)
    assert cache.cache_folders() == [home]


@pytest.mark.parametrize("home", ["~nobody-of-this-name", "relative"])
def test_a_home_that_is_no_folder_is_not_looked_for_here(home, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    assert all(folder.is_absolute() for folder in cache.cache_folders())


def test_two_that_ask_at_once_measure_once(folder, capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its own lock: other tests measure too
    asked, go, found = threading.Event(), threading.Event(), []

    def slow(facts):
        asked.set()
        assert go.wait(30)
        return FIXED.read_text()

    meter = Meter()
    first = threading.Thread(target=lambda: found.append(kept_or_measured(FACTS, [folder], slow)))
    first.start()
    assert asked.wait(30)
    second = threading.Thread(target=lambda: found.append(kept_or_measured(FACTS, [folder], meter)))
    second.start()
    while "another process measures this CPU" not in capfd.readouterr().err:
        assert second.is_alive()
    go.set()
    first.join(), second.join()
    assert found == [KNOWN, KNOWN] and meter.asked == 0


def test_one_that_waits_in_vain_takes_the_roofline(folder, monkeypatch, capsys):
    monkeypatch.setattr(cache, "PATIENCE", 0.0)
    monkeypatch.setattr(cache, "POLL", 0.0)
    other, meter = cache._lock_file(), Meter()
    fcntl.flock(other, fcntl.LOCK_EX)
    assert kept_or_measured(FACTS, [folder], meter) is None and meter.asked == 0
    assert "another process has measured this CPU for 0 s" in capsys.readouterr().err
    os.close(other)
    assert kept_or_measured(FACTS, [folder], meter) == KNOWN


def test_a_roofline_takes_the_place_of_what_failed_or_was_not_wanted(folder, capsys, monkeypatch):
    monkeypatch.delenv("MTCLI_CALIBRATION")
    monkeypatch.setattr(cache, "cache_folders", lambda: [folder])
    monkeypatch.setattr(cache, "_measure", Meter(RuntimeError("no torch")))
    config = load_config("tiny")
    wanted = for_run(device_named("cpu"), config, 2)
    assert "could not be measured (no torch): a roofline" in capsys.readouterr().err
    unasked = for_run(device_named("cpu"), config, 2, calibrate=False)
    assert capsys.readouterr().err == ""
    for device in (wanted, unasked):
        assert device.flops["fp32"] == measure_cpu().flops["fp32"] / 2
        assert device.calibration is None and device.rates == "roofline"
        assert min(device.memory_bandwidth, device.link.bandwidth) > 1e6


@pytest.mark.parametrize(
    ("code", "errors", "reason"),
    [
        (-signal.SIGPROF, "", "20 s of processor time were not enough"),
        (-signal.SIGKILL, "half a line", "it was killed by SIGKILL"),
        (1, "Traceback:\n  line\nMemoryError: \x1b[31mno room\n\n", "MemoryError: [31mno room"),
        (3, "", "it ended with exit code 3"),
    ],
)
def test_a_failure_says_why(code, errors, reason, monkeypatch):
    done = subprocess.CompletedProcess([], code, "", errors)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError) as error:
        cache._measure({"ranks": 2, "cores": 2})
    assert str(error.value) == reason


def test_a_named_file_is_taken_and_one_without_numbers_is_an_error(tmp_path, monkeypatch):
    assert calibrated(load_config("tiny"), 2) == KNOWN
    monkeypatch.setenv("MTCLI_CALIBRATION", str(tmp_path / "none.json"))
    with pytest.raises(MtcliError, match=r"none.json holds no calibration"):
        calibrated(load_config("tiny"), 2)


HOOK = """
    import os
    fifo = open({fifo!r}, "wb", buffering=0)  # until the process ends, and its forks
    fifo.write(b"x")
    os.register_at_fork(after_in_child=lambda: fifo.write(b"f"))
"""


@pytest.mark.skipif(cores() < 2, reason="two ranks measure on two cores")
def test_a_measurement_ends_with_a_plan_that_was_killed(tmp_path):
    """Every process opens a FIFO when it starts: the test reads its end when all are gone."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(HOOK.format(fifo=fifo)))
    places = {"TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "home")}
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if k != "MTCLI_CALIBRATION"}
    command = [sys.executable, "-m", "mtcli", "plan", "tiny", "--device", "cpu"]
    plan = subprocess.Popen(
        [*command, "--set", "parallel.tp=2"], env=environment | places | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        reading = os.open(fifo, os.O_RDONLY)
        seen = b""
        while b"f" not in seen:  # the plan, the first rank, and its fork
            seen += _read(reading)
        plan.kill()
        plan.wait()
        while (more := _read(reading)) != b"":
            assert more, "a rank lives"
    finally:
        plan.kill()
    assert [path.name for path in (tmp_path / "tmp").glob("mtcli-cpu-*")] == []


def _read(file):
    ready, _, _ = select.select([file], [], [], 60.0)
    assert ready, "nothing came, and nobody left"
    return os.read(file, 64)
