"""Closed-loop load from locust, started in the project's root: `locust -f loadtests/locustfile.py --host URL`.

Each user sends one request after another to one backend; the statistics keep the backends apart, and show beside each
what the server says it spent waiting (QUEUE) and computing (COMPUTE). By default every class of users takes part, so
that the backends are compared in one run; `--tags fused`, `--backend fused` or the class name `Fused` choose one.
`--rows`, `--wire` and `--model` are fields of the web page as well. `--scenario spike` lets the users come and go, up
to `--users` of them within `--run-time`; `python -m loadtests scenario` checks the same load against an objective.
"""

import logging
import sys
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np
from locust import FastHttpUser, constant, events, tag, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FastHttpSession
from locust.env import Environment
from locust.event import EventHook
from locust.exception import StopUser
from locust.runners import WorkerRunner

from loadtests.errors import UNREADABLE, LoadTestError
from loadtests.flags import whole
from loadtests.generator import shape
from loadtests.generator.load_profile import PROFILES
from loadtests.generator.locust_statistics import refine
from loadtests.generator.target import TargetError, address
from loadtests.inference import WIRES, Inference, ReplyError, inference, outputs_of, require_answered, server_times_ms
from loadtests.measuring.inspection import MOST_NUMBERS, advice
from loadtests.measuring.scenarios import SCENARIOS

BACKENDS = ("default", "eager", "compiled", "fused")
SETUP_FAILED = 2

refine()


class SetupError(LoadTestError):
    """The server cannot be reached, or does not have what is to be measured."""


@events.init_command_line_parser.add_listener
def add_flags(parser: LocustArgumentParser) -> None:
    """Add this file's flags to locust's own."""
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default=None,
        include_in_web_ui=False,
        help="the one class of users that takes part",
    )
    parser.add_argument(
        "--scenario", choices=list(PROFILES), default=None, include_in_web_ui=False, help="how users come and go"
    )
    parser.add_argument("--model", default="digits", help="the served model's name")
    parser.add_argument("--rows", type=whole, default=1, help="rows in each request")
    parser.add_argument("--wire", choices=WIRES, default="json", help="how rows and outputs travel")
    parser.add_argument("--key", default="", env_var="MLP_API_KEY", is_secret=True, help="the server's key")


class Caller(FastHttpUser):
    """One caller; the rows are random and the same in every run."""

    abstract = True
    wait_time = constant(0)
    backend: ClassVar[str | None] = None
    environment: Environment

    def on_start(self) -> None:
        """Take the request that was tried before the first user came."""
        requests: dict[str | None, Inference] = getattr(self.environment, "inferences", {})
        if self.backend not in requests:
            raise StopUser
        self.inference = requests[self.backend]

    def infer(self) -> None:
        """Send one request; anything but the whole reply of the backend asked for is a failure."""
        sent = self.inference
        body: Any = sent.body  # the client takes bytes, its annotation says otherwise
        with self.client.post(
            sent.path, name=sent.name, data=body, headers=sent.headers, catch_response=True
        ) as response:
            try:
                require_ok(response)
                require_answered(sent, response.headers, response.content)
                times_ms = server_times_ms(response.headers)
            except ReplyError as error:
                response.failure(str(error))
                return
        for kind, time_ms in times_ms.items():
            self.environment.events.request.fire(  # type: ignore[no-untyped-call]
                request_type=kind, name=sent.name, response_time=time_ms, response_length=0, exception=None, context={}
            )


class Default(Caller):
    """Names no backend."""

    @tag("default")
    @task
    def predict(self) -> None:
        """Send one request."""
        self.infer()


class Eager(Caller):
    """Asks for eager."""

    backend = "eager"

    @tag("eager")
    @task
    def predict(self) -> None:
        """Send one request."""
        self.infer()


class Compiled(Caller):
    """Asks for compiled."""

    backend = "compiled"

    @tag("compiled")
    @task
    def predict(self) -> None:
        """Send one request."""
        self.infer()


class Fused(Caller):
    """Asks for fused."""

    backend = "fused"

    @tag("fused")
    @task
    def predict(self) -> None:
        """Send one request."""
        self.infer()


def require_ok(response: Any) -> None:
    """Check the status of a reply.

    Raises:
        ReplyError: it is not 200, or no reply came.
    """
    if response.status_code == 200:
        return
    if response.status_code == 0:
        raise ReplyError(f"no reply: {response.error!r}")
    try:
        fault = response.json()
        raise ReplyError(f"{response.status_code} {fault['code']}: {fault['error']}{advice(response.status_code)}")
    except UNREADABLE:
        raise ReplyError(f"status {response.status_code}, and no error in the server's form") from None


