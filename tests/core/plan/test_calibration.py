"""A machine's rates are measured once per kind of run, and ranks beyond its cores share them."""

import json
import os
import select
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import load_config
from mtcli.core.plan import calibration as cache
from mtcli.core.plan import hardware
from mtcli.core.plan.calibration import Calibration, calibrated, facts_of, kept_or_measured
from mtcli.core.plan.hardware import device_named, for_run, quick_rates

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


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def files(folder):
    return [file for file in folder.iterdir() if file.is_file()]


def test_what_was_measured_is_kept_and_read_again(folder, capsys):
    meter = Meter()
    assert kept_or_measured(FACTS, [folder], meter) == KNOWN
    said = capsys.readouterr().err
    assert said == "measuring this CPU for 2 ranks of fp32, once: it takes seconds\n"
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
        lambda text: text.replace('"call"', '"calls"'),
        lambda text: text.replace('"version": 1', '"version": 0'),
        lambda text: json.dumps(json.loads(text) | {"flops": 0.0}),
        lambda text: json.dumps(json.loads(text) | {"call": "slow"}),
        lambda text: json.dumps(json.loads(text) | {"element": float("inf")}),
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


def test_a_failure_says_why_and_is_tried_again(folder, capsys):
    meter = Meter(RuntimeError("no memory"))
    assert kept_or_measured(FACTS, [folder], meter) is None
    said = capsys.readouterr().err
    assert "this CPU could not be measured (no memory): a roofline takes its place" in said
    meter.error = None
    assert kept_or_measured(FACTS, [folder], meter) == KNOWN and meter.asked == 2


def test_the_next_folder_keeps_it_where_the_first_cannot_be_written(tmp_path, folder, capsys):
    (tmp_path / "file").write_text("")
    meter, folders = Meter(), [tmp_path / "file" / "mtcli", folder]
    for _ in range(2):
        assert kept_or_measured(FACTS, folders, meter) == KNOWN
    assert meter.asked == 1 and len(files(folder)) == 1


def test_what_cannot_be_kept_anywhere_is_measured_each_time(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    places, meter = [tmp_path / "file" / "a", tmp_path / "file" / "b"], Meter()
    for _ in range(2):
        assert kept_or_measured(FACTS, places, meter) == KNOWN
        said = capsys.readouterr().err
        assert f"no calibration can be kept in {places[0]} or {places[1]}; XDG_CACHE" in said
    assert meter.asked == 2


def test_a_folder_that_others_can_write_is_not_read(tmp_path, monkeypatch):
    """In a place that all users share, anyone may have made the private folder's name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
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


def test_a_roofline_takes_the_place_of_what_failed_or_was_not_wanted(folder, capsys, monkeypatch):
    monkeypatch.delenv("MTCLI_CALIBRATION")
    monkeypatch.setattr(cache, "cache_folders", lambda: [folder])
    monkeypatch.setattr(cache, "_measure", Meter(RuntimeError("no torch")))
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    config = load_config("tiny")
    wanted = for_run(device_named("cpu"), config, 2)
    assert "could not be measured (no torch): a roofline" in capsys.readouterr().err
    unasked = for_run(device_named("cpu"), config, 2, calibrate=False)
    assert capsys.readouterr().err == ""
    for device in (wanted, unasked):
        assert device.flops["fp32"] == quick_rates(2).flops and device.rates == "roofline"
        assert min(device.memory_bandwidth, device.link.bandwidth) > 1e6


@pytest.mark.parametrize(
    ("code", "errors", "reason"),
    [
        (1, "Traceback:\n  line\nMemoryError: \x1b[31mno room\n\n", "MemoryError: [31mno room"),
        (3, "", "it ended with exit code 3"),
    ],
)
def test_the_reason_is_the_last_word_of_what_failed(code, errors, reason, monkeypatch):
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


def test_rates_are_kept_apart_by_what_they_depend_on():
    tiny = load_config("tiny")
    alone = facts_of(tiny, 1)
    assert alone["torch"].startswith("2.") and alone["ranks"] == 1
    assert facts_of(tiny, 10**6)["ranks"] == alone["cores"]
    assert facts_of(load_config("tiny", ["train.precision=bf16"]), 1) != alone
    for name in ("model.activation=gelu", "batch.seq_len=128", "optimizer.name=lamb"):
        assert facts_of(load_config("tiny", [name]), 1) == alone, name


def test_ranks_beyond_the_cores_share_them(monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    cpu, tiny = device_named("cpu"), load_config("tiny")
    few, many = (for_run(cpu, tiny, world) for world in (2, 8))
    assert (few.peak("fp32"), few.crowd, many.crowd) == (KNOWN.flops, 1, 4)
    for name in ("memory_bandwidth", "memory_bytes"):
        assert getattr(many, name) == getattr(few, name) / 4
    assert many.peak("fp32") == few.peak("fp32") / 4
    assert many.link.bandwidth == few.link.bandwidth / 4
    assert many.link.latency == 4 * few.link.latency
    assert many.physics.call == 4 * KNOWN.call and many.physics.element == 4 * KNOWN.element


def test_a_core_sends_no_more_over_a_network_than_it_can(monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    tiny = load_config("tiny")
    slow, quick = (
        for_run(device_named(f"cpu,network=ethernet-{rate},node=1"), tiny, 4).network.bandwidth
        for rate in (1, 100)
    )
    assert slow == 1.25e8 and quick == 2.5e9 / 2.3 / 2  # two ranks on a core


HOOK = """
    import sys, time, timeit
    fifo = open({fifo!r}, "wb", buffering=0)  # until the process ends
    fifo.write(b"x")
    if "mtcli.core.plan.measure_cpu" in sys.orig_argv:  # which does not end by itself
        timeit.timeit = lambda *_, **__: time.sleep(600)
"""


def test_the_process_that_measures_ends_with_a_plan_that_was_killed(tmp_path):
    """Every process opens a FIFO when it starts: the test reads its end when all are gone."""
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(HOOK.format(fifo=fifo)))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {k: v for k, v in os.environ.items() if k != "MTCLI_CALIBRATION"}
    environment |= {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "mtcli", "plan", "tiny", "--device", "cpu"]
    plan = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        reading = os.open(fifo, os.O_RDONLY)
        seen = b""
        while seen.count(b"x") < 2:  # the plan, and what it has started
            seen += _read(reading)
        plan.kill()
        plan.wait()
        while (more := _read(reading)) != b"":
            assert more, "a process lives"
    finally:
        plan.kill()


def _read(file):
    ready, _, _ = select.select([file], [], [], 120.0)
    assert ready, "nothing came, and nobody left"
    return os.read(file, 64)
