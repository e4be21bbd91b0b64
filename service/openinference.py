"""The Open Inference Protocol, version 2, over HTTP: JSON, and the binary tensor extension in both directions.

Source: https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md;
https://github.com/triton-inference-server/server, docs/protocol/extension_binary_data.md.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
import orjson
from pydantic import Field

from service.errors import BadRequestError, NotFoundError, TooLargeError
from service.schemas import (
    MAX_ID_CHARACTERS,
    NESTED_NUMBERS,
    Body,
    InferenceRequest,
    Rows,
    parse_json,
    rows_from_lists,
    shortened,
    validate,
)

INPUT = "input"
OUTPUT = "output"
EXTENSIONS = ("binary_tensor_data",)
LENGTH_HEADER = b"inference-header-content-length"
DATATYPES = ("FP32", "FP64", "FP16")  # as JSON numbers
FP16_LARGEST = 65504
ITEM_BYTES = {"FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8}  # as binary data, little-endian
MAX_DIMENSION = 1 << 40
REMEMBERED_BYTES = 1024


class InferParameters(Body):
    """The request parameters that this server acts on; others are refused rather than silently ignored."""

    backend: str | None = Field(None, description="eager, compiled or fused; left out: the server's default")
    timeout: int | None = Field(None, gt=0, le=3_600_000_000, description="give up after this many microseconds")
    binary_data_output: bool = Field(False, description="send the outputs as binary data after the JSON part")


class InputParameters(Body):
    """The parameters of the input tensor."""

    binary_data_size: int | None = Field(None, ge=0, description="bytes of this tensor after the JSON part")


class OutputParameters(Body):
    """The parameters of an output tensor asked for."""

    binary_data: bool | None = Field(None, description="send it as binary data; left out: binary_data_output")


class RequestInput(Body):
    """The input tensor."""

    name: str = Field(description="the tensor's name: input")
    shape: list[Annotated[int, Field(ge=0, le=MAX_DIMENSION)]] = Field(
        min_length=1, max_length=16, description="the rows themselves counted, no -1 as in the metadata"
    )
    datatype: str = Field(description="FP32, FP64, FP16, or, as binary data, BF16")
    parameters: InputParameters | None = Field(None, description="of the tensor")
    data: Annotated[Any, Field(json_schema_extra=NESTED_NUMBERS)] = None


class RequestOutput(Body):
    """An output tensor asked for."""

    name: str = Field(description="the tensor's name: output")
    parameters: OutputParameters | None = Field(None, description="of the tensor")


class InferBody(Body):
    """Body of `POST /v2/models/{name}/infer`."""

    id: str | None = Field(None, max_length=MAX_ID_CHARACTERS, description="echoed in the reply")
    model_name: str | None = Field(None, description="the path's; KServe's client sends it, the protocol does not")
    parameters: InferParameters | None = Field(None, description="of the request")
    inputs: list[RequestInput] = Field(description="the one input tensor")
    outputs: list[RequestOutput] | None = Field(None, description="the outputs asked for; left out: the one there is")


class ResponseOutput(Body):
    """The output tensor: data flat and row-major, or the size of its binary data after the JSON part."""

    name: str = Field(description="output")
    shape: list[int] = Field(description="the leading dimensions of the input, and the output's width")
    datatype: str = Field(description="FP32")
    parameters: InputParameters | None = Field(
        None, description="of the tensor; left out where the data stands in JSON"
    )
    data: Annotated[
        Any,
        Field(
            description="flat, row-major; left out where the data is binary",
            json_schema_extra={"type": "array", "items": {"type": "number"}},
        ),
    ] = None


class InferReply(Body):
    """Reply of `POST /v2/models/{name}/infer`."""

    model_name: str = Field(description="the path's")
    id: str | None = Field(None, description="the request's")
    parameters: dict[str, str] | None = Field(None, description="the backend and the implementation that ran")
    outputs: list[ResponseOutput] = Field(description="the one output tensor")


class ServerMetadata(Body):
    """Reply of `GET /v2`."""

    name: str = Field(description="the server's")
    version: str = Field(description="the server's")
    extensions: list[str] = Field(description="the protocol extensions it has")


class TensorMetadata(Body):
    """One tensor of the model; -1 stands for any number of rows."""

    name: str = Field(description="input or output")
    datatype: str = Field(description="FP32; others are converted")
    shape: list[int] = Field(description="-1 stands for any number of rows")


class ModelMetadata(Body):
    """Reply of `GET /v2/models/{name}`."""

    name: str = Field(description="the model's")
    platform: str = Field(description="what runs the model")
    inputs: list[TensorMetadata] = Field(description="the one input tensor")
    outputs: list[TensorMetadata] = Field(description="the one output tensor")


class Live(Body):
    """Reply of `GET /v2/health/live`."""

    live: bool = Field(description="true")


class Ready(Body):
    """Reply of `GET /v2/health/ready`."""

    ready: bool = Field(description="true")


class ModelReady(Body):
    """Reply of `GET /v2/models/{name}/ready`."""

    name: str = Field(description="the model's")
    ready: bool = Field(description="true")


def model_metadata(name: str, width_in: int, width_out: int) -> ModelMetadata:
    """Describe the model's one input and one output."""
    return ModelMetadata(
        name=name,
        platform="pytorch_mlp",
        inputs=[TensorMetadata(name=INPUT, datatype="FP32", shape=[-1, width_in])],
        outputs=[TensorMetadata(name=OUTPUT, datatype="FP32", shape=[-1, width_out])],
    )


