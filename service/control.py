"""The routes beside inference, on LitServe's FastAPI app: health, metadata, metrics, and the default backend."""

from typing import Annotated

from fastapi import FastAPI, Path, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from models.config import ModelConfig
from service import openinference
from service.body import json_body
from service.comparison import Comparison
from service.dispatch import Dispatcher
from service.errors import DrainingError, NotReadyError
from service.kernel_profiles import KernelProfiles
from service.metrics import Metrics
from service.schemas import (
    BackendBody,
    BackendReply,
    CompareReply,
    ProfileReply,
    parse_json,
    validate,
)

NAME = "fused-mlp-server"
VERSION = "0.1.0"

HOST_ROUTES = ("/", "/info", "/health")  # LitServe's own, which say nothing of the model, or nothing typed

ModelName = Annotated[str, Path(description="the served model's name")]

TraceName = Annotated[str, Path(alias="id", description="as the reply of POST /profile names it")]


def add_routes(
    app: FastAPI,
    dispatcher: Dispatcher,
    config: ModelConfig,
    metrics: Metrics,
    comparison: Comparison,
    profiles: KernelProfiles,
    max_body_bytes: int,
) -> None:
    """Register the routes; their errors propagate to `service.http`, which gives them their form."""

    def require_model(name: str) -> None:
        if name != config.name:
            raise openinference.no_such_model(name, config.name)

    def require_ready() -> None:
        if dispatcher.state.is_draining:
            raise DrainingError("the server is stopping")
        if not dispatcher.pool.is_ready:
            raise NotReadyError("not every worker is warm yet")

    def backend_reply() -> BackendReply:
        return BackendReply(
            default=dispatcher.backends.default(),
            is_auto=dispatcher.backends.is_auto,
            canary=dispatcher.backends.canary,
            backends=dispatcher.backends.states,
        )

    app.router.redirect_slashes = False  # a path that is not there is an error like any other
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in HOST_ROUTES]

    @app.get("/v2", tags=["Open Inference Protocol"])
    @app.get("/v2/", include_in_schema=False)
    async def server_metadata() -> openinference.ServerMetadata:
        """Name the server and the protocol extensions it has."""
        return openinference.ServerMetadata(name=NAME, version=VERSION, extensions=list(openinference.EXTENSIONS))

    @app.get("/v2/health/live", tags=["Open Inference Protocol"])
    async def live() -> openinference.Live:
        """Answer 200 as long as the process answers at all."""
        return openinference.Live(live=True)

    @app.get("/health", tags=["operation"])
    @app.get("/v2/health/ready", tags=["Open Inference Protocol"])
    async def ready() -> openinference.Ready:
        """Answer 200 when every worker has every backend warm, else 503."""
        require_ready()
        return openinference.Ready(ready=True)

    @app.get("/v2/models/{name}", tags=["Open Inference Protocol"])
    async def model_metadata(name: ModelName) -> openinference.ModelMetadata:
        """Describe the model's tensors."""
        require_model(name)
        return openinference.model_metadata(config.name, config.width_in, config.width_out)

    @app.get("/v2/models/{name}/ready", tags=["Open Inference Protocol"])
    async def model_ready(name: ModelName) -> openinference.ModelReady:
        """Answer 200 when the model can be called, else 503."""
        require_model(name)
        require_ready()
        return openinference.ModelReady(name=name, ready=True)

    @app.post("/v2/models/{name}/infer", tags=["Open Inference Protocol"])
    async def infer(name: ModelName) -> openinference.InferReply:
        """Run the model on one tensor."""  # for the document alone: the front answers every such path before it
        raise openinference.no_such_model(name, config.name)

    @app.get("/backend", tags=["backends"])
    async def get_backend() -> BackendReply:
        """Show the default backend, and each backend's implementation and state."""
        return backend_reply()

    @app.put("/backend", tags=["backends"])
    async def put_backend(request: Request) -> BackendReply:
        """Change the default backend, or the canaries' shares, in every HTTP process at once.

        A backend that was taken out is put back by making it the default, or by naming it in `put_back`.
        """
        body = validate(BackendBody, parse_json(await json_body(request, max_body_bytes)))
        body.require_change()
        backends, returning = dispatcher.backends, body.put_back or []
        backends.require_returns(returning)
        backends.require_canaries(body.canary or {}, (body.default, *returning))
        if body.default is not None:
            backends.set_default(body.default)
        for name in returning:
            backends.put_back(name)
        if body.canary is not None:
            backends.set_canary(body.canary)
        return backend_reply()

    @app.post("/compare", tags=["backends"], response_model=CompareReply)
    async def post_compare(request: Request) -> Response:
        """Run the same rows through every ready backend, and show each one's time and difference from eager."""
        return Response((await comparison.answer(request))[1], media_type="application/json")

    @app.post("/profile", tags=["backends"], response_model=ProfileReply)
    async def post_profile(request: Request) -> Response:
        """Show the operators and kernels of a backend's forward pass, with counts and times."""
        return Response((await profiles.answer(request))[1], media_type="application/json")

    @app.get("/profile/{id}.json", tags=["backends"])
    async def get_trace(name: TraceName) -> Response:
        """Download a profile's trace, for ui.perfetto.dev."""
        disposition = {"content-disposition": f'attachment; filename="profile-{name[:8]}.json"'}
        return Response(await profiles.trace(name), media_type="application/json", headers=disposition)

    @app.get("/metrics", tags=["operation"], response_class=PlainTextResponse)
    async def get_metrics() -> Response:
        """Show the counters of all processes as Prometheus text."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
