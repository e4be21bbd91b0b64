"""The JSON bodies of the service's own routes, and the way between JSON numbers and rows.

The pydantic models check every body's envelope and are what `/docs` shows; the numbers themselves go straight into an
array, since a model per number would cost more than the model they are for.
"""

import itertools
import math
import re
from array import array
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.duplicates import duplicate
from service.errors import BadRequestError, NonFiniteOutputError, TooLargeError, UnsupportedMediaTypeError
from service.shared_state import LEAST_SHARE, is_share

Rows = NDArray[np.float32]
Model = TypeVar("Model", bound=BaseModel)

NUMBERS = frozenset({int, float})
MAX_ID_CHARACTERS = 256
MAX_DIMENSIONS = 16
BATCH_ROWS_TOLD = "rows of the batch it was computed in, or of the largest if it took several"
MAX_FLOAT32 = float(np.finfo(np.float32).max)
FEW_NUMBERS = 1024  # up to which Python's own arithmetic is as quick as numpy's
JSON_TYPE = re.compile(rb"application/(?:[\w.+-]+\+)?json(?:\s*;.*)?", re.IGNORECASE)
NESTED_NUMBERS = {
    "type": "array",
    "description": "numbers, nested (..., width); a single row may be a flat list; leading dimensions are kept",
    "items": {"anyOf": [{"type": "number"}, {"type": "array"}]},
    "examples": [[[0.0, 1.0, 2.0]]],
}


@dataclass(slots=True)
class InferenceRequest:
    """What every inference route reads from its body.

    Attributes:
        rows: (n, width) float32, C-contiguous.
        shape: the leading dimensions that the reply keeps; their product is n.
        backend: the one asked for; None takes the server's default.
        timeout_s: the one asked for; None takes the server's.
        id: the caller's own name for the request, echoed.
    """

    rows: Rows
    shape: tuple[int, ...]
    backend: str | None = None
    timeout_s: float | None = None
    id: str | None = None


class Body(BaseModel):
    """A JSON object that accepts only the fields it names."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PredictBody(Body):
    """Body of `POST /predict`."""

    inputs: Annotated[Any, Field(json_schema_extra=NESTED_NUMBERS)]
    backend: str | None = Field(None, description="eager, compiled or fused; left out: the server's default")
    id: str | None = Field(None, max_length=MAX_ID_CHARACTERS, description="echoed in the reply")
    timeout_ms: float | None = Field(None, gt=0, le=3_600_000, description="give up after this many milliseconds")


class Timing(Body):
    """Where a request's time went."""

    queue_ms: float = Field(description="from acceptance to the start of its batch, and between its batches")
    compute_ms: float = Field(description="its batch, or batches, in the engine")
    total_ms: float = Field(description="from the first byte read to the reply's encoding")
    batch_rows: int = Field(description=BATCH_ROWS_TOLD)


class PredictReply(Body):
    """Reply of `POST /predict`."""

    outputs: Annotated[Any, Field(json_schema_extra=NESTED_NUMBERS)]
    labels: Annotated[Any, Field(description="the label of each row's largest output, where the model has labels")] = (
        None
    )
    backend: str = Field(description="the one that ran")
    implementation: str = Field(description="what ran the rows: torch, inductor, onednn, triton")
    id: str | None = Field(None, description="the request's")
    timing: Timing = Field(description="where the request's time went")


class CompareBody(Body):
    """Body of `POST /compare`."""

    inputs: Annotated[Any, Field(json_schema_extra=NESTED_NUMBERS)]
    backends: list[str] | None = Field(
        None, min_length=1, max_length=16, description="which ones to compare; left out: every one that is ready"
    )
    id: str | None = Field(None, max_length=MAX_ID_CHARACTERS, description="echoed in the reply")
    timeout_ms: float | None = Field(
        None, gt=0, le=3_600_000, description="give up after this many milliseconds, all backends together"
    )


