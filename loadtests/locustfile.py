"""Closed-loop load from locust: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000`.

Each user sends one request after another to one backend; the statistics keep the backends apart. The flags below also
exist as fields of the web page.
"""

import random
from typing import Any

from locust import FastHttpUser, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

BACKENDS = ("default", "eager", "compiled", "fused")


@events.init_command_line_parser.add_listener
def add_flags(parser: LocustArgumentParser) -> None:
    """Add this file's flags to locust's own."""
    parser.add_argument("--backend", choices=BACKENDS, default="default", help="backend that requests ask for")
    parser.add_argument("--model", default="digits", help="the served model's name")
    parser.add_argument("--rows", type=int, default=1, help="rows in each request")
    parser.add_argument("--key", default="", env_var="MLP_API_KEY", is_secret=True, help="the server's key")


class Caller(FastHttpUser):
    """One caller: the model's width is read from the server, the rows are random and the same in every run."""

    wait_time = between(0, 0)
    environment: Environment

    def on_start(self) -> None:
        """Make one payload."""
        options: Any = self.environment.parsed_options
        self.headers = {"accept-encoding": "identity"} | ({"x-api-key": options.key} if options.key else {})
        metadata: Any = self.client.get(f"/v2/models/{options.model}", headers=self.headers).json()
        width = int(metadata["inputs"][0]["shape"][-1])
        self.path = "/predict" if options.backend == "default" else f"/predict/{options.backend}"
        rows = random.Random(0)  # noqa: S311  a payload, no secret
        self.payload = {"inputs": [[rows.uniform(-1, 1) for _ in range(width)] for _ in range(options.rows)]}

    @task
    def predict(self) -> None:
        """Send one request; anything but 200 counts as a failure."""
        self.client.post(self.path, json=self.payload, headers=self.headers)
