"""Finished runs: read from their folders, summed up, drawn."""

import json
import math

import pytest
from handmade import config_table

from mtcli.core.config.errors import MtcliError
from mtcli.core.config.loading import config_of, dump_toml
from mtcli.core.profile.finished_run import is_run, planned_of, read_run, summary_of
from mtcli.core.profile.render.html import write_run_page


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "config.toml").write_text(dump_toml(config_of(config_table())))
    (tmp_path / "run.json").write_text('{"world": 2}\n')
    write_steps(tmp_path, 5)
    return tmp_path


def write_steps(folder, count):
    rows = [
        {
            "step": step,
            "consumed_samples": 2 * step,
            "loss": 4.0 / step,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "step_seconds": float(step),
            "tokens_per_second": 100.0 * step,
            "mfu": 0.1 * step,
        }
        for step in range(1, count + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_is_a_folder_with_metrics(run_folder):
    assert is_run(str(run_folder))
    assert not is_run(str(run_folder / "config.toml"))
    assert not is_run("tiny")


def test_a_summary_has_medians_and_the_first_and_last_loss(run_folder):
    data = summary_of(read_run(str(run_folder)))
    assert data["step_seconds"] == {"min": 1.0, "median": 3.0, "max": 5.0}
    assert data["tokens_per_second"] == 300.0
    assert data["mfu"] == pytest.approx(0.3)
    assert data["loss"] == {"first": 4.0, "last": 0.8, "min": 0.8}
    assert data["world"] == 2


def test_steps_that_were_not_finite_take_no_part_in_the_losses(run_folder, tmp_path):
    path = run_folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0] |= {"loss": None, "grad_norm": None}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(str(run_folder))
    assert math.isnan(run.rows[0]["loss"]) and math.isnan(run.rows[0]["grad_norm"])
    assert summary_of(run)["loss"] == {"first": 2.0, "last": 0.8, "min": 0.8}
    path.write_text(json.dumps(rows[0]) + "\n")
    assert "loss" not in summary_of(read_run(str(run_folder)))


def test_the_line_that_a_killed_run_left_half_written_is_left_out(run_folder):
    with (run_folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert len(read_run(str(run_folder)).rows) == 5


def test_events_are_read_in_order_without_one_that_was_cut_short(run_folder):
    assert read_run(str(run_folder)).events == []
    event = {"event": "saved", "step": 2, "stall_seconds": 0.5}
    (run_folder / "events.jsonl").write_text(json.dumps(event) + '\n{"event": "sav')
    assert read_run(str(run_folder)).events == [event]


@pytest.mark.parametrize(
    "key, value",
    [("step", None), ("step", 2**63), ("step_seconds", "Infinity"), ("loss", [1.0])],
    ids=str,
)
def test_a_damaged_line_is_named(run_folder, key, value):
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    damaged = json.dumps(json.loads(lines[1]) | {key: value}).replace('"Infinity"', "Infinity")
    path.write_text("\n".join([lines[0], damaged, *lines[2:]]))
    with pytest.raises(MtcliError, match=r"metrics\.jsonl:2 is no record of a step"):
        read_run(str(run_folder))


def test_a_run_without_steps_says_how_to_measure_its_config(run_folder):
    (run_folder / "metrics.jsonl").write_text("")
    with pytest.raises(MtcliError, match="holds no steps") as caught:
        read_run(str(run_folder))
    assert "config.toml" in str(caught.value)


def test_the_planned_timeline_of_a_run_lasts_its_step(run_folder):
    timeline = planned_of(read_run(str(run_folder)), 6.0)
    assert timeline.end == pytest.approx(6.0)
    assert timeline.bubble_fraction == pytest.approx(0.5)  # (p - 1) / m of 1F1B


def test_what_happened_besides_steps_is_read_from_the_events(run_folder):
    lines = [
        {"event": "saved", "step": 2, "stall_seconds": 0.1, "write_seconds": 1.0, "bytes": 8},
        {"event": "save_failed", "step": 3, "reason": "No space left", "last_good": None},
        {"event": "resumed", "step": 4},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"event": "sa'
    (run_folder / "events.jsonl").write_text(text)
    data = summary_of(read_run(str(run_folder)))
    assert [save["stall_seconds"] for save in data["saves"]] == [0.1]
    assert [save["reason"] for save in data["saves_failed"]] == ["No space left"]
    assert data["resumed_at"] == [4]


def test_steps_run_twice_count_once(run_folder):
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, *lines[3:]]) + "\n")
    data = summary_of(read_run(str(run_folder)))
    assert data["steps"] == 5 and data["resumed_at"] == [4]
    assert data["tokens"] == 5 * 2 * 8


def test_the_page_of_a_long_run_is_below_five_megabytes(run_folder):
    write_steps(run_folder, 20_000)
    run = read_run(str(run_folder))
    write_run_page(str(run_folder / "run.html"), run, summary_of(run))
    assert (run_folder / "run.html").stat().st_size < 5_000_000
    text = (run_folder / "run.html").read_text()
    assert "Of 20,000 steps the lowest and highest of each stretch are drawn." in text


def test_a_run_that_did_not_say_its_world_has_none(run_folder):
    (run_folder / "run.json").unlink()
    assert read_run(str(run_folder)).world is None
