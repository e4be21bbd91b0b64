"""Puts the server together from its parts and runs it."""

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import FastAPI
from starlette.middleware.gzip import GZipMiddleware

from models.config import ModelConfig
from service import logs
from service.admission import Admission
from service.backends import PREFERENCE
from service.child_processes import begin_child, block_signals, end_children
from service.comparison import Comparison
from service.control import NAME, VERSION, add_routes
from service.dispatch import Dispatcher
from service.guard import FLOOR, MAX_DRIFT, Guard
from service.host import Host
from service.http import Front
from service.inference import Inference, InferenceOptions
from service.kernel_profiles import KernelProfiles
from service.lifespan import lifespan
from service.metrics import Metrics
from service.openapi import describe
from service.page import add_page
from service.protocol import protocol
from service.schemas import ModelReply
from service.settings import Settings
from service.shared_state import SharedState
from service.surroundings import StartError, device_count, identify, resolve_device, resolve_dtype
from service.watch import LOST_MANAGER, Hello, Watch, lost
from service.wire import MAX_PAYLOAD_BYTES
from service.worker_process import EngineAPI, WorkerPlan

if TYPE_CHECKING:
    from service.traces import Traces

HOST_PATIENCE_S = 8.0  # before LitServe kills an HTTP process; the drain is over long before
WORKER_RESTART_POLL_S = 0.25
log = logging.getLogger(__name__)


def require_results_to_fit(settings: Settings, config: ModelConfig) -> None:
    """Refuse a largest request whose rows or results do not fit a frame to or from a worker.

    Raises:
        StartError: they do not fit.
    """
    most = MAX_PAYLOAD_BYTES // (np.dtype(np.float32).itemsize * max(config.width_in, config.width_out))
    if settings.request_rows > most:
        raise StartError(
            f"--max-request-rows: expected at most {most}, 4 GiB of this model's rows, got {settings.request_rows}"
        )


class Server:
    """LitServe with this project's worker loop, front and routes, and one directory for its sockets."""

    def __init__(self, settings: Settings, model: Path, config: ModelConfig, directory: Path) -> None:
        """`directory` is private to this run."""
        self.settings = settings
        self.config = config
        self.directory = directory
        self.device = resolve_device(settings.device)
        self.dtype = resolve_dtype(settings.dtype, self.device)
        devices = device_count(self.device)
        try:
            threads = settings.worker_threads(devices)
        except ValueError as error:
            raise StartError(str(error)) from None
        require_results_to_fit(settings, config)
        self.state = SharedState(settings.api_servers, len(settings.backends))
        self.state.canary = [settings.canary_weights.get(name, 0.0) for name in settings.backends]
        if settings.default_backend != "auto":
            self.state.default_backend = settings.backends.index(settings.default_backend)
        plan = self._plan(model, threads)
        self.host = self._host(plan, devices)
        self.sockets = [plan.socket(index) for index in range(len(self.host.devices) * settings.workers)]
        self.metrics = Metrics(settings.backends, settings.api_servers)
        self.max_drift = MAX_DRIFT[self.dtype] if settings.max_drift is None else settings.max_drift
        self.inference = self._assemble_app(settings.admission(self.device, devices))

    def _plan(self, model: Path, threads: int) -> WorkerPlan:
        settings = self.settings
        return WorkerPlan(
            model=model,
            identity=identify(model),
            dtype=self.dtype,
            threads=threads,
            backends=settings.backends,
            default_backend=settings.default_backend,
            canaries=tuple(name for name, weight in settings.canary_weights.items() if weight),
            max_batch_rows=settings.batch_rows(self.device),
            spin_us=settings.spin_us,
            hold_share=settings.hold_share,
            log_format=settings.log_format,
            socket_directory=self.directory,
            server_pid=os.getpid(),
        )

    def _host(self, plan: WorkerPlan, devices: int) -> Host:
        host = Host(
            EngineAPI(plan),
            accelerator=self.device,
            devices=devices if self.device == "cuda" else "auto",
            workers_per_device=self.settings.workers,
            timeout=False,
            restart_workers=True,
        )
        host.uvicorn_graceful_timeout = HOST_PATIENCE_S
        host.monitor_internal = WORKER_RESTART_POLL_S
        return host

    def _assemble_app(self, admission: Admission) -> Inference:
        """Put the routes and the front on LitServe's app; return what answers the front's requests."""
        settings, config, metrics = self.settings, self.config, self.metrics
        options = InferenceOptions(
            model=config.name,
            width_in=config.width_in,
            labels=config.labels,
            max_request_rows=settings.request_rows,
            max_body_bytes=settings.body_bytes(config.width_in),
            api_key=settings.api_key.get_secret_value() if settings.api_key else None,
        )
        dispatcher = Dispatcher(self.sockets, settings.backends, self.state, admission, settings.timeout_s, metrics)
        guard = Guard(dispatcher, metrics, settings.shadow_rate, self.max_drift, FLOOR[self.dtype])
        inference = Inference(dispatcher, options, metrics, guard)
        traces = self.directory / "traces"
        traces.mkdir()
        app: FastAPI = self.host.app
        middleware: list[Any] = app.user_middleware
        middleware[:] = [each for each in middleware if each.cls is not GZipMiddleware]  # level 9, on the event loop
        add_routes(
            app,
            dispatcher,
            config,
            metrics,
            Comparison(dispatcher, options, metrics, guard),
            KernelProfiles(dispatcher, traces, settings.batch_rows(self.device), options.max_body_bytes),
            options.max_body_bytes,
        )
        add_page(app, self._model_reply())
        describe(app, NAME, VERSION, settings.api_key is not None)
        app.router.lifespan_context = lifespan(
            app.router.lifespan_context,
            inference,
            metrics,
            lambda: logs.configure(settings.log_format, settings.log_requests),
            self._make_traces if settings.traces_url else None,
        )
        app.add_middleware(Front, inference=inference)  # added last: outside of all the others
        return inference

    def _model_reply(self) -> ModelReply:
        config = self.config
        return ModelReply(
            name=config.name,
            width_in=config.width_in,
            width_out=config.width_out,
            dim=config.dim,
            hidden=config.hidden,
            depth=config.depth,
            is_gated=config.ffn.gated,
            activation=config.ffn.activation,
            parameters=config.parameter_count,
            labels=config.labels,
            dtype=self.dtype,
            device=self.device,
            max_request_rows=self.settings.request_rows,
            max_batch_rows=self.settings.batch_rows(self.device),
        )

    def _make_traces(self) -> "Traces":
        from service.traces import Traces  # OpenTelemetry's SDK, which costs memory and a moment

        assert self.settings.traces_url is not None  # noqa: S101
        return Traces(self.settings.traces_url, self.settings.trace_sample_rate, NAME, VERSION)

    def address(self) -> tuple[str, int]:
        """Return an address of this host that reaches the server."""
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
        return local.get(self.settings.host, self.settings.host), self.settings.port

    def run(self) -> int:
        """Serve until a signal comes or a part fails for good; return the exit status."""
        watch = Watch(self.host, self.state, self.sockets, self.address(), self._announce, self.metrics)
        os.register_at_fork(after_in_child=partial(begin_child, os.getpid(), self.directory))
        block_signals()
        watch.start()
        settings = self.settings
        try:
            self.host.run(
                host=settings.host,
                port=settings.port,
                num_api_servers=settings.api_servers,
                log_level="warning",
                log_config=None,
                generate_client_file=False,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                loop="uvloop",
                http=protocol(self.inference, settings),
                ws="none",
            )
        except LOST_MANAGER:
            if not watch.is_stopping:
                watch.fail(lost("LitServe's manager"))
        except Exception as error:
            if not watch.is_stopping:
                watch.fail(f"the server ended: {type(error).__name__}: {error}")
        finally:
            watch.is_stopping = True
            end_children()
        return watch.exit_status

    def _announce(self, hellos: list[Hello]) -> None:
        try:
            print(screen(self, hellos), flush=True)
        except OSError as error:  # nobody reads it, or the disk is full; who calls the server is served all the same
            log.warning("the screen that tells what is served could not be written to stdout: %s", error)
            discard_stdout()


