"""The Open Inference Protocol, version 2, as JSON over HTTP.

Source: https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md.
"""

import math
from typing import Annotated, Any

from pydantic import Field

from service.errors import BadRequestError, TooLargeError
from service.schemas import (
    MAX_ID_CHARACTERS,
    NESTED_NUMBERS,
    Body,
    InferenceRequest,
    Rows,
    parse_json,
    rows_from_lists,
    validate,
)

INPUT = "input"
OUTPUT = "output"
DATATYPES = ("FP32", "FP64", "FP16")
MAX_DIMENSION = 1 << 40


class InferParameters(Body):
    """The request parameters that this server acts on; others are refused, since ignoring them would be silent."""

    backend: str | None = Field(None, description="eager, compiled or fused; left out: the server's default")
    timeout: int | None = Field(None, gt=0, le=3_600_000_000, description="give up after this many microseconds")


class Parameters(Body):
    """The parameters of one tensor: none that JSON tensors take."""


class RequestInput(Body):
    """The input tensor."""

    name: str
    shape: list[Annotated[int, Field(ge=0, le=MAX_DIMENSION)]] = Field(min_length=1, max_length=16)
    datatype: str
    parameters: Parameters | None = None
    data: Annotated[Any, Field(json_schema_extra=NESTED_NUMBERS)]


class RequestOutput(Body):
    """An output tensor asked for."""

    name: str
    parameters: Parameters | None = None


class InferBody(Body):
    """Body of `POST /v2/models/{name}/infer`."""

    id: str | None = Field(None, max_length=MAX_ID_CHARACTERS)
    parameters: InferParameters | None = None
    inputs: list[RequestInput]
    outputs: list[RequestOutput] | None = None


class ResponseOutput(Body):
    """The output tensor, data flat and row-major."""

    name: str
    shape: list[int]
    datatype: str
    data: Annotated[Any, Field(json_schema_extra={"type": "array", "items": {"type": "number"}})]


class InferReply(Body):
    """Reply of `POST /v2/models/{name}/infer`."""

    model_name: str
    id: str | None = None
    parameters: dict[str, str] | None = None
    outputs: list[ResponseOutput]


class ServerMetadata(Body):
    """Reply of `GET /v2`."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Body):
    """One tensor of the model; -1 stands for any number of rows."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Body):
    """Reply of `GET /v2/models/{name}`."""

    name: str
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Live(Body):
    """Reply of `GET /v2/health/live`."""

    live: bool


class Ready(Body):
    """Reply of `GET /v2/health/ready`."""

    ready: bool


class ModelReady(Body):
    """Reply of `GET /v2/models/{name}/ready`."""

    name: str
    ready: bool


def model_metadata(name: str, width_in: int, width_out: int) -> ModelMetadata:
    """Describe the model's one input and one output."""
    return ModelMetadata(
        name=name,
        platform="pytorch_mlp",
        inputs=[TensorMetadata(name=INPUT, datatype="FP32", shape=[-1, width_in])],
        outputs=[TensorMetadata(name=OUTPUT, datatype="FP32", shape=[-1, width_out])],
    )


def parse_infer(body: bytes | bytearray, width: int, max_rows: int) -> InferenceRequest:
    """Read the body of `POST /v2/models/{name}/infer`.

    Raises:
        BadRequestError: the body is not one that the protocol or the model takes.
        TooLargeError: more than `max_rows` rows.
    """
    parsed = validate(InferBody, parse_json(body))
    names = [tensor.name for tensor in parsed.inputs]
    if names != [INPUT]:
        raise BadRequestError(f"inputs: expected one tensor, named {INPUT!r}, got {names}")
    wanted = [tensor.name for tensor in parsed.outputs or []]
    if wanted not in ([], [OUTPUT]):
        raise BadRequestError(f"outputs: expected none or one tensor, named {OUTPUT!r}, got {wanted}")
    tensor = parsed.inputs[0]
    rows = _rows(tensor, width, max_rows)
    parameters = parsed.parameters or InferParameters(backend=None, timeout=None)
    timeout_s = None if parameters.timeout is None else parameters.timeout / 1e6
    return InferenceRequest(rows, tuple(tensor.shape[:-1]), parameters.backend, timeout_s, parsed.id)


def _rows(tensor: RequestInput, width: int, max_rows: int) -> Rows:
    if tensor.datatype not in DATATYPES:
        raise BadRequestError(f"inputs[0].datatype: expected one of {', '.join(DATATYPES)}, got {tensor.datatype!r}")
    if tensor.shape[-1] != width:
        raise BadRequestError(f"inputs[0].shape: expected (..., {width}), got {tuple(tensor.shape)}")
    count = math.prod(tensor.shape[:-1])
    if count > max_rows:
        raise TooLargeError(f"inputs[0].shape: expected at most {max_rows} rows in one request, got {count}")
    if count == 0:
        raise BadRequestError(f"inputs[0].shape: expected at least one row, got {tuple(tensor.shape)}")
    data = tensor.data
    if isinstance(data, list) and data and not isinstance(data[0], list):
        if len(data) != count * width:
            raise BadRequestError(
                f"inputs[0].data: expected {count * width} numbers for shape {tuple(tensor.shape)}, got {len(data)}"
            )
        return rows_from_lists(data, len(data), 1, "inputs[0].data")[0].reshape(count, width)
    rows, shape = rows_from_lists(data, width, max_rows, "inputs[0].data")
    if (*shape, width) != tuple(tensor.shape):
        raise BadRequestError(
            f"inputs[0].data: expected it flat or nested as shape {tuple(tensor.shape)} says, got {(*shape, width)}"
        )
    return rows
