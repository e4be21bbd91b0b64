"""A worker process from its start to its end, as LitServe runs it.

LitServe starts the process and restarts it; requests and results bypass its queues. The socket exists only once the
engine is warm, so a connection is proof of readiness.
"""

import contextlib
import logging
import multiprocessing.util
import os
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import litserve as ls
import orjson
from litserve.loops.base import LitLoop
from setproctitle import setproctitle

from models.errors import DeviceLostError, MLPError, first_line
from service import logs
from service.child_processes import begin_worker, outlive_parent
from service.heap import FreedMemory, freeze_heap
from service.listener import listen
from service.surroundings import ModelIdentity, identify
from service.watch import START_FAILED
from service.worker import Profiling, WorkerServer

FAILED = 1  # exit status of a worker whose device failed for good, or whose loop did
log = logging.getLogger(__name__)
SILENT = "6"  # of Kineto's levels, which tells each profile's start and end on stderr otherwise


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker needs to know; it is sent to the new process.

    Attributes:
        default_backend, canaries: what the server was started with; without them its first workers do not start. What
            is in force may have changed when one is started anew, which serves with whatever is left: the HTTP
            processes take out what it lacks.
        is_restart: whether it is in place of one that was warm.
    """

    model: Path
    identity: ModelIdentity
    dtype: str
    threads: int
    backends: tuple[str, ...]
    default_backend: str
    canaries: tuple[str, ...]
    max_batch_rows: int
    spin_us: int
    hold_share: float
    log_format: str
    socket_directory: Path
    server_pid: int
    is_restart: bool = False

    def socket(self, worker_id: int) -> Path:
        """Return where a worker listens."""
        return self.socket_directory / f"worker-{worker_id}.sock"


class EngineAPI(ls.LitAPI):  # type: ignore[misc]
    """What LitServe runs in each worker."""

    def __init__(self, plan: WorkerPlan) -> None:
        super().__init__(loop=EngineLoop(), api_path="/predict")
        self.plan = plan

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a worker, where this is the first of this project's code that runs."""
        self.__dict__.update(state)
        begin_worker(self.plan.server_pid)
        logs.open_stderr()

    def setup(self, device: str) -> None:
        """Load the engine; what prevents it ends the process with one line on stderr."""
        from kernels.progress import Progress
        from models.engine import load_engine

        setproctitle("fused-mlp-server: worker")
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
        plan = self.plan
        logs.configure(plan.log_format, is_request_logged=False)
        try:
            if identify(plan.model) != plan.identity:
                fail(f"model {plan.model}: changed since the server started; start it anew to serve what is there now")
            keep_no_semaphore()
            with Progress("loading the model", stream=logs.start_stream()) as progress:
                self.engine = load_engine(plan.model, device, plan.dtype, plan.backends, plan.threads, progress)
        except MLPError as error:
            fail(str(error))
        except Exception as error:
            fail(f"model {plan.model}: could not be loaded on {device}: {first_line(error)}")

    def predict(self, x: Any, **kwargs: Any) -> Any:
        """Run rows through the engine: `predict(rows, backend=...)`."""
        return self.engine.run(x, kwargs["backend"])

    def profile(self, rows: int, backend: str, trace: Path) -> Profiling:
        """Profile forward passes, one a step, and write a trace."""
        from models.profile import profile_in_steps

        found = yield from profile_in_steps(self.engine, rows, backend, trace)
        return found.to_dict()


class EngineLoop(LitLoop):  # type: ignore[misc]
    """Warms the engine, then serves its socket until the parent or a signal ends it."""

    def __call__(
        self,
        lit_api: EngineAPI,
        device: str,
        worker_id: int,
        request_queue: Any,  # noqa: ARG002
        transport: Any,  # noqa: ARG002
        workers_setup_status: Any,  # noqa: ARG002
        callback_runner: Any,  # noqa: ARG002
    ) -> None:
        """Run until no request can come any more."""
        from kernels.progress import Progress
        from models.staging import staging_for

        plan = lit_api.plan
        engine = lit_api.engine
        if worker_id == 0:  # the others do the same at the same time
            with Progress("warming up", stream=logs.start_stream(), patience_s=0.0) as progress:
                engine.warm_up(plan.max_batch_rows, lambda name, done, total: progress(done, total, name))
        else:
            engine.warm_up(plan.max_batch_rows)
        wanted = [name for name in plan.backends if plan.default_backend in ("auto", name)]
        missing = {name for name, status in engine.backends.items() if status.state == "unavailable"}
        lacking = wanted if missing.issuperset(wanted) else [name for name in plan.canaries if name in missing]
        if plan.is_restart:
            lacking = list(plan.backends) if missing.issuperset(plan.backends) else []
        if lacking:
            fail("; ".join(f"backend {name!r} is unavailable: {engine.backends[name].reason}" for name in lacking))
        try:
            staging = staging_for(engine, plan.max_batch_rows)
        except MLPError as error:
            fail(f"{error}; --max-batch-rows sets how many rows a batch may have")
        hello = {
            "device": device,
            "dtype": plan.dtype,
            "threads": engine.threads,
            "parameters": engine.parameter_count,
            "backends": {name: asdict(status) for name, status in engine.backends.items()},
        }
        freeze_heap()
        freed = FreedMemory()
        exit_status = 0
        with listen(plan.socket(worker_id)) as listener:
            outlive_parent()
            server = WorkerServer(
                listener,
                lit_api.predict,
                plan.backends,
                plan.max_batch_rows,
                hello=orjson.dumps(hello),
                spin_us=plan.spin_us,
                hold_share=plan.hold_share,
                profile=lit_api.profile,
                staging=staging,
                bound_memory=freed.bound,
            )
            try:
                server.run()
            except DeviceLostError as error:
                log.error("worker %d ends, to be started anew: %s", worker_id, error)
                exit_status = FAILED
            except Exception:  # a fault of ours, which multiprocessing would print whatever the log's form is
                log.exception("worker %d ends, to be started anew, by a fault of the server", worker_id)
                exit_status = FAILED
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # gives its semaphores back
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_status)  # nothing is left to tidy, and torch takes seconds to do so


def keep_no_semaphore() -> None:
    """Let the bars of tqdm, which torch.compile makes where it is installed, lock threads alone.

    Their own lock holds a semaphore, which a killed worker could not release.

    Source: https://tqdm.github.io/docs/tqdm/#set_lock.
    """
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())


def fail(message: str) -> None:
    """End this process before it serves, with one line; the parent reads no more than the exit status."""
    logs.tell_error(message)
    raise SystemExit(START_FAILED)