class ComparedBackend(Body):
    """One backend's run in a comparison: its result or its error."""

    implementation: str | None = Field(None, description="what ran the rows: torch, inductor, onednn, triton")
    queue_ms: float | None = Field(None, description="from its turn to the start of its batch, and between its batches")
    compute_ms: float | None = Field(None, description="its batch, or batches, in the engine")
    total_ms: float | None = Field(None, description="from its turn to its result")
    batch_rows: int | None = Field(None, description=BATCH_ROWS_TOLD)
    max_abs_diff: float | None = Field(None, description="the largest difference of any number from the reference's")
    max_rel_diff: float | None = Field(
        None, description="the largest difference relative to the reference's largest number in the same row"
    )
    reason: str | None = Field(None, description="why there are no differences")
    outputs: Annotated[Any, Field(json_schema_extra=NESTED_NUMBERS)] = None
    labels: Annotated[Any, Field(description="the label of each row's largest output, where the model has labels")] = (
        None
    )
    error: str | None = Field(None, description="why this backend gave no result")
    code: str | None = Field(None, description="the error's slug")


class CompareReply(Body):
    """Reply of `POST /compare`."""

    rows: int = Field(description="how many each backend ran")
    reference: str = Field(description="the backend that differences are taken from")
    backends: dict[str, ComparedBackend] = Field(description="each backend by name")
    id: str | None = Field(None, description="the request's")


class ProfileBody(Body):
    """Body of `POST /profile`."""

    rows: int | None = Field(
        None, ge=1, description="rows of a forward pass, at most max-batch-rows; left out: 64, or that if it is less"
    )
    backend: str | None = Field(None, description="eager, compiled or fused; left out: the server's default")


class ProfileLine(Body):
    """One operator or kernel of a forward pass."""

    level: str = Field(description="operator (what PyTorch calls) or kernel (what a GPU runs)")
    name: str = Field(description="as PyTorch or the GPU names it")
    count: float = Field(description="how often it runs in a pass")
    time_us: float = Field(description="microseconds of all of them together, the mean over the passes")
    bytes: int | None = Field(description="operands read and results written; null where no shapes are recorded")


class ProfileReply(Body):
    """Reply of `POST /profile`."""

    backend: str = Field(description="what was profiled")
    implementation: str = Field(description="what ran the rows: torch, inductor, onednn, triton")
    rows: int = Field(description="rows of a forward pass")
    operators: float = Field(description="how many operators a pass runs")
    kernels: float = Field(description="how many kernels a pass runs on a GPU; 0 on a CPU")
    lines: list[ProfileLine] = Field(description="one for each operator or kernel")
    trace: str | None = Field(
        description="where to download the last pass for ui.perfetto.dev; null if too large or not written"
    )


class ModelReply(Body):
    """Reply of `GET /model`."""

    name: str = Field(description="the model's")
    width_in: int = Field(description="numbers in a row that goes in")
    width_out: int = Field(description="numbers in a row that comes out")
    dim: int = Field(description="width of the residual stream")
    hidden: int = Field(description="width inside a block")
    depth: int = Field(description="number of blocks")
    is_gated: bool = Field(description="whether a block multiplies its activation by a second linear layer's output")
    activation: str = Field(description="gelu, gelu_tanh, silu or relu")
    parameters: int = Field(description="numbers that the model's tensors hold altogether")
    labels: tuple[str, ...] | None = Field(description="a name for each output, where the model has them")
    dtype: str = Field(description="number format of weights and activations")
    device: str = Field(description="cpu or cuda")
    max_request_rows: int = Field(description="most rows in one request")
    max_batch_rows: int = Field(description="most rows computed at once; a larger request takes several batches")


class BackendBody(Body):
    """Body of `PUT /backend`."""

    default: str | None = Field(None, description="eager, compiled, fused or auto; puts back what was taken out")
    canary: dict[str, Annotated[float, Field(ge=0, le=1)]] | None = Field(
        None,
        max_length=16,
        description="share of the requests that name no backend, by the backend that takes it; it replaces all shares",
    )
    put_back: list[str] | None = Field(
        None, max_length=16, description="backends that were taken out and serve again, without being made the default"
    )

    def require_change(self) -> None:
        """Refuse a body that changes nothing, or whose shares no canaries can have.

        Raises:
            BadRequestError: it has none of default, canary and put_back, or a share or their sum is out of range.
        """
        if self.default is None and self.canary is None and self.put_back is None:
            raise BadRequestError("default: this field is required, or canary, or put_back")
        for name, weight in (self.canary or {}).items():
            if not is_share(weight):
                raise BadRequestError(
                    f"canary.{shortened(name)}: expected 0, or a share of at least {LEAST_SHARE:f}, got {weight:g}"
                )
        total = sum((self.canary or {}).values())
        if total > 1:
            raise BadRequestError(f"canary: expected shares of 1 together at most, got {total:g}")


