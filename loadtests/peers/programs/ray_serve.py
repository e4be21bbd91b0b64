"""Ray Serve: one replica behind Ray's HTTP proxy, with dynamic request batching, on a Ray of its own.

As its documentation advises: `serve.batch` (https://docs.ray.io/en/latest/serve/advanced-guides/dyn-req-batch.html);
`RAY_SERVE_THROUGHPUT_OPTIMIZED`, `async` methods, a raised `max_ongoing_requests`, and cores reserved for the replica,
which is also what sets its `OMP_NUM_THREADS` (https://docs.ray.io/en/latest/serve/advanced-guides/performance.html).
"""

import os
import signal
import sys
import tempfile

os.environ |= {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_USAGE_STATS_ENABLED": "0"}  # read by the imports

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from loadtests.peers.programs.model import Model, Rows, Setting, from_json, to_json

MAX_BATCH_REQUESTS = 64
BATCH_WAIT_S = 0.001
SETTING = Setting.from_environment()


@serve.deployment(num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": SETTING.threads})
class Inference:
    """The deployment."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.model = Model(setting, MAX_BATCH_REQUESTS)

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        body = await request.body()
        if self.setting.is_binary:
            outputs = await self.predict(self.model.from_bytes(body))
            return Response(outputs.tobytes(), media_type="application/octet-stream")
        return Response(to_json(await self.predict(from_json(body))), media_type="application/json")

    @serve.batch(max_batch_size=MAX_BATCH_REQUESTS, batch_wait_timeout_s=BATCH_WAIT_S)  # type: ignore[untyped-decorator]
    async def predict(self, requests: list[Rows]) -> list[Rows]:
        """Run a batch of requests."""
        return self.model.batch(requests)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        ray.init(address="local", num_cpus=SETTING.threads, include_dashboard=False, _temp_dir=directory)
        try:
            http_options = {"host": "127.0.0.1", "port": SETTING.port}
            serve.start(http_options=http_options, logging_config={"enable_access_log": False})
            serve.run(Inference.bind(SETTING), route_prefix="/predict")  # type: ignore[attr-defined]
            signal.pause()
        finally:
            ray.shutdown()
