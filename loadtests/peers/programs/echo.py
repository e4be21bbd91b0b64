"""A bare ASGI echo: the floor under any Python HTTP server. `python -m uvicorn loadtests.peers.programs.echo:app`."""

from typing import Any


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer every request with its own body."""
    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": f"{message['type']}.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
