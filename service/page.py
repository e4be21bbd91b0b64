"""The page at `/`: plain files from this server, under a policy that lets them load and call nothing else.

Source: https://www.w3.org/TR/CSP3/; https://html.spec.whatwg.org/multipage/browsers.html#cross-origin-isolation.
"""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

from service.errors import NotFoundError
from service.schemas import ModelReply, shortened

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    # Together they give the page's clock 5 us of resolution, where it has 100 otherwise.
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-embedder-policy": "require-corp",
}
FILES = frozenset(path.name for path in STATIC.iterdir() if path.suffix in MEDIA_TYPES) - {INDEX}
PATHS = frozenset({"/", *(f"/static/{name}" for name in FILES)})
"""What a browser gets without the key, which the page then asks for; none of it tells anything of this server."""


def add_page(app: FastAPI, model: ModelReply) -> None:
    """Serve the page, and what it tells of the model; its addresses are relative, so a proxy may put a prefix first."""
    replies = {name: file_reply(name) for name in (INDEX, *FILES)}

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        """Show the page."""
        return replies[INDEX]

    @app.get("/static/{name}", include_in_schema=False)
    async def static_file(name: str) -> Response:
        """Send what the page refers to."""
        if name not in FILES:
            raise NotFoundError(f"/static: no file {shortened(name)}; expected one of {', '.join(sorted(FILES))}")
        return replies[name]

    @app.get("/model", tags=["operation"])
    async def get_model() -> ModelReply:
        """Show what is served: widths, depth, labels, number format, device, and the most rows."""
        return model


def file_reply(name: str) -> Response:
    """Read one of the page's files."""
    path = STATIC / name
    return Response(path.read_bytes(), media_type=f"{MEDIA_TYPES[path.suffix]}; charset=utf-8", headers=HEADERS)
