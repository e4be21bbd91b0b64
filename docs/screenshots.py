"""Takes the pictures of the page that the documents show: `python -m docs.screenshots`.

It starts a server of its own with the demo model, calls it for half a minute, and shows what the page shows then.
"""

import math
import sys
import tempfile
import threading
from base64 import b64decode
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

import httpx
from PIL import Image

from tests.browser import Browser
from tests.service.running_server import RunningServer

DOCS = Path(__file__).parent
LOAD_S = 30.0
COLOURS = 256  # of the files, which are kept with the sources
# Name: the colour scheme, the window's width, and the sections between whose tops the picture lies.
PICTURES: dict[str, tuple[str, int, str | None, str | None]] = {
    "page": ("light", 1200, None, "live"),
    "page-dark": ("dark", 1200, None, "live"),
    "page-live": ("light", 1200, "live", None),
    "page-phone": ("light", 390, None, "results"),
}
ANGLES = [math.radians(10 * step - 90) for step in range(37)]
DIGIT = [(0.5 + 0.22 * math.cos(angle), 0.5 + 0.35 * math.sin(angle)) for angle in ANGLES]


def call(url: str, backend: str, pause_s: float, done: threading.Event) -> None:
    """Send a request after the other until it is enough."""
    with httpx.Client(base_url=url, timeout=60) as client:
        while not done.wait(pause_s):
            client.post(f"/predict/{backend}", json={"inputs": [[0.5] * 64] * 8})


def use(browser: Browser) -> None:
    """Draw a digit, send it to every backend, and profile them."""
    browser.wait("document.documentElement.dataset.read")
    browser.drag("pad", DIGIT)
    browser.evaluate("document.getElementById('backend').value = '*'; document.getElementById('send').click()")
    browser.wait("document.querySelector('#results table')")
    browser.evaluate("document.querySelector('#profile-form button').click()")
    browser.wait("document.querySelectorAll('#profiles article button').length === 3")


def load(browser: Browser, url: str) -> None:
    """Call every backend until the page's chart has something to show."""
    done = threading.Event()
    threads = [
        threading.Thread(target=call, args=(url, backend, 0.02 * (1 + place), done))
        for place, backend in enumerate(("eager", "compiled", "fused"))
    ]
    for thread in threads:
        thread.start()
    try:
        browser.wait("performance.now() > arguments[0]", browser.evaluate("return performance.now()") + 1e3 * LOAD_S)
    finally:
        done.set()
        for thread in threads:
            thread.join()


def picture(browser: Browser, width: int, first: str | None, end: str | None) -> Image.Image:
    """Take the page from the top of one section to that of another, in few colours."""
    browser.resize(width, browser.evaluate("scrollTo(0, 0); return document.documentElement.scrollHeight"))
    data = browser.command("Page.captureScreenshot", format="png")["data"]
    whole = Image.open(BytesIO(b64decode(data))).convert("RGB")
    place = "return Math.round(document.getElementById(arguments[0]).getBoundingClientRect().top)"
    top = browser.evaluate(place, first) if first else 0
    bottom = browser.evaluate(place, end) if end else whole.height
    return whole.crop((0, top, width, bottom)).quantize(COLOURS, dither=Image.Dither.NONE)


def main() -> int:
    """Write every picture."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = RunningServer(directory / "server.log")
        stack.callback(server.end)
        server.wait_ready()
        browser = Browser()
        stack.callback(browser.driver.quit)
        for name, (scheme, width, first, end) in PICTURES.items():
            use(browser.open(server.url + "/", scheme, width))
            if first == "live":
                load(browser, server.url)
            path = DOCS / f"{name}.png"
            picture(browser, width, first, end).save(path, optimize=True)
            print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
