"""The report as a browser shows it; needs Debian's `chromium` and `chromium-driver`, or the same names on the path."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from loadtests.charts import charts
from loadtests.report import html
from loadtests.summary import summary
from tests.loadtests import made_evidence

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER),
        reason="there is no chromium and chromedriver on the path; on Debian: apt-get install chromium chromium-driver",
    ),
]

# Texts whose contrast with the nearest background is below what WCAG 2.2, 1.4.3, asks for.
FAINT = """
const channels = colour => colour.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const paper = element => {
  for (let at = element; at; at = at.parentElement) {
    const found = channels(getComputedStyle(at).backgroundColor);
    if (found.length < 4 || found[3] > 0) return found;
  }
  return [255, 255, 255];
};
const texts = [...document.body.querySelectorAll("*")].filter(
  element => [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()));
return [texts.length, texts.map(element => {
  const [low, high] = [channels(getComputedStyle(element).color), paper(element)].map(luminance).sort((a, b) => a - b);
  return [(high + 0.05) / (low + 0.05), element.textContent.slice(0, 40)];
}).filter(([ratio]) => ratio < 4.5)];
"""

Open = Callable[..., Chrome]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    whole = made_evidence.compared({"eager": 450.0, "fused": 950.0}, rounds=2)
    whole.runs = [replace(run, server_gpu=0.5) for run in whole.runs]
    whole.runs[4] = replace(whole.runs[4], invalid="the generator was late")
    hostile = made_evidence.hostile()
    documents = {"whole": whole, "hostile": replace(hostile, runs=hostile.runs[:1]), "empty": made_evidence.empty()}
    paths = {name: tmp_path_factory.mktemp(name) / "alone.html" for name in documents}
    for name, evidence in documents.items():
        paths[name].write_text(html(evidence, charts(evidence)))
    return paths


@pytest.fixture
def open_(browser: Chrome, pages: dict[str, Path]) -> Open:
    def show(name: str, scheme: str = "light", width: int = 1280) -> Chrome:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get("about:blank")
        for kind in ("browser", "performance"):
            browser.get_log(kind)  # type: ignore[no-untyped-call]  # what came before is of no interest
        browser.get(pages[name].as_uri())
        evaluate(browser, "document.querySelectorAll('details').forEach(each => each.open = true)")
        return browser

    return show


def evaluate(browser: Chrome, script: str) -> Any:
    return browser.execute_script(script)


@pytest.mark.parametrize("name", ["whole", "hostile", "empty"])
def test_the_page_loads_without_an_error_and_asks_for_nothing(open_: Open, pages: dict[str, Path], name: str) -> None:
    browser = open_(name)
    assert browser.get_log("browser") == []  # type: ignore[no-untyped-call]
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]  # type: ignore[no-untyped-call]
    asked = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
    assert pages[name].as_uri() in asked
    assert [address[:80] for address in asked if not address.startswith(("data:", pages[name].as_uri()))] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_picture_is_there_and_told_in_words(open_: Open, scheme: str) -> None:
    pictures = evaluate(
        open_("whole", scheme),
        "return [...document.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.alt])",
    )
    assert len(pictures) == 13
    assert [each for each in pictures if not (each[0] and each[1] > 100 and each[2] > 100 and len(each[3]) > 40)] == []


def test_pictures_follow_the_scheme(open_: Open) -> None:
    sources = "return [...document.images].map(image => image.currentSrc)"
    light, dark = (evaluate(open_("whole", scheme), sources) for scheme in ("light", "dark"))
    assert [one for one, other in zip(light, dark, strict=True) if one == other] == []


@pytest.mark.parametrize("name", ["whole", "hostile", "empty"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_needs_no_scrolling_sideways(open_: Open, name: str, width: int) -> None:
    browser = open_(name, width=width)
    root = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth, innerWidth]"
    needed, shown, whole = evaluate(browser, root)
    assert (needed, whole) == (shown, width)


def test_the_sentences_are_read_first(open_: Open) -> None:
    browser = open_("hostile")
    hostile = made_evidence.hostile()
    shown = evaluate(browser, "return [...document.querySelectorAll('.summary p')].map(each => each.textContent)")
    assert shown == list(summary(replace(hostile, runs=hostile.runs[:1])))
    assert evaluate(browser, "return document.querySelector('#ended-early').textContent").count("<script>") == 1
    top = "return document.querySelector('.summary').getBoundingClientRect().bottom"
    assert evaluate(open_("whole"), top) < 900


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["whole", "hostile"])
def test_every_text_stands_out(open_: Open, name: str, scheme: str) -> None:
    browser = open_(name, scheme)
    count, faint = evaluate(browser, FAINT)
    assert count > 50
    assert faint == []
    background = evaluate(browser, "return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]


def test_wide_tables_can_be_reached_with_the_keyboard(open_: Open) -> None:
    regions = evaluate(
        open_("whole", width=390),
        "return [...document.querySelectorAll('.scroll')].map(each => [each.tabIndex, each.getAttribute('aria-label'), "
        "each.scrollWidth > each.clientWidth])",
    )
    assert regions == [
        [0, "What each backend holds", True],
        [0, "Every load, over the rounds", True],
        [0, "Every run", True],
    ]