def no_such_model(name: str, served: str) -> NotFoundError:
    """Return what a request for a model that is not here is refused with."""
    return NotFoundError(f"no model {shortened(name)} here; this server has {served!r}")


@dataclass(slots=True)
class InferRequest(InferenceRequest):
    """An inference request of the protocol; `is_binary_reply` says how the output is wanted."""

    is_binary_reply: bool = False


def parse_infer(
    body: bytes | bytearray, width: int, max_rows: int, json_bytes: int | None = None, model: str | None = None
) -> InferRequest:
    """Read the body of `POST /v2/models/{name}/infer`.

    Args:
        body: the JSON part, and after it the binary data of the input, if it has any.
        width: the model's input width.
        max_rows: most rows accepted.
        json_bytes: length of the JSON part, if the header gives it.
        model: the name in the path, which the body may repeat.

    Raises:
        BadRequestError: the body is not valid for the protocol or the model.
        TooLargeError: more than `max_rows` rows.
    """
    if json_bytes is not None and json_bytes > len(body):
        raise BadRequestError(
            f"Inference-Header-Content-Length: expected at most the body's {len(body)} bytes, got {json_bytes}"
        )
    if json_bytes is None:
        plan, binary = _plan(body, width, max_rows, model), memoryview(b"")
    else:
        json_part, binary = bytes(body[:json_bytes]), memoryview(body)[json_bytes:]
        plan = (_remembered if json_bytes <= REMEMBERED_BYTES else _plan)(json_part, width, max_rows, model)
    if plan.binary_bytes is not None:
        rows = _binary_rows(plan, binary, width)
    else:
        rows = _rows(plan.tensor, width, max_rows)
        if len(binary):
            raise BadRequestError(
                f"expected nothing after the JSON part, since no input is binary, got {len(binary)} bytes"
            )
    return InferRequest(rows, plan.shape, plan.backend, plan.timeout_s, plan.id, plan.is_binary_reply)


class _Plan(NamedTuple):
    """What a body's JSON part says; it is never changed.

    Attributes:
        tensor: the input.
        shape: its leading dimensions.
        binary_bytes: how many bytes of it follow the JSON part; None where its data is in there.
        backend, timeout_s, id, is_binary_reply: as in the request.
    """

    tensor: RequestInput
    shape: tuple[int, ...]
    binary_bytes: int | None
    backend: str | None
    timeout_s: float | None
    id: str | None
    is_binary_reply: bool


