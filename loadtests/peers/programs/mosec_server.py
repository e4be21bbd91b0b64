"""mosec: a Rust front over worker processes, with dynamic batching.

As its README advises under Configuration and Performance tuning (https://github.com/mosecorg/mosec#performance-tuning):
dynamic batching, with a wait no longer than a batch takes, as far as its unit, the millisecond, allows; the JSON codec
replaced by a faster one, orjson, or by bytes; threads set for each worker. A batch leaves at once when it is full, so
that its size has to stay under the number of connections to be of use; of 8, 16, 32 and 64, these did best.
"""

from typing import Any

from mosec import Server, Worker

from loadtests.peers.programs.model import Model, Rows, Setting, from_json, to_json

MAX_BATCH_REQUESTS = 8 if Setting.from_environment().model == "digits" else 32  # by what a batch costs
MAX_WAIT_MS = 1
WORKERS = 1


class Inference(Worker):  # type: ignore[misc]
    """The only stage."""

    def __init__(self) -> None:
        super().__init__()
        self._setting = Setting.from_environment()
        self._model = Model(self._setting, MAX_BATCH_REQUESTS)
        self.resp_mime_type = "application/octet-stream" if self._setting.is_binary else "application/json"

    def deserialize(self, data: bytes) -> Rows:
        """Read a request's body."""
        return self._model.from_bytes(data) if self._setting.is_binary else from_json(data)

    def forward(self, data: list[Rows]) -> list[Rows]:
        """Run a batch of requests."""
        return self._model.batch(data)

    def serialize(self, data: Any) -> bytes:
        """Write a reply's body."""
        return data.tobytes() if self._setting.is_binary else to_json(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Inference,
        num=WORKERS,
        max_batch_size=MAX_BATCH_REQUESTS,
        max_wait_time=MAX_WAIT_MS,
        env=[{"OMP_NUM_THREADS": str(Setting.from_environment().threads)}] * WORKERS,
        route="/predict",
    )
    server.run()
