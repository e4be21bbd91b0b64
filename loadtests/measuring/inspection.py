"""What a server has, asked before it is loaded."""

import json
from typing import Any
from urllib.parse import quote

from loadtests.generator.target import Target, TargetError, get


def inspect(host: str, port: int, model: str | None, wire: str, seed: int, key: str) -> tuple[Target, dict[str, str]]:
    """Return the server as a target, and its ready backends with what implements each.

    `model` None takes the one it has.

    Raises:
        TargetError: it is not there, is not ready, or does not have the model.
    """
    url = f"http://{host}:{port}"
    status, body = get(host, port, "/v2/health/ready")
    if status != 200:
        raise TargetError(
            f"{url}: expected a server that is ready, got {status} {said(body)}; wait for /v2/health/ready"
        )
    served = served_name(host, port, key)
    if model is None:
        model = served
    elif model != served:
        raise TargetError(f"{url}: no model {model!r} here, this server has {served!r}; give the model: {served}")
    metadata = document(host, port, f"/v2/models/{quote(model, safe='')}", key)
    state = document(host, port, "/backend", key)
    try:
        width_in, width_out = (int(metadata[side][0]["shape"][-1]) for side in ("inputs", "outputs"))
        ready = {
            name: str(each["implementation"]) for name, each in state["backends"].items() if each["state"] == "ready"
        }
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise TargetError(f"{url}: expected this project's server, got metadata without {error}") from error
    return Target(host, port, model, wire, width_in, width_out, seed, key), ready


def served_name(host: str, port: int, key: str) -> str:
    """Return the name of the model that a server has.

    Raises:
        TargetError: it does not say.
    """
    try:
        return str(document(host, port, "/model", key)["name"])
    except (KeyError, TypeError) as error:
        raise TargetError(f"http://{host}:{port}/model: expected this project's server, got no name") from error


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
        raise TargetError(f"http://{host}:{port}{path}: {status} {said(body)}")
    try:
        return json.loads(body)
    except ValueError as error:
        raise TargetError(f"http://{host}:{port}{path}: expected JSON, got {body[:80]!r}") from error


def said(body: bytes) -> str:
    """Return an error of the server as code and sentence, or what else the body holds."""
    try:
        error = json.loads(body)
        return f"{error['code']}: {error['error']}"
    except (ValueError, KeyError, TypeError):
        return repr(body[:80])