def _plan(json_part: bytes | bytearray, width: int, max_rows: int, model: str | None) -> _Plan:
    """Read the JSON part, and check what it says about the data that follows against its own shape."""
    parsed = validate(InferBody, parse_json(json_part))
    if parsed.model_name is not None and parsed.model_name != model:
        raise BadRequestError(f"model_name: the path has {model!r}, the body {shortened(parsed.model_name)}")
    names = [tensor.name for tensor in parsed.inputs[:8]]
    if names != [INPUT]:
        raise BadRequestError(f"inputs: expected one tensor, named {INPUT!r}, got {shown(names)}")
    wanted = [tensor.name for tensor in (parsed.outputs or [])[:8]]
    if wanted not in ([], [OUTPUT]):
        raise BadRequestError(f"outputs: expected none or one tensor, named {OUTPUT!r}, got {shown(wanted)}")
    tensor = parsed.inputs[0]
    parameters = parsed.parameters or InferParameters.model_construct()
    is_binary_reply = parameters.binary_data_output
    for output in parsed.outputs or []:
        if output.parameters and output.parameters.binary_data is not None:
            is_binary_reply = output.parameters.binary_data
    return _Plan(
        tensor=tensor,
        shape=tuple(tensor.shape[:-1]),
        binary_bytes=_binary_bytes(tensor, width, max_rows),
        backend=parameters.backend,
        timeout_s=None if parameters.timeout is None else parameters.timeout / 1e6,
        id=parsed.id,
        is_binary_reply=is_binary_reply,
    )


_remembered = lru_cache(maxsize=256)(_plan)
"""Caches the plans of binary requests, since a client's JSON parts are mostly alike."""


def reply_head(model: str, request_id: str | None, backend: str, implementation: str) -> dict[str, Any]:
    """Return the fields of a reply other than its outputs."""
    name = {} if request_id is None else {"id": request_id}
    return {"model_name": model, **name, "parameters": {"backend": backend, "implementation": implementation}}


@lru_cache(maxsize=256)
def binary_head(
    model: str, request_id: str | None, backend: str, implementation: str, shape: tuple[int, ...], size: int
) -> bytes:
    """Return the JSON part of a reply whose output of `size` bytes follows it; those of one client are mostly alike."""
    output = {"name": OUTPUT, "datatype": "FP32", "shape": shape, "parameters": {"binary_data_size": size}}
    return orjson.dumps(reply_head(model, request_id, backend, implementation) | {"outputs": [output]})


def shown(names: list[str]) -> str:
    """Show a few names in an error sentence."""
    return f"[{', '.join(shortened(name) for name in names)}]"


def _count(tensor: RequestInput, width: int, max_rows: int) -> int:
    """Return the number of rows that a shape stands for, checked against the bounds."""
    if tensor.shape[-1] != width:
        raise BadRequestError(f"inputs[0].shape: expected (..., {width}), got {tuple(tensor.shape)}")
    count = math.prod(tensor.shape[:-1])
    if count > max_rows:
        raise TooLargeError(f"inputs[0].shape: expected at most {max_rows} rows in one request, got {count}")
    if count == 0:
        raise BadRequestError(f"inputs[0].shape: expected at least one row, got {tuple(tensor.shape)}")
    return count


