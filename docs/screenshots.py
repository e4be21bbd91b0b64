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
COLOURS = 64  # of the files, which are kept with the sources
# Name: the colour scheme, and the window's width.
PICTURES = {"page": ("light", 1200), "page-dark": ("dark", 1200), "page-phone": ("light", 390)}
# A zero, as shares of the pad's sides.
ANGLES = [math.radians(10 * step - 90) for step in range(37)]
DIGIT = [(0.5 + 0.22 * math.cos(angle), 0.5 + 0.35 * math.sin(angle)) for angle in ANGLES]


def call(url: str, backend: str, pause_s: float, done: threading.Event) -> None:
    """Send a request after the other until it is enough."""
    with httpx.Client(base_url=url, timeout=60) as client:
        while not done.wait(pause_s):
            client.post(f"/predict/{backend}", json={"inputs": [[0.5] * 64] * 8})


def picture(browser: Browser, width: int) -> Image.Image:
    """Take the whole page, in few colours."""
    height = browser.evaluate("scrollTo(0, 0); return document.documentElement.scrollHeight")
    browser.resize(width, height)
    data = browser.command("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
    return Image.open(BytesIO(b64decode(data))).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)


def main() -> int:
    """Write every picture."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = RunningServer(directory / "server.log")
        stack.callback(server.end)
        server.wait_ready()
        browser = Browser()
        stack.callback(browser.driver.quit)
        done = threading.Event()
        stack.callback(done.set)
        for place, backend in enumerate(("eager", "compiled", "fused")):
            arguments = (server.url, backend, 0.02 * (1 + place), done)
            threading.Thread(target=call, args=arguments, daemon=True).start()
        for name, (scheme, width) in PICTURES.items():
            browser.open(server.url + "/", scheme, width)
            browser.wait("document.documentElement.dataset.read")
            browser.drag("pad", DIGIT)
            browser.evaluate(
                "document.getElementById('backend').value = '*'; document.getElementById('send').click();"
                "document.querySelector('#profile-form button').click()"
            )
            browser.wait("document.querySelectorAll('#profiles article button').length === 3")
            browser.wait("performance.now() > arguments[0]", 1e3 * LOAD_S)
            path = DOCS / f"{name}.png"
            picture(browser, width).save(path, optimize=True)
            print(f"{path.relative_to(DOCS.parent)}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
