"""The page at `/`, as a browser shows it and as it answers to mouse and keyboard."""

import json
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select
from sklearn.datasets import load_digits

from service import page
from tests.browser import FAINT, NEEDS_CHROMIUM, WAIT_S, Browser
from tests.service.running_server import PlantedServer, RunningServer, Start

pytestmark = pytest.mark.slow  # real servers

LABELS = ["<script>window.hit = 1</script>", '<img src="x" onerror="window.hit = 1">', "\"'>&amp;<b>bold</b>"]
KEY = "hush-hush clé"
TEXT = "document.getElementById(arguments[0]).textContent"
CELLS = "[...document.querySelectorAll('#cells [role=gridcell]')].map(each => Number(each.dataset.value))"


@pytest.fixture
def locked(tmp_path: Path, start: Start) -> RunningServer:
    """A server with a key, whose labels are made to be read as HTML."""
    config: dict[str, Any] = {
        "name": "hostile",
        "in_features": 64,
        "out_features": 3,
        "dim": 8,
        "hidden": 16,
        "depth": 1,
        "ffn": {"gated": False, "activation": "relu", "bias": False},
        "norm": {"kind": "rms", "position": "pre", "eps": 1e-6},
        "labels": LABELS,
        "init": {"seed": 0},
    }
    directory = tmp_path / "hostile"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return start("--model", str(directory), "--backends", "eager", MLP_API_KEY=KEY).wait_ready()


@pytest.fixture
def shown(browser: Browser, server: RunningServer) -> Browser:
    return opened(browser, server)


def opened(browser: Browser, server: RunningServer, **window: Any) -> Browser:
    """The page, once it has read the server."""
    browser.open(server.url + "/", **window)
    browser.wait("document.documentElement.dataset.read")
    return browser


def click(browser: Browser, selector: str) -> None:
    browser.driver.find_element(By.CSS_SELECTOR, selector).click()


def choose(browser: Browser, identity: str, value: str) -> None:
    Select(browser.driver.find_element(By.ID, identity)).select_by_value(value)


def fill(browser: Browser, identity: str, text: str) -> None:
    field = browser.driver.find_element(By.ID, identity)
    field.clear()
    field.send_keys(text)


def text(browser: Browser, identity: str) -> str:
    return str(browser.evaluate(f"return {TEXT}", identity))


def press(browser: Browser, *keys: str) -> None:
    ActionChains(browser.driver, duration=0).send_keys(*keys).perform()


def focused(browser: Browser) -> str:
    return str(
        browser.evaluate("return document.activeElement.id || document.activeElement.getAttribute('role') || ''")
    )


def answer(browser: Browser, send: Callable[[], None]) -> str:
    """What the page says of a request that `send` makes it send."""
    browser.evaluate("document.getElementById('answer').textContent = ''")
    send()
    return str(browser.wait(TEXT, "answer"))


def send(browser: Browser) -> str:
    return answer(browser, lambda: click(browser, "#send"))


def send_sample(browser: Browser) -> str:
    click(browser, "#sample")
    return send(browser)


def table(browser: Browser, label: str) -> list[list[str]]:
    """The texts of a table's cells, by rows, the head first."""
    rows: list[list[str]] = browser.evaluate(
        "return [...document.querySelector(`[aria-label='${arguments[0]}'] table`).rows]"
        ".map(row => [...row.cells].map(cell => cell.textContent))",
        label,
    )
    return rows


def arc(x: float, y: float, width: float, height: float, start: int, end: int) -> list[tuple[float, float]]:
    """Points on an ellipse, by angles in degrees, clockwise from the right."""
    angles = np.radians(np.linspace(start, end, 25))
    return [(x + width * math.cos(angle), y + height * math.sin(angle)) for angle in angles]


DRAWINGS: dict[str, list[list[tuple[float, float]]]] = {
    "0": [arc(0.5, 0.5, 0.22, 0.35, -90, 270)],
    "1": [[(0.5, 0.15), (0.5, 0.85)]],
    "2": [[*arc(0.5, 0.32, 0.2, 0.17, -170, 20), (0.3, 0.83), (0.72, 0.83)]],
    "4": [[(0.5, 0.15), (0.28, 0.6), (0.75, 0.6)], [(0.6, 0.4), (0.6, 0.87)]],
    "5": [[(0.7, 0.16), (0.35, 0.16), (0.33, 0.45), *arc(0.48, 0.63, 0.22, 0.21, -120, 140)]],
    "7": [[(0.3, 0.17), (0.7, 0.17), (0.45, 0.85)], [(0.38, 0.5), (0.66, 0.5)]],
}


