"""Writes the protocol as KServe's own server states it, an OpenAPI document: `python kserve_schema.py FILE`.

What the protocol leaves to the server is settled here: the model is digits, a refusal is 400 or 404 with an `error`.
Listing and loading models are KServe's additions, and left out.
"""

import json
import sys
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from kserve.protocol.rest.v2_datamodels import InferenceResponse
from kserve.protocol.rest.v2_endpoints import register_v2_endpoints

OK = "200"


def document() -> dict[str, Any]:
    app = FastAPI()
    register_v2_endpoints(app, dataplane=None, model_repository_extension=None)
    stated = app.openapi()
    schemas = stated["components"]["schemas"]
    paths = {path: each for path, each in stated["paths"].items() if "repository" not in path and path != "/v2/models"}
    reply = InferenceResponse.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= reply.pop("$defs") | {"InferenceResponse": reply}
    refusal = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
    for operations in paths.values():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                if parameter["name"] == "model_name":
                    parameter["schema"]["enum"] = ["digits"]
            operation["responses"].pop("422", None)  # FastAPI's own, which KServe answers with 400
            for status in ("400", "404"):
                content = {"application/json": {"schema": refusal}}
                operation["responses"][status] = {"description": "Refused", "content": content}
    infer = paths["/v2/models/{model_name}/infer"]["post"]
    infer["responses"][OK]["content"]["application/json"]["schema"] = {"$ref": "#/components/schemas/InferenceResponse"}
    infer["requestBody"]["content"] = {
        "application/json": {"schema": {"$ref": "#/components/schemas/InferenceRequest"}}
    }
    return stated | {"paths": paths}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(document()))
