"""Asks a server, before it is loaded, what it has."""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from loadtests.errors import UNREADABLE
from loadtests.generator.target import Target, TargetError, get, url_of

UNAUTHORIZED = 401
MOST_SAID = 300  # characters of what a server says
MOST_NUMBERS = 1 << 24  # in a row of inputs or of outputs; 64 MiB


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says about its model."""

    name: str
    dtype: str | None  # what it computes in; None: it does not say
    most_rows: int | None  # of one request
    device: str | None


def inspect(
    host: str, port: int, model: str | None, wire: str, seed: int, key: str, rows: int, dtype: str
) -> tuple[Target, dict[str, str], Served]:
    """Return the server as a target, its ready backends with what implements each, and what it says of its model.

    `model` None takes the one it has.

    Raises:
        TargetError: it cannot be reached, is not ready, does not have the model, takes fewer than `rows` rows a
            request, or computes in another dtype.
    """
    url = url_of(host, port)
    status, body = get(host, port, "/v2/health/ready")
    if status != 200:
        raise TargetError(
            f"{url}: expected a server that is ready, got {said(status, body)}; wait for /v2/health/ready"
        )
    served = served_model(host, port, key)
    if model is not None and model != served.name:
        raise TargetError(
            f"{url}: no model {model!r} here, this server has {served.name!r}; give the model: {served.name}"
        )
    require_taken(rows, served)
    if served.dtype not in (None, dtype):
        raise TargetError(f"--dtype {dtype}: the server computes in {served.dtype}")
    metadata = document(host, port, f"/v2/models/{quote(served.name, safe='')}", key)
    state = document(host, port, "/backend", key)
    try:
        width_in, width_out = (int(metadata[side][0]["shape"][-1]) for side in ("inputs", "outputs"))
        ready = {
            str(name): str(each["implementation"])
            for name, each in state["backends"].items()
            if each["state"] == "ready"
        }
    except UNREADABLE as error:
        raise TargetError(f"{url}: expected this project's server, got other metadata: {error}") from error
    if not 0 < min(width_in, width_out) <= max(width_in, width_out) <= MOST_NUMBERS:
        raise TargetError(f"{url}: expected rows of 1 to {MOST_NUMBERS} numbers, got {width_in} and {width_out}")
    return Target(host, port, served.name, wire, width_in, width_out, seed, key), ready, served


def served_model(host: str, port: int, key: str) -> Served:
    """Return what a server says of the model that it has.

    Raises:
        TargetError: it does not say.
    """
    told = document(host, port, "/model", key)
    try:
        most_rows = told.get("max_request_rows")
        return Served(
            str(told["name"]), told.get("dtype"), None if most_rows is None else int(most_rows), told.get("device")
        )
    except UNREADABLE as error:
        raise TargetError(f"{url_of(host, port)}/model: expected this project's server, got {error}") from error


def require_taken(rows: int, served: Served) -> None:
    """Refuse requests of more rows than the server takes.

    Raises:
        TargetError: `rows` are more.
    """
    if served.most_rows is not None and rows > served.most_rows:
        raise TargetError(f"--rows {rows}: the server takes at most {served.most_rows} rows a request")


def chosen(wanted: list[str], ready: dict[str, str]) -> dict[str, str]:
    """Return the backends that are wanted, in that order, with what implements each.

    Raises:
        TargetError: the server does not have one.
    """
    missing = [name for name in wanted if name not in ready]
    if missing:
        raise TargetError(f"--backends: the server has {', '.join(ready) or 'none'} ready, not {', '.join(missing)}")
    return {name: ready[name] for name in wanted}


def document(host: str, port: int, path: str, key: str) -> Any:
    """Return the JSON that a path answers with 200.

    Raises:
        TargetError: it answers something else.
    """
    status, body = get(host, port, path, key)
    if status != 200:
        raise TargetError(f"{url_of(host, port)}{path}: {said(status, body)}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TargetError(f"{url_of(host, port)}{path}: expected JSON, got {body[:80]!r}") from error


def said(status: int, body: bytes) -> str:
    """Return an error of the server as status, code and sentence, or else its body, and what to do."""
    try:
        error = json.loads(body)
        told = f"{error['code']}: {error['error']}"[:MOST_SAID]
    except UNREADABLE:
        told = repr(body[:80])
    return f"{status} {told}{advice(status)}"


def advice(status: int) -> str:
    """Return what to do about an error of that status, as the end of a sentence; "" if that is not known."""
    return "; set MLP_API_KEY to the server's key, or give it with --key" if status == UNAUTHORIZED else ""
