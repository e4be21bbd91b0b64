"""A worker's outcome as a coroutine, for the routes that FastAPI serves; the wait ends if the caller goes away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request

from service.dispatch import Ticket

Gone = asyncio.Future[Any]


@contextlib.asynccontextmanager
async def departure(request: Request) -> AsyncIterator[Gone]:
    """Watch for the end of the caller's connection, once the body has been read."""
    gone = asyncio.ensure_future(request.receive())
    try:
        yield gone
    finally:
        gone.cancel()


async def outcome_of(start: Callable[[Callable[[Any], None]], Ticket], gone: Gone) -> Any:
    """Return what is delivered, or raise it if it is an error.

    Args:
        start: hands something to a worker, given what to call with the outcome.
        gone: is done when nobody waits any more.

    Raises:
        ClientDisconnect: nobody waits any more; what was started is abandoned.
    """
    delivered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    ticket = start(delivered.set_result)
    try:
        await asyncio.wait((delivered, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not delivered.done():
            ticket.abandon()
    if not delivered.done():
        raise ClientDisconnect
    outcome = delivered.result()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
