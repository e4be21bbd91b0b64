"""FastAPI with the model in the HTTP process: one event loop, no queue, no batching.

As its documentation advises: the model loaded by the lifespan (https://fastapi.tiangolo.com/advanced/events/); `async
def` where nothing is waited for (https://fastapi.tiangolo.com/async/); a declared return type, which pydantic writes as
JSON directly (https://fastapi.tiangolo.com/advanced/custom-response/#orjson-or-response-model); uvicorn with uvloop and
httptools, one process (https://fastapi.tiangolo.com/deployment/server-workers/).
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from loadtests.peers.programs.model import Model, Setting

SETTING = Setting.from_environment()


class Inputs(BaseModel):
    """The body of a request."""

    inputs: list[list[float]]


class Outputs(BaseModel):
    """The body of a reply."""

    outputs: list[list[float]]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the model before the first request."""
    app.state.model = Model(SETTING)
    yield


app = FastAPI(lifespan=lifespan)


async def predict(body: Inputs) -> Outputs:
    """Take and answer JSON."""
    model: Model = app.state.model
    return Outputs(outputs=model.outputs(np.asarray(body.inputs, np.float32)).tolist())


async def predict_binary(request: Request) -> Response:
    """Take and answer float32 bytes."""
    model: Model = app.state.model
    outputs = model.outputs(model.from_bytes(await request.body()).copy())
    return Response(outputs.tobytes(), media_type="application/octet-stream")


app.post("/predict")(predict_binary if SETTING.is_binary else predict)

if __name__ == "__main__":
    uvicorn.run(app, port=SETTING.port, loop="uvloop", http="httptools", access_log=False, log_level="warning")
