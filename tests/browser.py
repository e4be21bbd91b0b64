"""A real Chromium for tests of pages: Debian's `chromium` and `chromium-driver`, or the same names on the path."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import axe_core_python
import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NEEDS_CHROMIUM = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="there is no chromium and chromedriver on the path; on Debian: apt-get install chromium chromium-driver",
)
WAIT_S = 60  # what a page may take on a busy host; no test asserts on it

# What people who use a keyboard or a screen reader would stumble over, as far as a program sees it.
AXE = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice")
FOUND = """
const [rules, done] = arguments;
axe.run(document, {runOnly: rules, resultTypes: ["violations"]}).then(({violations, passes}) => done(
  [passes.length, violations.map(each => `${each.id}: ${each.help}: ${each.nodes.map(node => node.html).join(" ")}`)]));
"""

# The number of texts, and those whose contrast with the nearest background is below what WCAG 2.2, 1.4.3, asks for.
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
const colour = element => {
  const style = getComputedStyle(element);
  return element instanceof SVGElement ? style.fill : style.color;
};
const texts = [...document.body.querySelectorAll("*")].filter(
  element => [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim()));
return [texts.length, texts.map(element => {
  const [low, high] = [channels(colour(element)), paper(element)].map(luminance).sort((a, b) => a - b);
  return [(high + 0.05) / (low + 0.05), element.textContent.slice(0, 40)];
}).filter(([ratio]) => ratio < 4.5)];
"""


class Browser:
    """One headless Chromium, with what tests of pages do again and again."""

    def __init__(self) -> None:
        options = ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=Service(DRIVER))

    def open(self, address: str, scheme: str = "light", width: int = 1280, height: int = 900) -> "Browser":
        """Show a page in a window of this size, with logs that begin with it."""
        media = {
            "prefers-color-scheme": scheme,
            "prefers-reduced-motion": "reduce",
        }  # so that clicks hit
        features = [{"name": name, "value": value} for name, value in media.items()]
        self.command("Emulation.setEmulatedMedia", features=features)
        self.resize(width, height)
        self.driver.get("about:blank")
        self.console()
        self.addresses()
        self.driver.get(address)
        return self

    def resize(self, width: int, height: int) -> None:
        """Give the window another size."""
        size = {"width": width, "height": height}
        self.command("Emulation.setDeviceMetricsOverride", deviceScaleFactor=1, mobile=False, **size)

    def drag(self, identity: str, points: Sequence[tuple[float, float]]) -> None:
        """Move the pressed mouse over an element; points are shares of its sides."""
        box = self.evaluate(
            "const found = document.getElementById(arguments[0]);"
            "found.scrollIntoView({block: 'center', behavior: 'instant'});"
            "return found.getBoundingClientRect().toJSON()",
            identity,
        )
        kinds = ["mousePressed", *["mouseMoved"] * (len(points) - 1), "mouseReleased"]
        for kind, (x, y) in zip(kinds, [*points, points[-1]], strict=True):
            place = {"x": box["x"] + x * box["width"], "y": box["y"] + y * box["height"]}
            self.command("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, clickCount=1, **place)

    def command(self, name: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def evaluate(self, script: str, *arguments: Any) -> Any:
        """Run a function's body in the page and return what it returns, once that is there."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, *arguments: Any) -> Any:
        """Wait until an expression is true in the page; return its value."""
        waiting = WebDriverWait(self.driver, WAIT_S, 0.05)
        return waiting.until(lambda _: self.evaluate(f"return {script}", *arguments), f"still waiting for {script}")

    def violations(self) -> list[str]:
        """Return what axe-core finds wrong with the page as it is now."""
        self.driver.set_script_timeout(WAIT_S)
        self.evaluate(AXE)
        passed, found = self.driver.execute_async_script(FOUND, RULES)
        assert passed > 20  # it did look
        return list(found)

    def console(self) -> list[dict[str, Any]]:
        """Return what the console said since the last call."""
        return list(self.driver.get_log("browser"))  # type: ignore[no-untyped-call]

    def addresses(self) -> list[str]:
        """Return every address that was asked for since the last call."""
        entries = self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        events = [json.loads(entry["message"])["message"] for entry in entries]
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]

    def widths(self) -> tuple[int, int, int]:
        """Return the width that the page needs, the one that it is shown in, and the window's."""
        root = "return [document.documentElement.scrollWidth, document.documentElement.clientWidth, innerWidth]"
        needed, shown, whole = self.evaluate(root)
        return needed, shown, whole


def browsers() -> Iterator[Browser]:
    """Start a browser, and end it."""
    browser = Browser()
    yield browser
    browser.driver.quit()
