"""The OpenAPI document: FastAPI's own, and the inference routes, which FastAPI does not see, from their models."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service import openinference, schemas

REFERENCE = "#/components/schemas/{model}"
SUMMARY = "Runs a multilayer perceptron eager, compiled or fused, as each request asks."


def describe(app: FastAPI, title: str, version: str) -> None:
    """Make `/openapi.json` and `/docs` show every route."""
    app.title, app.version, app.summary = title, version, SUMMARY
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = complete(generated())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def complete(document: dict[str, Any]) -> dict[str, Any]:
    """Add the inference routes and the form of every error to FastAPI's document."""
    bodies: list[type[BaseModel]] = [schemas.PredictBody, schemas.BackendBody, openinference.InferBody]
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
    infer = paths["/v2/models/{name}/infer"]["post"]
    infer |= operation(
        "Run the model on one tensor", "Open Inference Protocol", openinference.InferBody, openinference.InferReply
    )
    for path in paths.values():
        for route in path.values():
            route["responses"].pop("422", None)
            route["responses"]["default"] = content(schemas.ErrorReply) | {"description": "Every error"}
    return document


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