class BackendState(Body):
    """One backend, as `GET /backend` tells it."""

    implementation: str | None = Field(description="what runs it: torch, inductor, onednn, triton")
    state: str = Field(description="starting, ready or unavailable")
    reason: str | None = Field(description="why it cannot serve now; null if it is ready")
    note: str | None = Field(None, description="what else is worth knowing about how it runs")
    taken_out_at: str | None = Field(None, description="when it was taken out, in UTC; null if it was not")


class BackendReply(Body):
    """Reply of `GET /backend` and `PUT /backend`."""

    default: str | None = Field(
        description="the backend of requests that name none; null if it follows what is available and nothing is"
    )
    is_auto: bool = Field(description="whether the default follows what is available")
    canary: dict[str, float] = Field(description="share of the requests that name no backend, by backend")
    backends: dict[str, BackendState] = Field(description="each backend by name")


class ErrorReply(Body):
    """Reply to every request that fails."""

    error: str = Field(description="what was expected, what came, what to do")
    code: str = Field(description="stable slug; see the error table")


def require_json(content_type: bytes) -> None:
    """Refuse a body declared to be anything but JSON; one that declares nothing is read as JSON.

    Raises:
        UnsupportedMediaTypeError: the content type is not JSON's.
    """
    if content_type not in (b"application/json", b"") and not JSON_TYPE.fullmatch(content_type.strip()):
        raise UnsupportedMediaTypeError(
            f"expected content-type: application/json, got {shortened(content_type.decode('latin-1'))}"
        )


def parse_json(body: bytes | bytearray) -> Any:
    """Parse a JSON body.

    Raises:
        BadRequestError: it is not JSON, holds a number beyond a double, or an object in which a key comes twice.
    """
    if not body:
        raise BadRequestError("expected a JSON body, got an empty one")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    twice = duplicate(body, document)
    if twice is not None:
        raise BadRequestError(f"{shortened(twice)}: expected once, got twice")
    return document


def validate(model: type[Model], document: Any) -> Model:
    """Check a parsed body against its model.

    Raises:
        BadRequestError: a field is missing, unknown or of another type; the sentence names the first.
    """
    if isinstance(document, dict):  # before pydantic, which would collect an error for each of millions
        fields = model.__pydantic_fields__
        if not document.keys() <= fields.keys():
            unknown = next(key for key in document if key not in fields)
            raise BadRequestError(
                f"{shortened(unknown)}: no such field; expected one of {', '.join(model.model_fields)}"
            )
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise BadRequestError(sentence(error, model)) from None


def sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """Tell the first of pydantic's complaints in one sentence."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    match first["type"]:
        case "missing":
            return f"{where}: this field is required"
        case "extra_forbidden":
            return f"{where[:200]}: no such field here"
        case "model_type" | "model_attributes_type" | "dataclass_type":
            fields = ", ".join(model.model_fields)
            expected = f"{where}: expected an object" if where else f"expected a JSON object with {fields}"
            return f"{expected}, got {json_type(first['input'])}"
        case "dict_type":
            return f"{where}: expected an object, got {shortened(first['input'])}"
        case "list_type":
            return f"{where}: expected a list, got {shortened(first['input'])}"
        case "too_long" | "too_short":
            sizes = first["ctx"]
            bound = f"at most {sizes['max_length']}" if "max_length" in sizes else f"at least {sizes['min_length']}"
            return f"{where}: expected {bound} of them, got {sizes['actual_length']}"
    reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    reason = reason.replace("String should have", "expected")
    return f"{where}: {reason}, got {shortened(first['input'])}"


def json_type(value: Any) -> str:
    """Name a parsed value's type as JSON does."""
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), "a number")


