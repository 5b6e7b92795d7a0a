"""Loss curves: read over every axis, smoothed without a lag, drawn with a name for every run."""

import json
import math
from itertools import pairwise

import pytest
from drawn import axes_of
from run_folders import SECONDS, TOKENS, loss_at, write_run

from mtcli.core.config.errors import MtcliError
from mtcli.core.runs.loss_charts import Look, count_words, loss_chart
from mtcli.core.runs.loss_curves import read_curves, smoothed
from mtcli.core.runs.run_pictures import names_of
from mtcli.core.runs.sparkline import sparkline


@pytest.fixture
def curves(tmp_path):
    return read_curves([write_run(tmp_path / "a", 20, valid_every=5)])


def test_a_curve_has_its_steps_tokens_and_seconds(curves):
    (run,) = curves
    steps = list(range(1, 21))
    assert run.along("steps") == steps and run.losses == [loss_at(step) for step in steps]
    assert run.along("tokens") == [TOKENS * step for step in steps]
    assert run.along("time") == [SECONDS * step for step in steps]
    assert run.valid == {step - 1: 1.1 * loss_at(step) for step in (5, 10, 15, 20)}
    data = run.as_json()
    assert data["loss"] == run.losses and data["tokens"][-1] == 640
    assert data["valid"][0] == {"step": 5, "tokens": 160, "seconds": 2.5, "loss": 1.1 * loss_at(5)}


def test_of_a_step_that_was_run_again_the_last_row_counts(tmp_path):
    folder = write_run(tmp_path / "a", 4)
    again = {"step": 3, "loss": 9.0, "tokens": 7, "step_seconds": 2.0}
    null = {"step": 5, "loss": None, "tokens": 1, "step_seconds": 1.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n" + json.dumps(null) + "\n{cut")
    (run,) = read_curves([folder])
    assert run.steps == [1, 2, 3, 4, 5] and run.losses[2] == 9.0 and math.isnan(run.losses[4])
    assert run.tokens == [32, 64, 71, 103, 104]
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(MtcliError, match="has made no step"):
        read_curves([folder])


def test_smoothing_is_the_mean_of_neighbours():
    line = [3.0 * index for index in range(40)]
    found = smoothed(line, 11)
    assert found[:-5] == pytest.approx(line[:-5], abs=1e-12), "a line stays where it is"
    assert found[-1] == pytest.approx(sum(line[-6:]) / 6)
    assert smoothed([1.0, math.nan, 4.0, 1.0, 1.0], 3) == [1.0, 2.5, 2.5, 2.0, 1.0]
    assert math.isnan(smoothed([math.nan], 3)[0])
    values = [float(index % 7) for index in range(200)]
    assert smoothed(values, 1) == values
    assert smoothed(values)[100] == pytest.approx(sum(values[98:103]) / 5), "a 50th: 4 steps"


def test_every_run_is_named_and_every_step_is_lightly_behind(curves, tmp_path):
    other = read_curves([write_run(tmp_path / "b", 30)])
    chart = loss_chart([*curves, *other], "tokens", Look(["a", "b"], 5))
    axes = axes_of(chart)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    raw, means, valid, other_raw, _ = axes.lines
    assert list(raw.get_ydata()) == curves[0].losses and raw.get_alpha() < 0.5
    assert list(means.get_ydata()) == smoothed(curves[0].losses, 5) and means.get_alpha() is None
    assert list(means.get_xdata()) == curves[0].tokens and means.get_color() == raw.get_color()
    assert list(valid.get_xdata()) == [160, 320, 480, 640] and valid.get_color() == raw.get_color()
    assert other_raw.get_color() != raw.get_color()
    assert axes.get_xlabel() == "tokens" and axes.get_ylabel() == "loss; dots: validation"


def test_a_hundred_trials_all_have_a_name_and_no_two_look_alike_next_to_each_other(curves):
    names = [f"trial {number}" for number in range(100)]
    chart = loss_chart(curves * 100, "steps", Look(names))
    axes = axes_of(chart)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == names
    assert chart.height > 100 * 0.17
    looks = [
        (line.get_color(), line.get_linestyle()) for line in axes.lines if line.get_label() in names
    ]
    assert len(looks) == 100 and len(set(looks[:28])) == 28
    assert all(a[1] != b[1] for a, b in pairwise(looks)), "equal curves hide each other"


def test_what_is_above_the_start_leaves_the_picture(curves):
    (run,) = curves
    high = run._replace(losses=[*run.losses[:-1], 1e6])
    low, top = axes_of(loss_chart([high], "steps", Look(["a"]))).get_ylim()
    assert 4.0 < top < 4.6 and 0.5 < low < loss_at(19)


@pytest.mark.parametrize(
    ("seconds", "unit", "last"),
    [(50.0, "seconds", 50), (600.0, "minutes", 10), (9e3, "hours", 2.5)],
)
def test_time_has_the_unit_of_its_length(curves, seconds, unit, last):
    run = curves[0]._replace(seconds=[seconds * step / 20 for step in range(1, 21)])
    axes = axes_of(loss_chart([run], "time", Look(["a"])))
    assert axes.get_xlabel() == f"{unit} of training steps"
    assert axes.lines[0].get_xdata()[-1] == pytest.approx(last)


def test_counts_and_names_are_short(tmp_path):
    counts = (0, 999, 1500, 2e6, 1e9, 1.5e13)
    assert [count_words(count) for count in counts] == ["0", "999", "1.5K", "2M", "1B", "15T"]
    folders = [tmp_path / "x" / "a", tmp_path / "x" / "sweep" / "b"]
    assert names_of(folders) == ["a", "sweep/b"] and names_of(folders[:1]) == ["a"]


def test_a_line_of_text_falls_as_its_curve_does():
    assert sparkline([7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0], 8) == "█▇▆▅▄▃▂▁"
    assert sparkline([3.0, math.nan, math.nan, 1.0], 4) == "█  ▁"
    assert sparkline([100.0, 1.0, 0.0], 3, top=1.0) == "██▁"
    assert sparkline([5.0] * 9, 3) == "▁▁▁" and sparkline([math.nan], 5) == " "
    assert sparkline([9.0, 7.0, 1.0, 1.0], 2) == "█▁"
