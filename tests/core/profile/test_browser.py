"""The pages in headless Chromium, offline: no error, the JSON's numbers, zoom and hover.

Debian's chromium does (`.ci/run` installs it); playwright brings its own driver and no browser.
"""

import json
import shutil
import time

import pytest
from handmade import ROWS, config_table
from marks import slow

from mtcli.core.config.loading import config_of
from mtcli.core.profile.finished_run import FinishedRun, summary_of
from mtcli.core.profile.render.html import write_profile_page, write_run_page

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (mtcli[test])")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt install chromium)")

PATIENCE = 120_000  # ms: a busy machine draws a page in many times its usual second
VALUES = "name => document.getElementById(name).data.map(t => ({...t}))"


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=PATIENCE
        )
        yield browser
        browser.close()


def opened(browser, path, **options):
    """(the page with its charts drawn, what it complains of or asks the network for)."""
    page, complaints = browser.new_page(offline=True, **options), []

    def asked(request):
        if request.url != path.as_uri() and not request.url.startswith("data:"):
            complaints.append(request.url)

    page.set_default_timeout(PATIENCE)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", asked)
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]")
    return page, complaints


@pytest.fixture
def data(cpu_profile):
    return json.loads(json.dumps(cpu_profile.as_json()))


@pytest.fixture
def drawn(browser, cpu_profile, data, tmp_path):
    path = tmp_path / "report.html"
    write_profile_page(str(path), cpu_profile, data)
    page, complaints = opened(browser, path, viewport={"width": 1200, "height": 900})
    yield page, complaints
    page.close()


def test_a_profile_is_drawn_with_the_numbers_of_its_json_and_can_be_zoomed(drawn, data):
    page, complaints = drawn
    charts = page.locator("[id^=chart-]").count()
    assert charts >= 10 and page.locator("[id^=chart-].js-plotly-plot").count() == charts
    _check_values(page, data)
    _check_zoom(page)
    _check_hover(page)
    assert complaints == []


def _check_values(page, data):
    bars = {
        (row, told[0]): (base, base + width)
        for trace in page.evaluate(VALUES, "chart-pipeline")
        for row, told, base, width in zip(
            trace["y"], trace["customdata"], trace["base"], trace["x"], strict=True
        )
    }
    for row in data["joined_timeline"]:
        name = f"rank {row['rank']}"
        assert bars[f"{name} measured", row["op"]] == pytest.approx((row["start"], row["end"]))
        planned = row["planned_start"], row["planned_end"]
        assert bars[f"{name} planned", row["op"]] == pytest.approx(planned)
    shares = {t["name"]: t["x"] for t in page.evaluate(VALUES, "chart-shares")}
    for kind, told in shares.items():
        rows = [row[kind] for row in data["shares_by_rank"]]
        planned = data["figures"][f"share.{kind}"]["planned"]
        assert told == pytest.approx([100 * share for share in (*rows, planned)])
    assert page.evaluate(VALUES, "chart-steps")[0]["y"] == data["steps"]
    assert page.evaluate(VALUES, "chart-matrix")[0]["z"] == data["communication_matrix_bytes"]
    held = {t["name"]: t["y"] for t in page.evaluate(VALUES, "chart-memory-over-time")}
    for kind, told in held.items():
        found = data["memory_by_kind_over_time"][kind]
        assert told == pytest.approx([bytes_ / 2**20 for bytes_ in found])


def _range(page):
    return page.evaluate("document.getElementById('chart-pipeline').layout.xaxis.range")


def _check_zoom(page):
    """Dragging from a quarter to a half of the time axis leaves that part of it."""
    low, high = _range(page)
    box = page.locator("#chart-pipeline .nsewdrag").first.bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 4, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, y, steps=4)
    page.mouse.up()
    start = "document.getElementById('chart-pipeline').layout.xaxis.range[0]"
    page.wait_for_function(f"{start} > {low}")
    quarter = (high - low) / 4
    assert _range(page) == pytest.approx([low + quarter, low + 2 * quarter], abs=0.02 * high)
    # two clicks are a double one if at most 300 ms lie between them, which a busy machine may miss
    middle = box["x"] + box["width"] / 2, y
    _until(page, lambda: page.mouse.dblclick(*middle), f"{start} <= {low}")


def _check_hover(page):
    """Over an op's bar its name and times are told: here rank 1's first backward."""
    point = page.locator("#chart-pipeline .point", has_text="B0.1").last.bounding_box()
    text = "#chart-pipeline .hoverlayer .hovertext"

    def hover():
        page.mouse.move(point["x"] + point["width"] / 3, point["y"] + point["height"] / 2)
        page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)

    _until(page, hover, f"document.querySelector('{text}') !== null")
    told = page.wait_for_selector(text).text_content()
    assert "B0.1, rank 1" in told and "2,000.000 ms" in told


def _until(page, act, condition):
    """Does something again and again until the page fulfils a condition, which may take a while."""
    end = time.monotonic() + PATIENCE / 1000
    act()
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(1000)
        if not page.evaluate(condition):
            act()


@slow("a second page in Chromium, of some seconds")
def test_a_run_is_drawn_on_a_dark_and_narrow_screen(browser, tmp_path):
    run = FinishedRun(tmp_path / "run", config_of(config_table()), ROWS, 2)
    path, data = tmp_path / "run.html", summary_of(run)
    write_run_page(str(path), run, data)
    screen = {"width": 420, "height": 800}
    page, complaints = opened(browser, path, viewport=screen, color_scheme="dark")
    lines = {t["name"]: (t["x"], t["y"]) for t in page.evaluate(VALUES, "chart-training")}
    curves = {name: (told["steps"], told["values"]) for name, told in data["curves"].items()}
    assert lines == curves
    assert page.evaluate("document.body.scrollWidth") <= screen["width"]
    ink = "getComputedStyle(document.querySelector('#chart-training .ytick text')).fill"
    assert page.evaluate(ink) == "rgb(232, 232, 234)"
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert complaints == []
    page.close()