def shortened(value: Any, limit: int = 60) -> str:
    """Show a value in an error sentence, cut to `limit` characters; of a list or an object, only that it is one."""
    if isinstance(value, list | dict):
        return json_type(value)
    text = repr(value[: 2 * limit]) if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def rows_from_lists(inputs: Any, width: int, max_rows: int, field: str = "inputs") -> tuple[Rows, tuple[int, ...]]:
    """Turn nested lists of numbers into rows.

    Args:
        inputs: (..., width), any nesting depth from 1.
        width: the model's input width.
        max_rows: most rows taken.
        field: the name that errors give it.

    Returns:
        (n, width) float32 and the leading dimensions, whose product is n.

    Raises:
        BadRequestError: not a list, empty, ragged, of another width, or with an entry that is not a number or is beyond
            float32.
        TooLargeError: more than `max_rows` rows.
    """
    is_flat = type(inputs) is list and len(inputs) == width and type(inputs[0]) in NUMBERS
    rows = _usual_rows([inputs] if is_flat else inputs, width, max_rows)
    if rows is not None:
        return rows, () if is_flat else (len(rows),)
    shape = _apparent_shape(inputs, width, max_rows, field)
    level: list[Any] = [inputs]
    for depth, size in enumerate(shape):
        if set(map(type, level)) != {list}:
            where, what = next((i, v) for i, v in enumerate(level) if type(v) is not list)
            place = _place(field, where, shape[:depth])
            raise BadRequestError(f"{place}: expected a list, as the first one beside it is, got {json_type(what)}")
        if set(map(len, level)) != {size}:
            where, length = next((i, len(v)) for i, v in enumerate(level) if len(v) != size)
            place = _place(field, where, shape[:depth])
            raise BadRequestError(
                f"{place}: expected a list of {size}, as the first one beside it is, got one of {length}; each row has "
                f"{width} numbers"
            )
        level = list(itertools.chain.from_iterable(level))
    if not set(map(type, level)) <= {int, float}:
        where, what = next((i, v) for i, v in enumerate(level) if type(v) not in (int, float))
        shown = f": {shortened(what)}" if isinstance(what, str) else ""
        raise BadRequestError(f"{_place(field, where, shape)}: expected a number, got {json_type(what)}{shown}")
    if shape[-1] != width:
        raise BadRequestError(f"{field}: expected rows of {width} numbers, got {shape[-1]} (shape {tuple(shape)})")
    count = len(level) // width
    return _float32(np.array(level, dtype=np.float64), field).reshape(count, width), tuple(shape[:-1])


def _usual_rows(inputs: Any, width: int, max_rows: int) -> Rows | None:
    """Turn a list of rows into an array; None if it is anything else, which `rows_from_lists` then looks into."""
    if type(inputs) is not list or not 0 < len(inputs) <= max_rows or {*map(type, inputs)} != {list}:
        return None
    if {*map(len, inputs)} != {width}:
        return None
    flat: list[Any] = inputs[0] if len(inputs) == 1 else list(itertools.chain.from_iterable(inputs))
    if not {*map(type, flat)} <= NUMBERS:
        return None
    if len(flat) > FEW_NUMBERS:
        return _many(flat, width)
    try:
        is_in_range = math.hypot(*flat) <= MAX_FLOAT32  # and so is every single number, which is no larger
    except OverflowError:  # an integer beyond a double
        return None
    return np.array(flat, dtype=np.float32).reshape(-1, width) if is_in_range else None


def _many(flat: list[Any], width: int) -> Rows | None:
    try:
        rows = np.frombuffer(array("f", flat), dtype=np.float32)  # array makes infinity of 1e39 without a warning
    except OverflowError:
        return None
    return rows.reshape(-1, width) if np.isfinite(rows).all() else None


def _are_finite(rows: Rows) -> bool:
    if rows.size <= FEW_NUMBERS:
        return math.isfinite(sum(rows.reshape(-1).tolist()))  # of float32 in float64, which holds any such sum
    return bool(np.isfinite(rows).all())


