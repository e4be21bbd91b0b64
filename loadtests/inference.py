"""The body of one inference request and the checks of its reply, as JSON or in the protocol's binary tensor extension.

Source: https://github.com/kserve/open-inference-protocol; the extension:
https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from loadtests.errors import UNREADABLE, LoadTestError
from loadtests.evidence import OWN_CODES

WIRES = ("json", "binary")
LENGTH_HEADER = "inference-header-content-length"
STAGE_HEADERS = ("x-queue-us", "x-batch-us", "x-compute-us", "x-encode-us")
CODE = re.compile("[a-z][a-z0-9_]{0,39}")
MOST_DIGITS = 15  # of a number in a header
SERVER_TIMES = {"QUEUE": "x-queue-us", "COMPUTE": "x-compute-us"}


class ReplyError(LoadTestError):
    """A reply that is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Inference:
    """One request, made once and sent again and again."""

    path: str
    name: str  # what the statistics call it; tells the backends apart
    headers: dict[str, str]
    body: bytes
    backend: str | None
    rows: int
    width_out: int

    @property
    def is_binary(self) -> bool:
        """True where the tensors travel as bytes."""
        return LENGTH_HEADER in self.headers


def inference(
    wire: str, model: str, rows: NDArray[np.float32], width_out: int, backend: str | None, key: str = ""
) -> Inference:
    """Return the request that asks `backend`, or the server's default, for the outputs of `rows` (n, width).

    No compression is asked for, so that what is timed is the server and not gzip.
    """
    headers = {"accept-encoding": "identity"} | ({"x-api-key": key} if key else {})
    if wire == "json":
        path = "/predict" if backend is None else f"/predict/{backend}"
        headers["content-type"] = "application/json"
        body = json.dumps({"inputs": rows.tolist()}).encode()
        return Inference(path, path, headers, body, backend, len(rows), width_out)
    path = f"/v2/models/{quote(model, safe='')}/infer"
    data = rows.astype("<f4").tobytes()
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "input",
                    "shape": list(rows.shape),
                    "datatype": "FP32",
                    "parameters": {"binary_data_size": len(data)},
                }
            ],
            "parameters": {"binary_data_output": True} | ({} if backend is None else {"backend": backend}),
        }
    ).encode()
    headers |= {"content-type": "application/octet-stream", LENGTH_HEADER: str(len(head))}
    return Inference(path, f"{path} {backend or 'default'}", headers, head + data, backend, len(rows), width_out)


def require_answered(request: Inference, headers: Mapping[str, str], body: bytes) -> None:
    """Check of a reply with status 200 what can be checked quickly.

    Raises:
        ReplyError: another backend answered, or the tensor is incomplete.
    """
    ran = headers.get("x-backend")
    if ran is None or request.backend not in (None, ran):
        raise ReplyError(f"expected header x-backend: {request.backend or 'any'}, got {ran}")
    if not request.is_binary:
        return
    if LENGTH_HEADER not in headers:
        raise ReplyError(f"expected header {LENGTH_HEADER}, got a reply without it")
    size, expected = len(body) - whole_header(headers, LENGTH_HEADER), request.rows * request.width_out * 4
    if size != expected:
        raise ReplyError(f"expected {expected} bytes of tensor after the reply's JSON, got {size}")


def outputs_of(request: Inference, headers: Mapping[str, str], body: bytes) -> NDArray[np.float32]:
    """Return the outputs (n, width_out) of a reply.

    Raises:
        ReplyError: the reply holds something else.
    """
    require_answered(request, headers, body)
    try:
        if request.is_binary:
            outputs = np.frombuffer(body, "<f4", offset=int(headers[LENGTH_HEADER])).astype(np.float32)
            return outputs.reshape(request.rows, request.width_out)
        outputs = np.asarray(json.loads(body)["outputs"], np.float32)
    except UNREADABLE as error:
        raise ReplyError(f"expected {request.rows} rows of {request.width_out} outputs, got {error}") from error
    if outputs.shape != (request.rows, request.width_out):
        raise ReplyError(f"expected {request.rows} rows of {request.width_out} outputs, got shape {outputs.shape}")
    return outputs


def server_times_ms(headers: Mapping[str, str]) -> dict[str, float]:
    """Return what the server says it spent on a request, in milliseconds: `QUEUE` waiting, `COMPUTE` computing.

    Raises:
        ReplyError: a header is missing, or holds something else.
    """
    missing = [header for header in SERVER_TIMES.values() if header not in headers]
    if missing:
        raise ReplyError(f"expected headers {', '.join(missing)}, got a reply without")
    return {kind: whole_header(headers, header) / 1e3 for kind, header in SERVER_TIMES.items()}


def stages_of(headers: dict[str, str]) -> tuple[tuple[float, ...], str]:
    """Return the milliseconds of each stage that the server reports, and the rows it computed at once.

    Raises:
        ReplyError: a header is missing, or holds something else.
    """
    try:
        stages = tuple(whole_header(headers, name) / 1e3 for name in STAGE_HEADERS)
        return stages, str(whole_header(headers, "x-batch-rows"))
    except KeyError as error:
        needed = ", ".join((*STAGE_HEADERS, "x-batch-rows"))
        raise ReplyError(
            f"expected headers {needed}, got a reply without {error.args[0]}; the server is of another version"
        ) from error


def whole_header(headers: Mapping[str, str], name: str) -> int:
    """Return the whole number that a header holds.

    Raises:
        KeyError: it is missing.
        ReplyError: it holds something else.
    """
    value = headers[name]
    if not (value.isascii() and value.isdecimal() and len(value) <= MOST_DIGITS):
        raise ReplyError(f"expected a whole number in header {name}, got {value[:80]!r}")
    return int(value)


@lru_cache(maxsize=256)
def code_of(status: int, body: bytes) -> str:
    """Return the code of an error in the server's form, or one that tells its status, such as `http_502`."""
    try:
        document: Any = json.loads(body)
        code = document["code"]
        if CODE.fullmatch(code) and code not in OWN_CODES:
            return str(code)
    except UNREADABLE:
        pass
    return f"http_{status}"