def discard_stdout() -> None:
    """Discard what is left for stdout, which Python would fail to write again at its end.

    Source: https://docs.python.org/3/library/signal.html#note-on-sigpipe.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def screen(server: Server, hellos: list[Hello]) -> str:
    """Return the start screen: what is served, how, and how to try it."""
    settings, config, hello = server.settings, server.config, hellos[0]
    host, port = server.address()
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    lines = [
        f"model     {config.name}: {config.width_in} -> {config.width_out}, {config.depth} blocks of "
        f"{config.dim}/{config.hidden}, {hello['parameters']:,} parameters",
        f"device    {server.device}, {server.dtype}, {len(hellos)} worker(s) of {hello['threads']} thread(s), "
        f"{settings.api_servers} HTTP process(es)",
    ]
    for name, state in hello["backends"].items():
        what = state["implementation"] if state["state"] == "ready" else f"unavailable: {state['reason']}"
        what += f" ({state['note']})" if state["note"] else ""
        lines.append(f"backend   {name:9}{what}")
    default = settings.default_backend
    if settings.canary_weights:
        shares = ", ".join(f"{name} {weight:g}" for name, weight in settings.canary_weights.items())
        ready = [name for name in PREFERENCE if hello["backends"].get(name, {}).get("state") == "ready"]
        chosen = ready[0] if default == "auto" and ready else default
        if settings.canary_weights.get(chosen):
            shares += f" ({chosen} is the default too, which takes the rest: name another --default-backend)"
        lines.append(f"canary    {shares}")
    if settings.shadow_rate:
        lines.append(f"shadow    {settings.shadow_rate:g} of the requests, taken out beyond {server.max_drift:g}")
    if settings.traces_url:
        lines.append(f"traces    {settings.traces_url}")
    lines.append(f"default   {default}{' (fused, else compiled, else eager)' if default == 'auto' else ''}")
    key = '-H "X-API-Key: $MLP_API_KEY" ' if settings.api_key else ""
    row = f"""$(python3 -c 'print([0.5] * {config.width_in})')"""
    body = f'''"{{\\"inputs\\": {row}}}"'''
    lines += [
        f"ready     {url}  (docs at {url}/docs{', which asks for the key as well' if settings.api_key else ''})",
        "",
        f"try       curl {url}/predict -H 'content-type: application/json' {key}-d {body}",
        "",
    ]
    return "\n".join(lines)
