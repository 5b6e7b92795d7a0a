"""The pages in headless Chromium, offline: no error, every chart seen, a tip and the slider.

Debian's chromium does (`.ci/run` installs it); playwright brings its own driver and no browser.
"""

import shutil

import pytest
from handmade import ROWS, config_table
from marks import slow
from run_folders import write_run

from mtcli.core.config.loading import config_of
from mtcli.core.profile.finished_run import FinishedRun, summary_of
from mtcli.core.profile.render.html import write_profile_page, write_run_page
from mtcli.core.runs.loss_charts import Look
from mtcli.core.runs.loss_curves import read_curves
from mtcli.core.runs.run_pictures import write_losses_page

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (mtcli[test])")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt install chromium)")

PATIENCE = 120_000  # ms: a busy machine draws a page in many times its usual second


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
    return page, complaints


@pytest.fixture
def drawn(browser, cpu_profile, tmp_path):
    path = tmp_path / "report.html"
    write_profile_page(str(path), cpu_profile, cpu_profile.as_json())
    page, complaints = opened(browser, path, viewport={"width": 1200, "height": 900})
    yield page, complaints
    page.close()


def test_a_profile_s_charts_are_seen_and_the_timeline_can_be_enlarged(drawn):
    page, complaints = drawn
    charts = page.locator("[id^=chart-] svg")
    assert charts.count() >= 10
    for chart in charts.all():
        box = chart.bounding_box()
        assert box["width"] > 1000 and box["height"] > 50
    _check_tip(page)
    before = page.locator("#chart-pipeline svg").bounding_box()["width"]
    page.locator("input[type=range]").fill("800")
    after = page.locator("#chart-pipeline svg").bounding_box()
    assert after["width"] == pytest.approx(8 * before, rel=0.02)
    assert page.evaluate("document.body.scrollWidth") <= 1200  # it scrolls in its own box
    _check_tip(page)
    assert complaints == []


def _check_tip(page):
    """The element under the pointer, over an op's bar, has its name and times: rank 1's first
    backward. A browser shows them after a while."""
    under = """() => {
        const tips = [...document.querySelectorAll("#chart-pipeline title")];
        const bar = tips.find(tip => tip.textContent.startsWith("B0.1, rank 1 measured"));
        bar.parentNode.scrollIntoView({block: "center", inline: "center"});
        const box = bar.parentNode.getBoundingClientRect();
        const [x, y] = [box.x + box.width / 4, box.y + box.height / 2];
        return document.elementFromPoint(x, y).closest("g:has(> title)").textContent.trim();
    }"""
    assert "2.25000 to 4.25000 s: 2,000.000 ms" in page.evaluate(under)


@slow("a second page in Chromium, of some seconds")
def test_a_run_is_drawn_on_a_dark_and_narrow_screen(browser, tmp_path):
    run = FinishedRun(tmp_path / "run", config_of(config_table()), ROWS, 2)
    path, data = tmp_path / "run.html", summary_of(run)
    write_run_page(str(path), run, data)
    screen = {"width": 420, "height": 800}
    page, complaints = opened(browser, path, viewport=screen, color_scheme="dark")
    assert page.evaluate("document.body.scrollWidth") <= screen["width"]
    text = "[...document.querySelectorAll('#chart-training text')]"
    ink = f"getComputedStyle({text}.find(t => t.textContent == 'step')).fill"
    assert page.evaluate(ink) == "rgb(232, 232, 234)"
    page.emulate_media(media="print")
    assert page.evaluate(ink) == "rgb(0, 0, 0)"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert complaints == []
    page.close()


@slow("a third page in Chromium, of some seconds")
def test_the_losses_of_two_runs_are_seen_in_full_over_tokens_and_time(browser, tmp_path):
    folders = [write_run(tmp_path / name, 20, valid_every=5) for name in "ab"]
    path, axes = tmp_path / "losses.html", ["tokens", "time"]
    write_losses_page(str(path), read_curves(folders), axes, Look(["a", "b"]), {})
    page, complaints = opened(browser, path, viewport={"width": 1200, "height": 700})
    for axis in axes:
        box = page.locator(f"#chart-loss-{axis} svg").bounding_box()
        assert box["width"] > 1000 and box["height"] > 300
        frame = f"document.getElementById('chart-loss-{axis}')"
        assert page.evaluate(f"{frame}.scrollHeight - {frame}.clientHeight") == 0, "it is cut off"
        assert "b" in page.locator(f"#chart-loss-{axis} text").all_text_contents()
    assert complaints == []
    page.close()