def _binary_bytes(tensor: RequestInput, width: int, max_rows: int) -> int | None:
    """Return how many bytes of the tensor follow the JSON part; None where its data is in there."""
    size = tensor.parameters.binary_data_size if tensor.parameters else None
    if size is None:
        return None
    if tensor.data is not None:
        raise BadRequestError("inputs[0]: expected data or binary_data_size, got both")
    if tensor.datatype not in ITEM_BYTES:
        raise BadRequestError(
            f"inputs[0].datatype: expected one of {', '.join(ITEM_BYTES)}, got {shortened(tensor.datatype)}"
        )
    expected = _count(tensor, width, max_rows) * width * ITEM_BYTES[tensor.datatype]
    if size != expected:
        raise BadRequestError(
            f"inputs[0].parameters.binary_data_size: expected {expected} for {tensor.datatype} of shape "
            f"{tuple(tensor.shape)}, got {size}"
        )
    return size


def _binary_rows(plan: _Plan, binary: memoryview, width: int) -> Rows:
    """Read rows from binary data; FP32 without a copy. NaN and infinity are accepted, as the format carries them.

    Raises:
        BadRequestError: the number of bytes is not the plan's, or a finite number is beyond float32.
    """
    if len(binary) != plan.binary_bytes:
        raise BadRequestError(
            f"expected {plan.binary_bytes} bytes of binary data after the JSON part, got {len(binary)}"
        )
    match plan.tensor.datatype:
        case "BF16":  # the upper half of a float32
            values = (np.frombuffer(binary, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        case "FP16":
            values = np.frombuffer(binary, dtype="<f2").astype(np.float32)
        case "FP64":
            wide = np.frombuffer(binary, dtype="<f8")
            with np.errstate(over="ignore", invalid="ignore"):
                values = wide.astype(np.float32)
            is_lost = np.isfinite(wide) & ~np.isfinite(values)
            if is_lost.any():
                raise BadRequestError(
                    f"inputs[0]: expected FP64 numbers within float32's range, up to 3.4e38, got {wide[is_lost][0]:g}"
                )
        case _:
            values = np.frombuffer(binary, dtype="<f4")
    return values.reshape(-1, width)


def json_length(value: bytes) -> int:
    """Read the header that gives the length of the JSON part.

    Raises:
        BadRequestError: it is not a number.
    """
    if not value.isdigit() or len(value) > 18:
        raise BadRequestError(
            f"Inference-Header-Content-Length: expected a number of bytes, got {shortened(value.decode('latin-1'))}"
        )
    return int(value)


def _rows(tensor: RequestInput, width: int, max_rows: int) -> Rows:
    if tensor.datatype not in DATATYPES:
        raise BadRequestError(
            f"inputs[0].datatype: expected one of {', '.join(DATATYPES)}, got {shortened(tensor.datatype)}"
        )
    if tensor.data is None:
        raise BadRequestError("inputs[0].data: this field is required, or parameters.binary_data_size and binary data")
    count = _count(tensor, width, max_rows)
    data = tensor.data
    if isinstance(data, list) and data and not isinstance(data[0], list):
        if len(data) != count * width:
            raise BadRequestError(
                f"inputs[0].data: expected {count * width} numbers for shape {tuple(tensor.shape)}, got {len(data)}"
            )
        flat, _ = rows_from_lists(data, len(data), 1, "inputs[0].data")
        return _in_range(tensor, flat.reshape(count, width))
    rows, shape = rows_from_lists(data, width, max_rows, "inputs[0].data")
    if (*shape, width) != tuple(tensor.shape):
        raise BadRequestError(
            f"inputs[0].data: expected it flat or nested as shape {tuple(tensor.shape)} says, got {(*shape, width)}"
        )
    return _in_range(tensor, rows)


def _in_range(tensor: RequestInput, rows: Rows) -> Rows:
    """Return the rows, unless their datatype is FP16 and one of them is a number that it cannot hold."""
    if tensor.datatype == "FP16":
        with np.errstate(over="ignore", invalid="ignore"):
            is_held = np.isfinite(rows.astype(np.float16))
        if not is_held.all():
            worst = float(rows[~is_held][0])
            raise BadRequestError(
                f"inputs[0].data: expected numbers within FP16's range, up to {FP16_LARGEST}, got {worst:g}"
            )
    return rows
