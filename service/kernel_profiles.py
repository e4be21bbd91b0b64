"""`POST /profile`: what a backend's forward pass is made of, and the latest traces to download.

A worker makes the profile, with one pass between two batches (service/worker.py). The whole server makes one at a time.
Traces are kept in the server's private directory, under names that nobody can guess, until newer ones replace them.
"""

import asyncio
import contextlib
import logging
import re
import secrets
from pathlib import Path

import orjson
from starlette.requests import Request

from service import schemas
from service.body import json_body
from service.dispatch import Dispatcher
from service.errors import NotFoundError, OverloadedError, TooLargeError
from service.outcome import departure, outcome_of
from service.reply import Content, json_content
from service.schemas import ProfileBody

USUAL_ROWS = 64
MAX_TRACES = 4
MAX_TRACE_BYTES = 16 << 20  # each; beyond it a trace is not kept
TRACE_NAME = re.compile(r"[0-9a-f]{32}")
PART = ".tmp"  # what the profiler adds to the name while it writes
log = logging.getLogger(__name__)


class KernelProfiles:
    """Makes profiles in one HTTP process; the traces are those of all processes."""

    def __init__(self, dispatcher: Dispatcher, directory: Path, max_rows: int, max_body_bytes: int) -> None:
        """`directory` is this server's own, the same for each process; `max_rows` are what a batch may have."""
        self._dispatcher = dispatcher
        self._directory = directory
        self._max_rows = max_rows
        self._max_body_bytes = max_body_bytes

    async def answer(self, request: Request) -> Content:
        """Read a body, have the profile made, and write the reply.

        Raises:
            BadRequestError, TooLargeError, UnsupportedMediaTypeError: the body is not one that is taken.
            OverloadedError: another profile is being made.
            DeadlineExceededError: it took longer than a request may.
            MLPError: as for inference, if no worker is up, or the backend does not serve.
            ClientDisconnect: the caller has gone.
        """
        body = schemas.validate(ProfileBody, schemas.parse_json(await json_body(request, self._max_body_bytes)))
        rows = min(USUAL_ROWS, self._max_rows) if body.rows is None else body.rows
        if rows > self._max_rows:
            raise TooLargeError(f"rows: expected at most {self._max_rows}, as many as a batch may have, got {rows}")
        backend = self._dispatcher.backends.default() if body.backend is None else body.backend
        state = self._dispatcher.state
        if not state.begin_profile():
            raise OverloadedError("another profile is being made, and there is one at a time; try again later")
        name = secrets.token_hex(16)
        path = self._directory / f"{name}.json"
        try:
            self._directory.mkdir(exist_ok=True)  # one that is empty for long is cleaned away on some hosts
            async with departure(request) as gone:
                made = await outcome_of(lambda deliver: self._dispatcher.profile(rows, backend, path, deliver), gone)
            is_kept = await asyncio.to_thread(self._keep, path)
        finally:
            try:
                await asyncio.to_thread(self._remove_old)  # one whose caller has gone may have left a trace too
            finally:
                state.end_profile()
        return json_content({**orjson.loads(made), "trace": f"/profile/{name}.json" if is_kept else None})

    async def trace(self, name: str) -> bytes:
        """Return a trace.

        Raises:
            NotFoundError: there is none of this name, or no longer.
        """
        try:
            if TRACE_NAME.fullmatch(name):
                return await asyncio.to_thread((self._directory / f"{name}.json").read_bytes)
        except FileNotFoundError:
            pass
        raise NotFoundError(f"no such trace; the last {MAX_TRACES} are kept, and POST /profile makes a new one")

    def _keep(self, path: Path) -> bool:
        """Remove from a trace what concerns only this host; return False if there is none to download."""
        try:
            if path.stat().st_size > MAX_TRACE_BYTES:
                return False
            document = orjson.loads(path.read_bytes())
            for field in ("traceName", "host_name"):
                document.pop(field, None)
            path.write_bytes(orjson.dumps(document))
        except (OSError, orjson.JSONDecodeError) as error:  # its disk is full, say, which the profiler tells nobody
            log.warning("the trace of a profile could not be written, and it is answered without: %s", error)
            for begun in (path, path.with_name(path.name + PART)):
                begun.unlink(missing_ok=True)
            return False
        return True

    def _remove_old(self) -> None:
        """Remove all but the last traces, and those that are too large."""
        traces = []
        for trace in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # one that a worker has just written to its end
                found = trace.stat()
                traces.append((found.st_mtime_ns, found.st_size, trace))
        for index, (_, size, trace) in enumerate(sorted(traces, reverse=True)):
            if index >= MAX_TRACES or size > MAX_TRACE_BYTES:
                trace.unlink(missing_ok=True)