def selected(classes: list[Any], options: Any) -> list[Any]:
    """Return the classes of users that `--backend`, `--tags` and `--exclude-tags` leave.

    Raises:
        SetupError: they leave none.
    """
    kept = [each for each in classes if options.backend in (None, each.backend or "default")]
    wanted, unwanted = set(options.tags or ()), set(options.exclude_tags or ())
    tags = {each: set().union(*(getattr(work, "locust_tag_set", ()) for work in each.tasks)) for each in kept}
    kept = [each for each in kept if (not wanted or tags[each] & wanted) and not tags[each] & unwanted]
    if not kept:
        raise SetupError(
            f"no class of users is left by --backend {options.backend}, --tags {sorted(wanted)}, --exclude-tags "
            f"{sorted(unwanted)} and {[each.__name__ for each in classes]}; the tags are {', '.join(BACKENDS)}"
        )
    return kept


def prepare(environment: Environment) -> dict[str | None, Inference]:
    """Ask the server for the model's widths, and try each class's request once, without counting any of it.

    Raises:
        SetupError: the server does not answer as expected.
    """
    options: Any = environment.parsed_options
    if not environment.host:
        raise SetupError("--host: expected the server's address, such as http://127.0.0.1:8000")
    if options.rows < 1:
        raise SetupError(f"--rows: expected a whole number of at least 1, got {options.rows}")
    try:
        address(environment.host)
    except TargetError as error:
        raise SetupError(str(error).replace("--url", "--host")) from error
    if (options.num_users or 0) < 0:
        raise SetupError(f"--users: expected a whole number of at least 0, got {options.num_users}")
    if not (options.key.isascii() and options.key.isprintable()):
        raise SetupError("--key: expected a key of printable ASCII characters, as a header carries them")
    session = FastHttpSession(environment.host, EventHook(), user=None)  # type: ignore[no-untyped-call]
    headers = {"accept-encoding": "identity"} | ({"x-api-key": options.key} if options.key else {})

    def checked(what: str, response: Any) -> Any:
        try:
            require_ok(response)
        except ReplyError as error:
            raise SetupError(f"{environment.host}: {what}: {error}") from error
        return response

    reply = session.get(f"/v2/models/{quote(options.model, safe='')}", headers=headers)
    metadata = checked(f"--model {options.model}", reply)
    model = checked("/model", session.get("/model", headers=headers))
    try:
        width_in, width_out = (int(metadata.json()[side][0]["shape"][-1]) for side in ("inputs", "outputs"))
        most_rows = int(model.json()["max_request_rows"])
    except UNREADABLE as error:
        raise SetupError(f"{environment.host}: expected this project's server, got other metadata: {error}") from error
    if not 0 < min(width_in, width_out) <= max(width_in, width_out) <= MOST_NUMBERS:
        told = f"{width_in} and {width_out}"
        raise SetupError(f"{environment.host}: expected rows of 1 to {MOST_NUMBERS} numbers, got {told}")
    if options.rows > most_rows:
        raise SetupError(f"--rows {options.rows}: the server takes at most {most_rows} rows a request")
    rows = np.random.default_rng(0).uniform(-1, 1, (options.rows, width_in)).astype(np.float32)
    requests = {}
    for each in environment.user_classes:
        backend: str | None = each.backend  # type: ignore[attr-defined]
        sent = inference(options.wire, options.model, rows, width_out, backend, options.key)
        body: Any = sent.body
        response = checked(f"users of {each.__name__}", session.post(sent.path, data=body, headers=sent.headers))
        try:
            outputs_of(sent, response.headers, response.content)
            server_times_ms(response.headers)
        except ReplyError as error:
            raise SetupError(f"{environment.host}: users of {each.__name__}: {error}") from error
        requests[backend] = sent
    return requests


@events.init.add_listener
def select_users(environment: Environment, **_: object) -> None:
    """Keep the chosen classes; without a web page, check now that the server has what they ask for."""
    options: Any = environment.parsed_options
    try:
        environment.user_classes[:] = selected(environment.user_classes, options)
        available: dict[str, Any] = environment.available_user_classes or {}
        if options.backend or options.tags or options.exclude_tags:
            for name in [name for name, each in available.items() if each not in environment.user_classes]:
                del available[name]
        if options.headless and not isinstance(environment.runner, WorkerRunner):
            prepare(environment)
        if options.scenario and not isinstance(environment.runner, WorkerRunner):
            seconds = float(options.run_time or SCENARIOS[options.scenario].seconds)
            profile = PROFILES[options.scenario]
            environment.shape_class = shape.ProfileShape(profile, options.num_users or 1, seconds)
            environment.shape_class.runner = environment.runner
    except SetupError as error:
        logging.getLogger(__name__).error("%s", error)
        sys.exit(SETUP_FAILED)


@events.test_start.add_listener
def prepare_users(environment: Environment, **_: object) -> None:
    """Make the users' requests; if that fails, say so once, and let each user end before it sends anything."""
    environment.process_exit_code = None
    try:
        environment.inferences = prepare(environment)  # type: ignore[attr-defined]
    except SetupError as error:
        environment.inferences = {}  # type: ignore[attr-defined]
        environment.process_exit_code = SETUP_FAILED
        logging.getLogger(__name__).error("%s", error)
        if environment.runner is not None:
            environment.runner.log_exception("local", str(error), "")
