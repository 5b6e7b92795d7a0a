"""The HTML pages and the pictures: whole, offline, and holding the numbers of the JSON."""

import json
import re
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest
from handmade import ROWS, config_table

from mtcli.core.config.loading import config_of
from mtcli.core.profile.finished_run import FinishedRun, summary_of
from mtcli.core.profile.render.drawing import BLUE, INK
from mtcli.core.profile.render.html import write_profile_page, write_run_page
from mtcli.core.profile.render.pictures import save_profile, save_run


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


def charts(text):
    """{name: the SVG element of a chart}, each of which is whole."""
    found = re.findall(r"id='chart-([\w-]+)'>(<svg.*?</svg>)", text, re.DOTALL)
    for _, element in found:
        ElementTree.fromstring(element)
    return dict(found)


def tips(element):
    return [unescape(tip) for tip in re.findall(r"<title>(.*?)</title>", element, re.DOTALL)]


def test_a_page_fetches_nothing_and_needs_no_script(page):
    assert not re.search(r"(src|href)=(?!['\"]?(data:|#))", page)
    assert not re.search(r"@import|url\((?!['\"]?(data:|#))", page)
    (script,) = re.findall(r"<script[^>]*>", page)
    assert script == "<script type='application/json' id='mtcli-data'>"
    assert len(page) < 200_000


def test_a_page_draws_what_the_json_holds(cpu_profile, tmp_path):
    data = cpu_profile.as_json()
    write_profile_page(str(tmp_path / "a.html"), cpu_profile, data)
    drawn = charts((tmp_path / "a.html").read_text())
    expected = set()
    for row in data["joined_timeline"]:
        for name, start, end in (
            ("measured", row["start"], row["end"]),
            ("planned", row["planned_start"], row["planned_end"]),
        ):
            times = f"{start:.5f} to {end:.5f} s: {1e3 * (end - start):,.3f} ms"
            expected.add(f"{row['op']}, rank {row['rank']} {name}\n{times}")
    assert set(tips(drawn["pipeline"])) == expected and len(expected) == 16
    shares = tips(drawn["shares"])
    for row in data["shares_by_rank"]:
        for kind in data["shares"]:
            assert f"{kind} {100 * row[kind]:,.2f} %\nrank {row['pp_rank']}" in shares
    planned = data["figures"]["share.bubble"]["planned"]
    assert f"bubble {100 * planned:,.2f} %\nplanned, mean" in shares
    assert tips(drawn["steps"])[0] == f"step 1: {data['steps'][0]:.4f} s"
    process = data["memory_bytes"]["process"] / 2**20
    assert f"measured {process:,.2f} MiB" in tips(drawn["memory"])
    sent = data["communication_matrix_bytes"][1][0]
    assert any(tip.startswith(f"from 1 to 0: {sent:,} bytes\n") for tip in tips(drawn["matrix"]))


def test_charts_have_the_reader_s_colour_and_font_and_ids_of_their_own(page):
    drawn = charts(page)
    assert len(drawn) >= 10
    for element in drawn.values():
        assert INK not in element and "currentColor" in element and "DejaVu" not in element
        assert "<a " not in element and "tip:" not in element
    ids = [name for element in drawn.values() for name in re.findall(r' id="([^"]*)"', element)]
    assert len(ids) == len(set(ids))
    for element in drawn.values():  # what is referred to is there
        used = re.findall(r'(?:href="|url\()#([^")]*)', element)
        assert used and all(f'id="{name}"' in element for name in used)


def test_a_page_holds_the_figures_of_the_json_and_the_config(page, profile):
    assert embedded(page, "mtcli-data") == json.loads(json.dumps(profile.as_json()))
    assert "hidden_size = 16" in page


def test_the_headline_is_a_table_above_all_charts(page):
    head = page[: page.index("id='chart-")]
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
    assert "<td>saves</td><td>1, training waited 0.250 s in all" in text
    assert "took up again at step 2;" in text
    words = ["training waited 0.250 seconds\n2", "written in 1.500 seconds\n2"]
    assert tips(charts(text)["saves"]) == words


def test_a_run_of_unknown_world_leaves_out_what_needs_it(run, tmp_path):
    text = run_page(run._replace(world=None), tmp_path)
    assert "<h2>Training" in text and "<h2>Layout" not in text


def test_a_loss_that_is_not_a_number_is_a_gap(run, tmp_path):
    rows = [ROWS[0] | {"loss": float("nan")}, *ROWS[1:]]
    text = run_page(run._replace(rows=rows), tmp_path)
    assert embedded(text, "mtcli-data")["curves"]["loss"]["values"] == [None, 3.0, 2.0]
    assert "training" in charts(text)


def test_markup_in_a_kernel_s_name_stays_text(profile, tmp_path):
    data = profile.as_json()
    data["kernels"] = [{"name": "copy<$x$, </svg><b>", "seconds": 1.0, "calls": 1}]
    write_profile_page(str(tmp_path / "a.html"), profile, data)
    element = charts((tmp_path / "a.html").read_text())["kernels"]
    assert "copy&lt;$x$, &lt;/svg&gt;&lt;b&gt;" in element


@pytest.fixture
def pictures(profile, cpu_profile, run, tmp_path):
    def written(suffix):
        save_profile(str(tmp_path / f"unplanned.{suffix}"), profile)
        save_profile(str(tmp_path / f"planned.{suffix}"), cpu_profile)
        save_run(str(tmp_path / f"run.{suffix}"), summary_of(run))
        return {path.stem: path for path in tmp_path.glob(f"*.{suffix}")}

    return written


def test_pictures_hold_their_charts(pictures):
    texts = {name: path.read_text() for name, path in pictures("svg").items()}
    assert len(tips(texts["planned"])) == 16 + 14 and len(tips(texts["unplanned"])) == 8 + 14
    for text in ("where the step goes", "memory of rank 1", "measured 58.3%", "planned "):
        assert text in texts["planned"]
    assert "planned" not in texts["unplanned"]
    for text in ("loss", "gradient norm", "tokens/s", "MFU (%)", "validation loss"):
        assert f">{text}</text>" in texts["run"]


def test_pictures_of_pixels_and_pages_of_print_are_drawn(pictures):
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    for path in pictures("png").values():
        pixels = imread(path)[:, :, :3]
        blue = np.abs(pixels - np.array(to_rgb(BLUE))).max(axis=2) < 0.02
        assert pixels.shape[1] == 1650 and blue.sum() > 100, path
        assert (pixels[0, 0] == 1.0).all()
    pdf = pictures("pdf")["planned"].read_bytes()
    assert pdf.startswith(b"%PDF") and b"tip:" not in pdf