def test_the_pages_files_come_with_a_policy_that_lets_them_ask_nobody_else(client: httpx.Client) -> None:
    for path in sorted(page.PATHS):
        reply = client.get(path)
        kind = {"css": "text/css", "js": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
        assert reply.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'"
        assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert "http" not in reply.text.replace("http://www.w3.org/2000/svg", "").replace(
            "https://doi.org/10.24432", ""
        )
    for path in ("/static/nope.js", "/static/index.html", "/static/..%2fpage.py", "/static/%2e%2e/page.py"):
        missing = client.get(path)
        assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


def test_the_model_is_told(client: httpx.Client) -> None:
    model = client.get("/model").json()
    assert (model["name"], model["width_in"], model["width_out"], model["depth"]) == ("digits", 64, 10, 2)
    assert model["labels"] == list("0123456789")
    assert (model["max_request_rows"], model["parameters"]) == (1024, 78666)


@NEEDS_CHROMIUM
def test_the_page_loads_without_an_error_and_asks_no_other_host(shown: Browser, server: RunningServer) -> None:
    send_sample(shown)
    shown.wait("document.querySelector('#figures tr')")
    assert shown.console() == []
    asked = shown.addresses()
    assert f"{server.url}/static/page.js" in asked
    assert [each for each in asked if not each.startswith((f"{server.url}/", "data:,"))] == []


@NEEDS_CHROMIUM
def test_the_model_and_the_state_of_each_backend_are_shown(shown: Browser, client: httpx.Client) -> None:
    assert text(shown, "model").startswith("digits: 64 numbers in, 10 out; 2 blocks of dim 64, hidden 192, gated silu;")
    rows = table(shown, "State of each backend")[1:]
    states = client.get("/backend").json()
    for (name, implementation, state, more), (backend, told) in zip(rows, states["backends"].items(), strict=True):
        assert name.removesuffix(" (default)") == backend
        assert name.endswith("(default)") == (backend == states["default"])
        assert (implementation, state) == (told["implementation"], told["state"])
        assert more == (told["note"] or "")


@NEEDS_CHROMIUM
def test_a_digit_that_is_drawn_is_read(shown: Browser) -> None:
    for label, strokes in DRAWINGS.items():
        click(shown, "#clear")
        for points in strokes:
            shown.drag("pad", points)
        assert f": “{label}”, probability " in send(shown)
    click(shown, "#clear")
    assert shown.evaluate(f"return {CELLS}") == [0] * 64


@NEEDS_CHROMIUM
def test_nothing_drawn_is_not_sent_and_the_sample_is_read_as_a_zero(shown: Browser) -> None:
    hint = "There is no digit yet: draw one, or take the sample."
    assert send(shown) == hint
    assert ": “0”, probability " in send_sample(shown)
    click(shown, "#clear")
    assert send(shown) == hint
    assert shown.evaluate("return document.querySelectorAll('#results table').length") == 0
    assert sum(each.endswith("/predict") for each in shown.addresses()) == 1


@NEEDS_CHROMIUM
def test_a_digit_fills_the_pixels_however_small_and_wherever_it_is_drawn(shown: Browser) -> None:
    cells = []
    for scale, left, top in ((1.0, 0.0, 0.0), (0.5, 0.4, 0.1)):
        click(shown, "#clear")
        shown.drag("pad", [(left + scale * x, top + scale * y) for x, y in DRAWINGS["0"][0]])
        cells.append(np.array(shown.evaluate(f"return {CELLS}")).reshape(8, 8))
    assert np.abs(cells[0] - cells[1]).max() <= 3
    for image in cells:
        assert (image.min(), image.max()) == (0, 16)
        assert image[[0, -1]].sum(axis=1).min() > 16  # the top and the bottom row


@NEEDS_CHROMIUM
def test_the_keyboard_alone_draws_a_digit_and_sends_it(shown: Browser, client: httpx.Client) -> None:
    digits = load_digits()
    inked = [np.where(row >= 8, 16, 0) for row in digits.data[:40]]
    labels = client.post("/predict", json={"inputs": [row.tolist() for row in inked]}).json()["labels"]
    chosen = next(row for row in range(40) if labels[row] == str(digits.target[row]))
    for _ in range(30):
        press(shown, Keys.TAB)
        if focused(shown) == "gridcell":
            break
    assert focused(shown) == "gridcell"
    for row in inked[chosen].reshape(8, 8):
        keys = [key for value in row for key in ((" ", Keys.ARROW_RIGHT) if value else (Keys.ARROW_RIGHT,))]
        press(shown, *keys, Keys.HOME, Keys.ARROW_DOWN)
    assert shown.evaluate(f"return {CELLS}") == inked[chosen].tolist()
    assert f": “{digits.target[chosen]}”, probability " in answer(shown, lambda: press(shown, Keys.ENTER))
    press(shown, Keys.HOME, "+", "+", "-")
    cell = "return document.activeElement.getAttribute('aria-label')"
    value = int(inked[chosen][56])
    assert shown.evaluate(cell) == f"row 8, column 1: {min(16, value + 8) - 4} of 16"
    while focused(shown) != "send":
        press(shown, Keys.TAB)
    assert "probability" in answer(shown, lambda: press(shown, " "))
    assert focused(shown) == "send"


@NEEDS_CHROMIUM
def test_tab_reaches_everything_and_leaves_again(shown: Browser) -> None:
    visited = []
    for _ in range(60):
        press(shown, Keys.TAB)
        name = shown.evaluate(
            "const at = document.activeElement; return at === document.body ? 'body' "
            ": at.id || at.getAttribute('aria-label') || at.textContent"
        )
        if name in visited:
            break
        visited.append(name)
        outline = "const style = getComputedStyle(document.activeElement); return style.outlineStyle"
        assert name == "body" or shown.evaluate(outline) != "none", name
    reached = [
        "default",
        "Switch",
        "clear",
        "sample",
        "backend",
        "send",
        "pause",
        "profile-rows",
        "Profile every backend",
    ]
    assert [name for name in visited if name in reached] == reached


@NEEDS_CHROMIUM
def test_the_time_of_a_request_is_split_and_adds_up(shown: Browser) -> None:
    choose(shown, "backend", "fused")
    assert send_sample(shown).startswith("fused (")
    head, row = table(shown, "Where the time went")
    assert head == ["backend", "queue", "batch", "compute", "encode", "wire", "whole"]
    units = {"µs": 1.0, "ms": 1e3, "s": 1e6}
    *parts, whole = [float(number) * units[unit] for number, unit in map(str.split, row[1:])]
    assert sum(parts) == pytest.approx(whole, rel=0.02, abs=5)
    shares = shown.evaluate(
        "return [...document.querySelectorAll('#timing .bar span')].map(each => parseFloat(each.style.width))"
    )
    assert shares == pytest.approx([100 * part / whole for part in parts], abs=3)
    outputs = table(shown, "Outputs")
    assert outputs[0] == ["label", "fused: probability", "fused: score"]
    assert [cells[0] for cells in outputs[1:]] == list("0123456789")
    assert sum(float(cells[1].removesuffix("%")) for cells in outputs[1:]) == pytest.approx(100, abs=0.6)


@NEEDS_CHROMIUM
def test_all_backends_answer_side_by_side_with_their_differences(shown: Browser) -> None:
    shown.drag("pad", DRAWINGS["0"][0])
    choose(shown, "backend", "*")
    assert send(shown).startswith("All 3 backends say “0”; furthest from eager: ")
    names = ["eager", "compiled", "fused"]
    differences = table(shown, "Differences from eager")
    assert [row[0] for row in differences[1:]] == names
    assert differences[1][2] == "the reference"
    assert float(differences[3][2]) < 1e-4
    assert [row[0] for row in table(shown, "Where the time went")[1:]] == names
    assert len(table(shown, "Outputs")[0]) == 7


@NEEDS_CHROMIUM
def test_random_rows_are_told_by_their_seed(shown: Browser, server: RunningServer) -> None:
    click(shown, "input[value=random]")
    tables = []
    for seed in ("7", "8", "7"):
        fill(shown, "count", "3")
        fill(shown, "seed", seed)
        assert ": 3 rows, labelled after " in send(shown)
        tables.append(table(shown, "Outputs"))
    assert tables[0] == tables[2] != tables[1]
    assert [row[0] for row in tables[0]] == ["row", "row 1", "row 2", "row 3"]


@NEEDS_CHROMIUM
def test_an_error_is_shown_as_its_sentence(shown: Browser) -> None:
    click(shown, "input[value=random]")
    shown.evaluate("document.getElementById('count').max = 5000")
    fill(shown, "count", "1025")
    assert send(shown) == "inputs: expected at most 1024 rows in one request, got 1025 (413 too_large)"
    shown.evaluate("document.getElementById('backend').options[1].value = 'quantum'")
    choose(shown, "backend", "quantum")
    fill(shown, "count", "1")
    assert "quantum" in send(shown)
    assert shown.evaluate("return document.getElementById('answer').className") == "error"


@NEEDS_CHROMIUM
def test_the_default_backend_is_switched(shown: Browser, client: httpx.Client) -> None:
    try:
        for name, default in (("eager", "eager"), ("auto", "fused")):
            choose(shown, "default", name)
            click(shown, "#default-form button")
            shown.wait("document.getElementById('states').textContent.includes(arguments[0])", f"{default} (default)")
            shown.wait(f"{TEXT}.includes(arguments[1])", "default-outcome", f"requests that name none go to {default}")
            assert client.get("/backend").json()["is_auto"] == (name == "auto")
            choose(shown, "backend", "")
            assert send_sample(shown).startswith(f"{default} (")
    finally:
        client.put("/backend", json={"default": "auto"})


@NEEDS_CHROMIUM
def test_a_backend_that_was_taken_out_is_put_back_by_its_button_as_the_canary_that_it_was(
    browser: Browser, tmp_path: Path, tiny_model: Path
) -> None:
    flags = ("--model", str(tiny_model), "--backends", "eager,fused", "--default-backend", "eager")
    server = PlantedServer(tmp_path, *flags, "--canary", "fused=0.25")
    try:
        opened(browser, server.wait_ready())
        assert browser.evaluate("return document.querySelectorAll('.put-back').length") == 0
        server.plant("fault")
        assert server.post("/predict/fused", json={"inputs": [0.5] * 8}).status_code == 500
        browser.wait("document.querySelector('.put-back')")
        fused = table(browser, "State of each backend")[2]
        assert fused[2] == "unavailable"
        assert "an illegal memory access" in fused[3]
        assert "; canary: takes, once it is ready, 25% of the requests that name no backend" in fused[3]
        assert fused[3].endswith(" Put fused back")
        assert browser.violations() == []
        server.plant("")
        browser.evaluate("document.querySelector('.put-back').focus()")
        press(browser, Keys.ENTER)
        browser.wait(f"{TEXT}.startsWith('Put fused back: requests that name none go to eager')", "default-outcome")
        assert table(browser, "State of each backend")[2][1:3] == ["onednn", "ready"]
        assert focused(browser) == "backends-title"
        told = server.get("/backend").json()
        assert (told["default"], told["canary"], told["backends"]["fused"]["state"]) == (
            "eager",
            {"fused": 0.25},
            "ready",
        )

        server.plant("fault")
        assert server.post("/predict/fused", json={"inputs": [0.5] * 8}).status_code == 500
        browser.wait("document.querySelector('.put-back')")
        button = browser.driver.find_element(By.CSS_SELECTOR, ".put-back")
        server.stop()
        button.click()
        browser.wait(f"{TEXT}.startsWith('the server does not answer')", "default-outcome")
    finally:
        server.end()


@NEEDS_CHROMIUM
def test_the_chart_moves_with_the_servers_counters(shown: Browser, client: httpx.Client) -> None:
    shown.wait("document.querySelector('#figures tr')")
    done = threading.Event()

    def load() -> None:
        with httpx.Client(base_url=str(client.base_url), timeout=60) as own:
            while not done.wait(0.02):
                own.post("/predict/eager", json={"inputs": [0.5] * 64})

    thread = threading.Thread(target=load)
    thread.start()
    try:
        eager = "document.querySelector('#figures tr').cells"
        shown.wait(f"parseFloat({eager}[1].textContent) > 0 && {eager}[3].textContent !== 'none'")
        shown.wait("document.querySelectorAll('#chart-p99 .line-0').length")
        told = shown.evaluate("return document.querySelector('#chart-rate svg').getAttribute('aria-label')")
        assert told.startswith("Requests per second, now: eager ")
        so_far = f"Number({eager}[5].textContent.replaceAll(',', ''))"
        before = shown.evaluate(f"return {so_far}")
        shown.wait(f"{so_far} > {before}")
        click(shown, "#pause")
        assert shown.wait(TEXT, "live-state") == "Paused."
        shown.wait("performance.getEntriesByType('resource').at(-1).responseEnd < performance.now() - 100")
        shown.addresses()
        shown.wait("performance.now() > arguments[0]", shown.evaluate("return performance.now()") + 2500)
        assert [each for each in shown.addresses() if each.endswith("/metrics")] == []
        click(shown, "#pause")
        shown.wait(f"{so_far} > {before} && !document.getElementById('live-state').textContent")
    finally:
        done.set()
        thread.join()


@NEEDS_CHROMIUM
def test_a_page_that_nobody_sees_asks_nothing(shown: Browser) -> None:
    shown.wait("document.querySelector('#figures tr')")
    shown.evaluate(
        "window.changes = [];"
        "document.addEventListener('visibilitychange', () => changes.push(performance.now()), true)"  # before the page
    )
    seen = shown.driver.current_window_handle
    shown.driver.switch_to.new_window("tab")
    shown.wait("performance.now() > arguments[0]", 2500 + shown.evaluate("return performance.now()"))
    shown.driver.close()
    shown.driver.switch_to.window(seen)
    shown.wait("changes.length === 2")
    asked = "performance.getEntriesByType('resource').map(each => each.startTime)"
    assert shown.evaluate(f"return {asked}.filter(each => changes[0] < each && each < changes[1])") == []
    shown.wait(f"{asked}.some(each => each >= changes[1])")


@NEEDS_CHROMIUM
def test_percentiles_lie_within_their_buckets(shown: Browser) -> None:
    script = """
    const done = arguments[0];
    import("/static/counters.js").then(({ quantile, samples }) => done([
      quantile(0.5, [], [[1, 0], [2, 10], [Infinity, 10]]),
      quantile(0.75, [[1, 4], [2, 4], [4, 4], [Infinity, 4]], [[1, 6], [2, 6], [4, 8], [Infinity, 8]]),
      quantile(0.99, [], [[1, 0], [2, 0], [Infinity, 5]]),
      quantile(0.5, [[1, 3], [Infinity, 3]], [[1, 3], [Infinity, 3]]),
      samples('# HELP a b\\na_bucket{backend="x",le="+Inf"} 3.0\\nb 1e+06\\n'),
    ]));
    """
    *quantiles, samples = shown.driver.execute_async_script(script)
    assert quantiles == [1.5, 3.0, 2.0, None]
    assert samples == [
        {"name": "a_bucket", "labels": {"backend": "x", "le": "+Inf"}, "value": 3},
        {"name": "b", "labels": {}, "value": 1e6},
    ]


@NEEDS_CHROMIUM
def test_the_profiles_stand_beside_each_other_and_their_traces_can_be_kept(shown: Browser, tmp_path: Path) -> None:
    shown.command("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path), eventsEnabled=False)
    fill(shown, "profile-rows", "16")
    click(shown, "#profile-form button")
    shown.wait("document.querySelectorAll('#profiles article button').length === 3")
    shown.wait(f"{TEXT}.startsWith('eager: ')", "profile-outcome")
    assert "; fused: " in text(shown, "profile-outcome")
    titles = shown.evaluate("return [...document.querySelectorAll('#profiles h3')].map(each => each.textContent)")
    assert [title.split()[0] for title in titles] == ["eager", "compiled", "fused"]
    operators = table(shown, "Operators of eager")
    assert operators[0] == ["name", "count", "time", "bytes"]
    assert any("aten::linear" in row[0] for row in operators)
    assert table(shown, "Operators of fused")
    click(shown, "#profiles article:nth-child(3) button")
    shown.wait("document.querySelector('#profiles article:nth-child(3) output').textContent")
    trace = tmp_path / "fused-trace.json"
    limit = time.monotonic() + WAIT_S
    while not trace.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    assert json.loads(trace.read_text())["traceEvents"]


@NEEDS_CHROMIUM
def test_a_key_is_asked_for_and_goes_into_no_address(browser: Browser, locked: RunningServer) -> None:
    browser.open(locked.url + "/")
    browser.wait("!document.getElementById('key').hidden")
    assert browser.evaluate("return document.activeElement.id") == "key-field"
    assert browser.violations() == []
    assert "hostile" not in browser.evaluate("return document.documentElement.outerHTML")
    assert "X-API-Key" not in text(browser, "model")
    for given, is_right in (("wrong", False), (KEY, True)):
        press(browser, given, Keys.ENTER)
        if is_right:
            browser.wait("document.activeElement.id === 'backends-title'")  # who has a keyboard alone is not lost
        else:
            assert browser.wait(TEXT, "key-reason") == "That is not this server's key."
            browser.wait("document.activeElement.id === 'key-field'")
    assert browser.evaluate("return document.getElementById('key').hidden")
    assert text(browser, "model").startswith("hostile: ")
    browser.wait("document.querySelector('#figures tr')")
    choose(browser, "default", "eager")
    click(browser, "#default-form button")
    assert browser.wait(TEXT, "default-outcome").startswith("Switched: ")
    assert [each for each in browser.addresses() if "hush" in each] == []
    assert browser.evaluate("return [localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    wrong = [each for each in browser.console() if "401" not in each["message"]]
    assert wrong == []
    # On the same page: a label is text, whatever it looks like.
    assert any(f"“{label}”" in send_sample(browser) for label in LABELS)
    assert sorted(row[0] for row in table(browser, "Outputs")[1:]) == sorted(LABELS)
    assert browser.evaluate("return [window.hit ?? null, document.querySelectorAll('main img, main b').length]") == [
        None,
        0,
    ]


ROUTES = "return [...document.querySelectorAll('#routes a')].map(link => link.href)"


@NEEDS_CHROMIUM
def test_the_routes_are_linked_where_no_key_is_asked_for(shown: Browser, server: RunningServer) -> None:
    links = shown.evaluate(ROUTES)
    assert links == [server.url + path for path in ("/docs", "/openapi.json", "/metrics")]
    assert {httpx.get(link, timeout=60).status_code for link in links} == {200}
    assert shown.evaluate("return document.getElementById('routes-reason').hidden")


@NEEDS_CHROMIUM
def test_where_a_key_is_asked_for_no_link_leads_to_a_refusal_and_the_page_says_why(
    browser: Browser, locked: RunningServer
) -> None:
    browser.open(locked.url + "/")
    browser.wait("!document.getElementById('key').hidden")
    press(browser, KEY, Keys.ENTER)
    browser.wait("document.documentElement.dataset.read")
    assert browser.evaluate(ROUTES) == [""] * 3
    click(browser, "#routes a")
    assert browser.driver.current_url == locked.url + "/"
    assert not browser.evaluate("return document.getElementById('routes-reason').hidden")
    count, faint = browser.evaluate(FAINT)
    assert (count > 40, faint) == (True, [])
    command = text(browser, "routes-command")
    assert command == f"curl -H 'X-API-Key: …' {locked.url}/metrics"
    assert httpx.get(command.split()[-1], headers={b"x-api-key": KEY.encode()}, timeout=60).status_code == 200


@NEEDS_CHROMIUM
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_its_window_and_every_text_stands_out(
    browser: Browser, server: RunningServer, scheme: str, width: int
) -> None:
    opened(browser, server, scheme=scheme, width=width)
    assert browser.violations() == []
    choose(browser, "backend", "*")
    send_sample(browser)
    click(browser, "#profile-form button")
    browser.wait("document.querySelectorAll('#profiles article').length === 3")
    browser.wait("document.querySelector('#figures tr')")
    needed, shown, whole = browser.widths()
    assert (needed, whole) == (shown, width)
    count, faint = browser.evaluate(FAINT)
    assert count > 80
    assert faint == []
    assert browser.violations() == []
    click(browser, "input[value=random]")
    browser.evaluate("document.getElementById('count').max = 5000")
    fill(browser, "count", "1025")
    click(browser, "#pause")
    assert "too_large" in send(browser)
    assert browser.violations() == []


@NEEDS_CHROMIUM
def test_what_a_screen_reader_would_stumble_over_is_seen(shown: Browser) -> None:
    shown.evaluate(
        "const [seed, picture] = [document.getElementById('seed'), document.createElement('img')];"
        "document.querySelectorAll('label').forEach(each => each.replaceWith(...each.childNodes));"
        "seed.removeAttribute('aria-label'); picture.src = 'data:,'; document.querySelector('main').append(picture)"
    )
    click(shown, "input[value=random]")
    found = {each.partition(":")[0] for each in shown.violations()}
    assert {"image-alt", "label"} <= found


@NEEDS_CHROMIUM
def test_a_server_that_ends_is_told(browser: Browser, start: Start, tiny_model: Path) -> None:
    short = start("--model", str(tiny_model), "--backends", "eager").wait_ready()
    opened(browser, short)
    assert browser.evaluate("return document.getElementById('sources').hidden")
    assert ": 1 row of 8 numbers after " in send(browser)
    assert short.stop() == 0
    assert send(browser) == "the server does not answer; see whether it still runs"
    browser.wait("document.getElementById('live-state').textContent.startsWith('the server does not answer')")
    browser.driver.get("about:blank")
