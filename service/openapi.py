"""The OpenAPI document: FastAPI's own, completed by the inference routes, which FastAPI does not see.

Swagger UI, which shows it, comes from the package fastapi-offline and not from the web, so `/docs` needs no other host.
"""

from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service import openinference, schemas
from service.errors import NotFoundError
from service.http import OPEN_PATHS

REFERENCE = "#/components/schemas/{model}"
HOST_ROUTES = ("/docs", "/docs/oauth2-redirect", "/redoc")  # FastAPI's own, which take their scripts from the web
SWAGGER_FILES = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
SUMMARY = "Runs a multilayer perceptron eager, compiled or fused, as each request asks."


def describe(app: FastAPI, title: str, version: str, has_key: bool = False) -> None:
    """Make `/openapi.json` and `/docs` show every route, and where the server `has_key`, which of them ask for it."""
    app.title, app.version, app.summary = title, version, SUMMARY
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = complete(generated())
            if has_key:
                add_security(app.openapi_schema)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
    add_docs(app)


def add_docs(app: FastAPI) -> None:
    """Serve Swagger UI from this server alone; the addresses are relative, so a proxy may put a prefix before them."""
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in HOST_ROUTES]
    directory = Path(str(files("fastapi_offline"))) / "static"
    page = get_swagger_ui_html(
        openapi_url="openapi.json",
        title=app.title,
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon.png",
        swagger_ui_parameters={"validatorUrl": None},  # else it sends the document's address to a host of its own
    )

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """Show every route, to be tried."""
        return page

    @app.get("/docs/{name}", include_in_schema=False)
    async def docs_file(name: str) -> FileResponse:
        """Send what the page refers to."""
        if name not in SWAGGER_FILES:
            raise NotFoundError(f"/docs: no file {schemas.shortened(name)}; expected one of {', '.join(SWAGGER_FILES)}")
        return FileResponse(directory / name)


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Add the inference routes and the form of every error to FastAPI's document."""
    bodies: list[type[BaseModel]] = [
        schemas.PredictBody,
        schemas.BackendBody,
        schemas.CompareBody,
        schemas.ProfileBody,
        openinference.InferBody,
    ]
    replies: list[type[BaseModel]] = [schemas.PredictReply, openinference.InferReply, schemas.ErrorReply]
    _, definitions = models_json_schema(
        [*((model, "validation") for model in bodies), *((model, "serialization") for model in replies)],
        ref_template=REFERENCE,
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
    predict = operation("Run the model on rows of numbers", "inference", schemas.PredictBody, schemas.PredictReply)
    backend = {
        "name": "backend",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "enum": ["eager", "compiled", "fused"]},
    }
    paths = document["paths"]
    paths["/predict"] = {"post": predict}
    paths["/predict/{backend}"] = {"post": predict | {"parameters": [backend]}}
    paths["/backend"]["put"]["requestBody"] = content(schemas.BackendBody) | {"required": True}
    paths["/compare"]["post"]["requestBody"] = content(schemas.CompareBody) | {"required": True}
    paths["/profile"]["post"]["requestBody"] = content(schemas.ProfileBody) | {"required": True}
    infer = paths["/v2/models/{name}/infer"]["post"]
    infer |= operation(
        "Run the model on one tensor", "Open Inference Protocol", openinference.InferBody, openinference.InferReply
    )
    add_binary(infer)
    for path in paths.values():
        for route in path.values():
            route["responses"].pop("422", None)
            route["responses"]["default"] = content(schemas.ErrorReply) | {"description": "Every error"}
    return document


def add_binary(infer: dict[str, Any]) -> None:
    """Say that the tensors of a request and of its reply may be bytes behind the JSON."""
    length = {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "required": False,
        "schema": {"type": "integer", "minimum": 1},
        "description": "the bytes of the JSON in front of a binary tensor; left out: the body is JSON alone",
    }
    whole = {"type": "string", "format": "binary", "description": "the JSON, then the bytes of each binary tensor"}
    infer["parameters"] = [*infer.get("parameters", []), length]
    for body in (infer["requestBody"], infer["responses"]["200"]):
        body["content"]["application/octet-stream"] = {"schema": whole}


def add_security(document: dict[str, Any]) -> None:
    """Say which routes ask for the key, and how it is sent, as generated clients and `/docs` need to know."""
    document["components"]["securitySchemes"] = {
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    document["security"] = [{"key": []}, {"bearer": []}]
    for path in OPEN_PATHS & document["paths"].keys():
        for route in document["paths"][path].values():
            route["security"] = []


def operation(summary: str, tag: str, body: type[BaseModel], reply: type[BaseModel]) -> dict[str, Any]:
    """Describe one POST route."""
    return {
        "summary": summary,
        "tags": [tag],
        "requestBody": content(body) | {"required": True},
        "responses": {"200": content(reply) | {"description": "The result"}},
    }


def content(model: type[BaseModel]) -> dict[str, Any]:
    """Refer to a model as a JSON body."""
    return {"content": {"application/json": {"schema": {"$ref": REFERENCE.format(model=model.__name__)}}}}
