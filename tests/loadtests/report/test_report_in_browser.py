"""The report as a browser shows it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loadtests.report.charts import charts
from loadtests.report.page import html
from loadtests.report.summary import summary
from tests.browser import FAINT, NEEDS_CHROMIUM, Browser
from tests.loadtests import made_evidence

pytestmark = [pytest.mark.slow, NEEDS_CHROMIUM]

Open = Callable[..., Browser]


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
def open_(browser: Browser, pages: dict[str, Path]) -> Open:
    def show(name: str, scheme: str = "light", width: int = 1280) -> Browser:
        browser.open(pages[name].as_uri(), scheme, width)
        browser.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        return browser

    return show


@pytest.mark.parametrize("name", ["whole", "hostile", "empty"])
def test_the_page_loads_without_an_error_and_asks_for_nothing(open_: Open, pages: dict[str, Path], name: str) -> None:
    browser = open_(name)
    assert browser.console() == []
    asked = browser.addresses()
    assert pages[name].as_uri() in asked
    assert [address[:80] for address in asked if not address.startswith(("data:", pages[name].as_uri()))] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_picture_is_there_and_told_in_words(open_: Open, scheme: str) -> None:
    pictures = open_("whole", scheme).evaluate(
        "return [...document.images].map(i => [i.complete, i.naturalWidth, i.naturalHeight, i.alt])",
    )
    assert len(pictures) == 13
    assert [each for each in pictures if not (each[0] and each[1] > 100 and each[2] > 100 and len(each[3]) > 40)] == []


def test_pictures_follow_the_scheme(open_: Open) -> None:
    sources = "return [...document.images].map(image => image.currentSrc)"
    light, dark = (open_("whole", scheme).evaluate(sources) for scheme in ("light", "dark"))
    assert [one for one, other in zip(light, dark, strict=True) if one == other] == []


@pytest.mark.parametrize("name", ["whole", "hostile", "empty"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_needs_no_scrolling_sideways(open_: Open, name: str, width: int) -> None:
    browser = open_(name, width=width)
    needed, shown, whole = browser.widths()
    assert (needed, whole) == (shown, width)


def test_the_sentences_are_read_first(open_: Open) -> None:
    browser = open_("hostile")
    hostile = made_evidence.hostile()
    shown = browser.evaluate("return [...document.querySelectorAll('.summary p')].map(each => each.textContent)")
    assert shown == list(summary(replace(hostile, runs=hostile.runs[:1])))
    assert browser.evaluate("return document.querySelector('#ended-early').textContent").count("<script>") == 1
    top = "return document.querySelector('.summary').getBoundingClientRect().bottom"
    assert open_("whole").evaluate(top) < 900


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["whole", "hostile"])
def test_every_text_stands_out(open_: Open, name: str, scheme: str) -> None:
    browser = open_(name, scheme)
    count, faint = browser.evaluate(FAINT)
    assert count > 50
    assert faint == []
    background = browser.evaluate("return getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 28)"}[scheme]


def test_wide_tables_can_be_reached_with_the_keyboard(open_: Open) -> None:
    regions = open_("whole", width=390).evaluate(
        "return [...document.querySelectorAll('.scroll')].map(each => [each.tabIndex, each.getAttribute('aria-label'), "
        "each.scrollWidth > each.clientWidth])",
    )
    assert regions == [
        [0, "What each backend holds", True],
        [0, "Every load, over the rounds", True],
        [0, "Every run", True],
    ]
