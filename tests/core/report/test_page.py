"""The HTML page and the pictures: whole, offline, and holding the numbers of the JSON."""

import json
import re
import shutil
import subprocess

import pytest
from handmade import config_table

from mtcli.core.report.charts import curves, gantt, layout_map, memory_bars, stacked_shares
from mtcli.core.report.finished import FinishedRun
from mtcli.core.report.page import write_profile_page, write_run_page
from mtcli.core.report.plots import save_profile, save_run
from mtcli.core.spec.layout import ParallelLayout
from mtcli.core.spec.load import config_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PNG = b"\x89PNG\r\n"
ROWS = [
    {
        "step": step,
        "loss": 5.0 - step,
        "grad_norm": 1.0,
        "step_seconds": 2.0,
        "tokens_per_second": 8.0,
        "mfu": 0.25,
        "valid_loss": 5.5 - step,
    }
    for step in (1, 2, 3)
]


@pytest.fixture
def page(profile, tmp_path):
    path = tmp_path / "report.html"
    write_profile_page(str(path), profile, profile.as_json())
    return path


@pytest.fixture
def run(tmp_path):
    return FinishedRun(tmp_path / "run", config_of(config_table()), ROWS, 2)


def test_a_page_fetches_nothing(page):
    text = page.read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=(?!['\"]?data:)", text)
    assert len(text) > 3_000_000  # plotly itself is inside


def test_a_page_holds_the_figures_of_the_json_and_the_config(page, profile):
    text = page.read_text()
    found = re.search(r"id='mtcli-data'>(.*)</script>", text).group(1)
    assert json.loads(found) == json.loads(json.dumps(profile.as_json()))
    assert "hidden_size = 16" in text


def test_markup_in_a_config_stays_text(profile, tmp_path):
    table = config_table() | {"train": {"output": "</script><b>runs</b>"}}
    profile = type(profile)(config_of(table), 2, "", profile.records)
    write_profile_page(str(tmp_path / "a.html"), profile, profile.as_json())
    assert "<b>runs</b>" not in (tmp_path / "a.html").read_text()


def test_markup_in_a_folders_name_stays_text(run, tmp_path):
    write_run_page(str(tmp_path / "a.html"), run._replace(folder="</script><b>runs</b>"))
    assert "</script><b>" not in (tmp_path / "a.html").read_text()


def test_the_gantt_has_planned_over_measured_for_each_rank(profile):
    figure = gantt({"planned": profile.planned, "measured": profile.measured})
    rows = ["rank 0 planned", "rank 0 measured", "rank 1 planned", "rank 1 measured"]
    assert list(figure.layout.yaxis.categoryarray) == rows[::-1]
    bars = {
        (row, data[0]): (start, start + width)
        for trace in figure.data
        for row, data, start, width in zip(
            trace.y, trace.customdata, trace.base, trace.x, strict=True
        )
    }
    assert bars["rank 1 measured", "B0.1"] == pytest.approx((2.25, 4.25))
    assert bars["rank 1 planned", "B0.1"] == pytest.approx((2.0, 4.0))
    assert len(bars) == 16


def test_bars_hold_the_shares_and_bytes_they_are_given(profile):
    data = profile.as_json()
    shares = stacked_shares(data["shares_by_rank"], tuple(data["shares"]))
    assert sum(trace.x[0] for trace in shares.data) == pytest.approx(100.0)
    memory = memory_bars([{"label": "a", "weights": 3 * 2**20}], ("weights", "gradients"))
    assert [trace.y[0] for trace in memory.data] == [3.0, 0.0]


def test_every_rank_is_on_the_map_once():
    text = str(layout_map(ParallelLayout(8, tp=2, pp=2)).data[0].text)
    assert [text.count(f"rank {rank}<") for rank in range(8)] == [1] * 8
    assert "rank 6<br>dp1 cp0 tp0" in text


def test_the_curves_of_a_run_are_its_rows():
    lines = {trace.name: list(trace.y) for trace in curves(ROWS).data}
    assert lines["loss"] == [4.0, 3.0, 2.0]
    assert lines["validation loss"] == [4.5, 3.5, 2.5]
    assert lines["MFU (%)"] == [25.0, 25.0, 25.0]


def test_a_runs_page_has_its_curves_schedule_and_state(run, tmp_path):
    write_run_page(str(tmp_path / "run.html"), run)
    text = (tmp_path / "run.html").read_text()
    for heading in ("Training", "Pipeline: the schedule", "Memory of weights", "Layout", "Config"):
        assert f"<h2>{heading}" in text


def test_a_run_of_unknown_world_leaves_out_what_needs_it(run, tmp_path):
    write_run_page(str(tmp_path / "run.html"), run._replace(world=None))
    text = (tmp_path / "run.html").read_text()
    assert "<h2>Training" in text and "<h2>Layout" not in text


def test_pictures_are_pictures(profile, run, tmp_path):
    save_profile(str(tmp_path / "a.png"), profile)
    save_run(str(tmp_path / "b.png"), run)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert (tmp_path / "b.png").read_bytes().startswith(PNG)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
def test_a_browser_draws_every_chart_without_an_error(page):
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    flags += ["--enable-logging=stderr", "--v=0", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *flags, page.as_uri()], capture_output=True, text=True, timeout=60
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    drawn = done.stdout.count('class="main-svg"')
    assert drawn >= 7, f"{drawn} drawings for 7 charts"
    assert done.stdout.count('class="point"') >= 16, "a bar for each op, planned and measured"
