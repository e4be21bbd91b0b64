"""Stock LitServe: none of this project's request path, batching as its documentation has it.

https://lightning.ai/docs/litserve/features/batching: `max_batch_size`, and a `batch_timeout` that is short beside a
batch; `predict` gets the whole batch at once through `batch` and `unbatch`. JSON is LitServe's own, as is everything
between socket and model. Bytes come in by the type that `decode_request` declares, and go out as a `Response`:
https://lightning.ai/docs/litserve/features/request-response-format.
"""

from typing import Annotated, Any

import litserve as ls
import numpy as np
from fastapi import Body, Response

from loadtests.peers.programs.model import Model, Rows, Setting

MAX_BATCH_REQUESTS = 64
BATCH_TIMEOUT_S = 0.001


class JSONInference(ls.LitAPI):  # type: ignore[misc]
    """Takes and answers JSON."""

    def setup(self, device: str) -> None:  # noqa: ARG002  LitServe's signature
        """Load the model."""
        self.model = Model(Setting.from_environment(), MAX_BATCH_REQUESTS)

    def decode_request(self, request: dict[str, Any]) -> Rows:
        """Read a request."""
        return np.asarray(request["inputs"], np.float32)

    def batch(self, inputs: list[Rows]) -> list[Rows]:
        """Leave the requests apart: they may have several rows each."""
        return inputs

    def predict(self, x: list[Rows]) -> list[Rows]:
        """Run a batch of requests."""
        return self.model.batch(x)

    def unbatch(self, output: list[Rows]) -> list[Rows]:
        """Return the share of each request."""
        return output

    def encode_response(self, output: Rows) -> Any:
        """Return a reply."""
        return {"outputs": output.tolist()}


class BinaryInference(JSONInference):
    """Takes and answers float32 bytes."""

    def decode_request(self, request: Annotated[bytes, Body()]) -> Rows:  # type: ignore[override]
        """Read a request."""
        return self.model.from_bytes(request)

    def encode_response(self, output: Rows) -> Any:
        """Return a reply."""
        return Response(output.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    setting = Setting.from_environment()
    api = BinaryInference if setting.is_binary else JSONInference
    server = ls.LitServer(
        api(max_batch_size=MAX_BATCH_REQUESTS, batch_timeout=BATCH_TIMEOUT_S, api_path="/predict"),
        accelerator="cpu",
        workers_per_device=1,
    )
    server.run(host="127.0.0.1", port=setting.port, num_api_servers=1, generate_client_file=False, log_level="warning")