def _apparent_shape(inputs: Any, width: int, max_rows: int, field: str) -> list[int]:
    """Follow the first entries down: enough to refuse what is too large before walking it all."""
    shape: list[int] = []
    first = inputs
    while isinstance(first, list):
        if len(shape) == MAX_DIMENSIONS:
            raise BadRequestError(f"{field}: expected at most {MAX_DIMENSIONS} levels of lists, got more")
        if not first:
            raise BadRequestError(f"{field}: expected at least one row of {width} numbers, got an empty list")
        shape.append(len(first))
        first = first[0]
    if not shape:
        raise BadRequestError(f"{field}: expected a list of rows of {width} numbers, got {json_type(inputs)}")
    count = math.prod(shape[:-1])
    if count > max_rows:
        raise TooLargeError(f"{field}: expected at most {max_rows} rows in one request, got {count}")
    return shape


def _place(field: str, index: int, shape: list[int]) -> str:
    """Name an entry by its indices, given its index among all entries of its depth."""
    return field + "".join(f"[{each}]" for each in np.unravel_index(index, shape)) if shape else field


def _float32(values: NDArray[np.float64], field: str) -> Rows:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if not np.isfinite(narrow).all():
        worst = values[~np.isfinite(narrow)][0]
        raise BadRequestError(f"{field}: expected numbers within float32's range, up to 3.4e38, got {worst:g}")
    return narrow


def parse_predict(body: bytes | bytearray, width: int, max_rows: int) -> InferenceRequest:
    """Read the body of `POST /predict`.

    Raises:
        BadRequestError: the body is not valid for the route.
        TooLargeError: more than `max_rows` rows.
    """
    document = parse_json(body)
    if type(document) is dict and len(document) == 1 and "inputs" in document:  # as most are; nothing else to check
        return InferenceRequest(*rows_from_lists(document["inputs"], width, max_rows))
    parsed = validate(PredictBody, document)
    rows, shape = rows_from_lists(parsed.inputs, width, max_rows)
    timeout_s = None if parsed.timeout_ms is None else parsed.timeout_ms / 1e3
    return InferenceRequest(rows, shape, parsed.backend, timeout_s, parsed.id)


def parse_compare(
    body: bytes | bytearray, width: int, max_rows: int
) -> tuple[InferenceRequest, tuple[str, ...] | None]:
    """Read the body of `POST /compare`: the request, and the backends that it names.

    Raises:
        BadRequestError: the body is not valid for the route.
        TooLargeError: more than `max_rows` rows.
    """
    parsed = validate(CompareBody, parse_json(body))
    names = None if parsed.backends is None else tuple(parsed.backends)
    if names is not None and len(set(names)) < len(names):
        raise BadRequestError(f"backends: expected each at most once, got {', '.join(map(shortened, names))}")
    rows, shape = rows_from_lists(parsed.inputs, width, max_rows)
    timeout_s = None if parsed.timeout_ms is None else parsed.timeout_ms / 1e3
    return InferenceRequest(rows, shape, None, timeout_s, parsed.id), names


def require_finite(outputs: Rows) -> None:
    """Refuse outputs that JSON cannot hold.

    Raises:
        NonFiniteOutputError: NaN or infinity among the outputs.
    """
    if not _are_finite(outputs):
        bad = np.flatnonzero(~np.isfinite(outputs).all(axis=-1))
        raise NonFiniteOutputError(
            f"the result holds NaN or infinity in {len(bad)} of {len(outputs)} rows, the first being row {bad[0]}, "
            "and JSON cannot carry them; look for inputs near the limits of the model's dtype"
        )


def labels_of(outputs: Rows, labels: tuple[str, ...], shape: tuple[int, ...]) -> Any:
    """Return each row's label, that of its largest output, nested as the request was; a flat row gives one."""
    found = [labels[index] for index in outputs.argmax(axis=-1).tolist()]
    if len(shape) <= 1:
        return found if shape else found[0]
    return np.array(found, dtype=object).reshape(shape).tolist()
