"""The HTML pages and the pictures: whole, offline, and holding the numbers of the JSON."""

import base64
import gzip
import json
import re

import pytest
from handmade import ROWS, config_table

from mtcli.core.config.loading import config_of
from mtcli.core.profile.finished_run import FinishedRun, summary_of
from mtcli.core.profile.render.html import write_profile_page, write_run_page
from mtcli.core.profile.render.pictures import save_profile, save_run

PNG = b"\x89PNG\r\n"


@pytest.fixture
def page(profile, tmp_path):
    path = tmp_path / "report.html"
    write_profile_page(str(path), profile, profile.as_json())
    return path.read_text()


@pytest.fixture
def run(tmp_path):
    return FinishedRun(tmp_path / "run", config_of(config_table()), ROWS, 2)


def run_page(run, tmp_path):
    write_run_page(str(tmp_path / "run.html"), run, summary_of(run))
    return (tmp_path / "run.html").read_text()


def embedded(text, name):
    return json.loads(re.search(rf"id='{name}'>(.*?)</script>", text).group(1))


def test_a_page_fetches_nothing(page):
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=(?!['\"]?data:)", page)
    assert not re.search(r"@import|url\((?!['\"]?data:)", page.split("id='plotly'")[0])
    packed = re.findall(r"id='plotly'>([^<]*)<", page)
    assert len(packed) == 1 and b"Plotly" in gzip.decompress(base64.b64decode(packed[0]))


def test_a_page_holds_the_figures_of_the_json_and_the_config(page, profile):
    assert embedded(page, "mtcli-data") == json.loads(json.dumps(profile.as_json()))
    assert "hidden_size = 16" in page


def test_the_headline_is_a_table_above_all_charts(page):
    head = page[: page.index("<div id='chart-")]
    assert "<td>step time</td><td>12 s (12 to 12 s)</td>" in head


def test_markup_in_a_config_stays_text(profile, tmp_path):
    table = config_table() | {"train": {"output": "</script><b>runs</b>"}}
    profile = type(profile)(config_of(table), 2, "", profile.records)
    write_profile_page(str(tmp_path / "a.html"), profile, profile.as_json())
    assert "<b>runs</b>" not in (tmp_path / "a.html").read_text()


def test_markup_in_a_folders_name_stays_text(run, tmp_path):
    assert "</script><b>" not in run_page(run._replace(folder="</script><b>runs</b>"), tmp_path)


def test_a_runs_page_has_its_curves_schedule_state_and_layout(run, tmp_path):
    text = run_page(run, tmp_path)
    for heading in ("Training", "Pipeline: the schedule", "Memory of weights", "Layout", "Config"):
        assert f"<h2>{heading}" in text
    assert "<h2>Saves" not in text


def test_a_runs_page_shows_its_saves_and_where_it_took_up_again(run, tmp_path):
    save = {"event": "saved", "step": 2, "stall_seconds": 0.25, "write_seconds": 1.5}
    text = run_page(run._replace(events=[save], resumed=[2]), tmp_path)
    assert "<td>saves</td><td>1, training stood still 0.250 s in all" in text
    assert "took up again at step 2;" in text
    bars = embedded(text, "mtcli-charts")["chart-saves"]["data"]
    assert [bar["y"] for bar in bars] == [[0.25], [1.5]]


def test_a_run_of_unknown_world_leaves_out_what_needs_it(run, tmp_path):
    text = run_page(run._replace(world=None), tmp_path)
    assert "<h2>Training" in text and "<h2>Layout" not in text


def test_a_loss_that_is_not_a_number_is_a_gap(run, tmp_path):
    rows = [ROWS[0] | {"loss": float("nan")}, *ROWS[1:]]
    charts = embedded(run_page(run._replace(rows=rows), tmp_path), "mtcli-charts")
    loss = next(line for line in charts["chart-training"]["data"] if line["name"] == "loss")
    assert loss["y"] == [None, 3.0, 2.0]


def test_pictures_are_pictures(profile, cpu_profile, run, tmp_path):
    save_profile(str(tmp_path / "unplanned.png"), profile)
    save_profile(str(tmp_path / "a.png"), cpu_profile)
    save_run(str(tmp_path / "b.png"), summary_of(run))
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert (tmp_path / "b.png").read_bytes().startswith(PNG)
    assert (tmp_path / "unplanned.png").read_bytes().startswith(PNG)
    assert len(list(tmp_path.iterdir())) == 3
