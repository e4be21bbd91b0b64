"""BentoML: a service with adaptive batching.

As https://docs.bentoml.com/en/latest/get-started/adaptive-batching.html advises: a `batchable` endpoint over a numpy
array, which BentoML joins and splits along its rows; a `max_latency_ms` that leaves its dispatcher room, since it
answers 503 where that cannot be kept. One worker, access log off. A batchable endpoint takes JSON; raw bytes go to
endpoints without batching only.
"""

import os
import sys

import bentoml
import numpy as np

from loadtests.peers.programs.model import Model, Setting

MAX_BATCH_REQUESTS = 64
MAX_LATENCY_MS = 1000


@bentoml.service(workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Inference:
    """The service."""

    def __init__(self) -> None:
        self.model = Model(Setting.from_environment(), MAX_BATCH_REQUESTS)

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH_REQUESTS, max_latency_ms=MAX_LATENCY_MS)  # type: ignore[untyped-decorator]
    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Run the rows of a batch."""
        return self.model.outputs(inputs.astype(np.float32))


if __name__ == "__main__":
    port = str(Setting.from_environment().port)
    served = "loadtests.peers.programs.bentoml_service:Inference"
    command = [sys.executable, "-m", "bentoml", "serve", served, "--host", "127.0.0.1", "--port", port]
    os.execv(sys.executable, command)  # noqa: S606  the documented way to start it
