"""uvicorn's HTTP protocol with a short cut for inference: the usual request needs no ASGI, no task and no future.

The usual request is a POST to an inference target, spelt as documented, with a Content-Length within the bound. All
other requests take uvicorn's way to the app, with one write per reply. Bytes that are not HTTP get an error in the
server's own form.
"""

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service.errors import BadRequestError, DrainingError, OverloadedError
from service.exchange import Exchange, Head, Heads
from service.headers import declared_length, headers_of, request_id_of, require_host
from service.inference import Inference, Operation, logged_reply
from service.polling import Poller
from service.reply import CLOSE, Reply, error_reply
from service.settings import Settings
from service.transport import Flow, JoiningTransport, Lingering

MAX_HEAD_BYTES = 64 << 10
HEAD_END = b"\r\n\r\n"
MOST_AHEAD = 8  # requests of a connection that are parsed and not answered; what is behind them stays bytes
PIECE_BYTES = 128  # least that is parsed at once of several requests; the shortest one has 24
JOINED_BYTES = 64 << 10
SLOWEST_BYTES_PER_S = 32 << 10  # what a sender has to reach once its time is up
WATCH_S = 5.0
UNREAD_S = 2.0  # how long a client may leave its reply unread once the server stops
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
NO_REQUEST = "expected an HTTP/1.1 request, got bytes that are none; send plain HTTP/1.1 to this port, without TLS"
DRAINING = "the server is stopping; send the request to another one"
MOST_REFUSED = 64  # connections beyond the bound that are read to the end of their request, for at most `LINGER_S`
log = logging.getLogger(__name__)


class Protocol(HttpToolsProtocol):
    """Handles usual inference requests itself, joins head and body, and bounds the head and the sender's time."""

    inference: ClassVar[Inference]
    keep_alive_s: ClassVar[float]
    receive_timeout_s: ClassVar[float]
    max_connections: ClassVar[int]
    poller: ClassVar[Poller]
    heads: ClassVar[Heads]

    _head_bytes = 0
    _head_data = b""  # a head that came whole, in one piece with nothing before it
    _is_in_head = True
    _is_receiving = False
    _since_s = 0.0  # when what the connection now waits for began: the rest of a request, or the next one
    _received_bytes = 0
    _exchange: Exchange | None = None  # the request that is being received, where it is a usual one
    flow: Flow
    _raw: asyncio.Transport
    _joining: JoiningTransport
    _cycles: list[Any]  # the requests that have come and are not answered yet, uvicorn's and ours, in their order
    _failure: bytes | None = None  # the reply that refuses the bytes after them; empty where none is due
    _unparsed = b""  # of a read that brought several requests: those that wait until fewer are ahead of them
    _is_parsing_due = False  # in the next turn of the loop
    _body_left = 0  # bytes of a usual request's body that are still to come
    _ends = 0  # of requests that the parser has found
    _head_end = b""
    _is_one_too_many = False
    _is_refused = False  # and read on
    _steps = 0  # heads, pieces of body and ends that the parser has found
    admitted: ClassVar[int] = 0
    refused: ClassVar[int] = 0
    _extra_bytes = 0  # of trailers, or of what stands between two pieces of a body
    _dropped_bytes = 0  # of a body that comes after its answer
    _timer: asyncio.TimerHandle | None = None
    _unsent_bytes = 0
    _unsent_since_s = 0.0
    _rendered: ClassVar[tuple[list[tuple[bytes, bytes]], bytes]] = ([], b"")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Put the joining transport in front of the real one, and start to watch the time."""
        self._raw = transport
        self._joining = JoiningTransport(transport, self.loop, self._close)
        super().connection_made(cast("asyncio.Transport", self._joining))
        self.flow = Flow(cast("asyncio.Transport", self._joining), self.pipeline)
        self._cycles = []
        self._is_one_too_many = Protocol.admitted >= self.max_connections
        Protocol.admitted += not self._is_one_too_many
        self._since_s = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching, and give up every request that is not answered."""
        Protocol.admitted -= not self._is_one_too_many
        Protocol.refused -= self._is_refused
        self._unparsed = b""
        if self._timer is not None:
            self._timer.cancel()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Close the connection if it has been idle or slow for too long; its one timer fires every few seconds."""
        is_ending = self.inference.dispatcher.state.is_draining
        patience_s = min(UNREAD_S if is_ending else self.keep_alive_s, self.keep_alive_s)
        interval_s = min(WATCH_S, patience_s, self.receive_timeout_s)
        self._timer = self.loop.call_later(interval_s, self._watch)
        now_s = self.loop.time()
        unsent_bytes = self._raw.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since_s = unsent_bytes, now_s
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if unsent_bytes:
            if now_s >= self._unsent_since_s + patience_s:  # a client that does not read its reply
                self._raw.abort()
        elif self._raw.is_closing() or self.flow.read_paused:  # what is late then is not late by the client's doing
            return
        elif self._is_receiving and (not is_busy or self.cycle.more_body):
            most_bytes = self.inference.options.max_body_bytes + MAX_HEAD_BYTES
            allowed_s = self.receive_timeout_s + min(self._received_bytes, most_bytes) / SLOWEST_BYTES_PER_S
            if now_s < self._since_s + allowed_s:
                return
            if self.cycle is not None and not is_busy and not self._is_in_head:  # the rest of an answered request
                self._raw.close()
            else:
                self._refuse(
                    f"expected a whole request, got part of one in {now_s - self._since_s:.1f} s; send it faster, or "
                    "start the server with a longer --receive-timeout-s"
                )
        elif not is_busy and now_s >= self._since_s + self.keep_alive_s:
            self._raw.close()

    def data_received(self, data: bytes) -> None:
        """Parse what came: what may be one request at once, several requests a piece at a time."""
        if self._failure is not None:
            return
        if self._unparsed:  # reading is paused, but for what was on its way
            self._unparsed += data
            return
        head_data = data[: data.find(HEAD_END) + len(HEAD_END)] if self._is_between() else b""
        if head_data:
            head = self.heads.get(head_data)
            if head is not None and len(data) == len(head_data) + head.length and self._is_free():
                exchange = self._take(head)
                exchange.feed(data[len(head_data) :])
                self._begin(exchange)
                return
        if len(data) > self._body_left:
            start = data.find(b"\r", max(PIECE_BYTES, len(head_data)))  # found by memchr: mostly there is none
            if start >= 0 and 0 <= data.find(HEAD_END, start) < len(data) - len(HEAD_END):
                self._unparsed = data
                self._parse_on()
                return
        self._parse(data, head_data)

    def _parse_on(self) -> None:
        """Parse the next of several requests to its end, unless too many are ahead of it; go on in the next turn.

        A piece ends where a head may end. So hardly more than one request is acted on per turn, and other connections
        get their turns in between.
        """
        self._is_parsing_due = False
        ends = self._ends
        at = 0
        while at < len(self._unparsed) and self._ends == ends:
            if self._failure is not None or self._raw.is_closing() or self._is_full():
                break
            end = self._unparsed.find(HEAD_END, at + PIECE_BYTES)
            piece = self._unparsed[at : len(self._unparsed) if end < 0 else end + len(HEAD_END)]
            at += len(piece)
            self._parse(piece, piece[: piece.find(HEAD_END) + len(HEAD_END)] if self._is_between() else b"")
        if self._raw.is_closing():
            self._unparsed = b""
            return
        self._unparsed = self._unparsed[at:] if self._failure is None else b""
        self.flow.is_behind = bool(self._unparsed)
        if self._unparsed:
            self.flow.pause_reading()
            self._parse_soon()
        else:
            self.flow.resume_reading()

    def _parse_soon(self) -> None:
        """Have the rest parsed in the next turn of the loop, unless an answer has to come first."""
        if self._unparsed and not self._is_parsing_due and not self._is_full():
            self._is_parsing_due = True
            self.loop.call_soon(self._parse_on)

    def _is_between(self) -> bool:
        """Say whether what comes next begins a request."""
        return self._is_in_head and not self._is_receiving and not self._head_bytes

    def _is_full(self) -> bool:
        """Say whether the next request has to wait for the answer to one ahead of it."""
        return self._is_in_head and len(self._cycles) >= MOST_AHEAD

    def _parse(self, data: bytes, head_data: bytes) -> None:
        """Parse bytes, unless a request's line and headers are longer than `MAX_HEAD_BYTES`.

        `head_data` is the head that they begin with, if it is whole.
        """
        self._head_data = head_data
        self._received_bytes += len(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            before, start = self._head_end, self._head_end + data[:MAX_HEAD_BYTES]
            self._head_end = start[-3:]  # where the end of a head may have begun
            end = start.find(HEAD_END)
            if self._head_bytes > MAX_HEAD_BYTES and end < 0:
                self._refuse(
                    f"expected at most {MAX_HEAD_BYTES} bytes of headers, got more; send fewer or shorter ones"
                )
                return
            # An offer that may be ignored, but that the parser takes up and drops the body for.
            if b"upgrade" in data[:MAX_HEAD_BYTES].lower():
                size = len(data) if end < 0 else max(0, end + 4 - len(before))  # of the head, in what came
                data = UPGRADE.sub(b"\r\nx-upgrade-ignored:", data[:size]) + data[size:]
                self._head_data = b""
        steps = self._steps
        self._feed(data)
        if steps == self._steps and not self._is_in_head and self.parser is not None:
            self._count_extra(len(data))

    def _feed(self, data: bytes) -> None:
        """Give bytes to the parser; an error that it wraps, raised by a callback, is a fault of the server."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if isinstance(cause, Exception) and not isinstance(cause, httptools.HttpParserError):
                self._fail(cause)
            else:
                self._refuse(NO_REQUEST)
        except httptools.HttpParserError:
            self._refuse(NO_REQUEST)
        except httptools.HttpParserUpgrade:  # the reply says what there is to say
            pass

    def on_message_begin(self) -> None:
        """Give the request its time."""
        self._is_receiving = True
        self._since_s = self.loop.time()
        self._received_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Take the usual inference request; start counting anew with the next one."""
        self._is_in_head = False
        self._steps += 1
        self._head_bytes = self._extra_bytes = self._dropped_bytes = 0
        if self._failure is not None:  # of one ahead of it, which ends the connection
            return
        if self._raw.is_closing():  # nothing is done behind a reply that ends the connection
            self._failure = b""
            return
        self._head_end = b""
        if self._is_one_too_many:
            self._refuse_connection()
            return
        try:
            require_host(self.headers, self.parser.get_http_version())
        except BadRequestError as error:
            self._fail(error)
            return
        if self.parser.should_upgrade():  # one that data_received did not see whole; the parser drops the body for it
            self._refuse(
                "expected an Upgrade header, if any, in one piece and on a connection's first request, got another; "
                "leave it out, since it is ignored"
            )
            return
        operation = self.inference.targets.get(self.url)
        if operation is not None and self.parser.get_method() == b"POST":
            headers = headers_of(self.headers)
            if self._is_usual(headers) and self._is_free():
                head = self._head(operation, headers)
                if self._head_data:
                    self.heads.remember(self._head_data, head)
                exchange = self._take(head)
                if head.refusal is not None:  # once it is known whether the body has come with the head
                    self.loop.call_soon(exchange.refuse_by_head)
                return
        self._exchange = None
        try:
            super().on_headers_complete()
        except Exception as error:  # a target that uvicorn makes nothing of
            raise httptools.HttpParserInvalidURLError from error
        self._cycles.append(self.cycle)

    def _refuse_connection(self) -> None:
        """Answer the first request of a connection beyond the bound, and close it."""
        if self._failure is not None:
            return
        self._failure = b""
        sentence = f"the server has its {self.max_connections} connections; try again later"
        self._raw.write(self._reply_to_head(OverloadedError(sentence)))
        if Protocol.refused < MOST_REFUSED:
            Protocol.refused += 1
            self._is_refused = True
            self._close()
        else:
            self._raw.close()

    def _is_usual(self, headers: Mapping[bytes, bytes]) -> bool:
        return (
            b"content-length" in headers
            and declared_length(headers) <= self.inference.options.max_body_bytes
            and not self.expect_100_continue
            and self.parser.get_http_version() == "1.1"
        )

    def _is_free(self) -> bool:
        """Say whether the next request can be acted on as it comes."""
        return (
            (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
            and not self._is_one_too_many
            and not self._raw.is_closing()
        )

    def _head(self, operation: Operation, headers: Mapping[bytes, bytes]) -> Head:
        refused: Exception | None = None
        try:
            self.inference.require_key(headers)
            operation.check(headers)
        except Exception as error:  # one that is none of ours is a fault of ours, and told as such
            refused = error
        return Head(operation, headers, declared_length(headers), self.parser.should_keep_alive(), refused)

    def _take(self, head: Head) -> Exchange:
        self._exchange = exchange = Exchange(self, head)
        self.cycle = cast("Any", exchange)
        self._cycles.append(exchange)
        self._body_left = head.length
        return exchange

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header without the blanks that the parser leaves after it; ignore trailers of a chunked body."""
        if self._is_in_head:
            super().on_header(name, value.rstrip(b" \t"))
        else:
            self._count_extra(len(name) + len(value))

    def _count_extra(self, size: int) -> None:
        self._extra_bytes += size
        if self._extra_bytes > MAX_HEAD_BYTES:
            self._refuse(
                f"expected at most {MAX_HEAD_BYTES} bytes in trailers, or between two pieces of a body, got more; send "
                "fewer or shorter ones"
            )

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body, or count one that comes after its answer."""
        self._steps += 1
        self._extra_bytes = 0
        if self._failure is not None:
            return
        if self.cycle.response_complete:
            self._dropped_bytes += len(body)
            if self._dropped_bytes > self.inference.options.max_body_bytes:
                self._end_answered()
                return
        if self._exchange is not None:
            self._body_left -= len(body)
            self._exchange.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Act on the request, and expect the next one's head."""
        self._is_in_head = True
        self._is_receiving = False
        self._body_left = 0
        self._steps += 1
        self._ends += 1
        if self._raw.is_closing():  # there is nothing left to wait for
            self._raw.close()
        if self._failure is not None:
            return
        if self._exchange is not None:
            self._begin(self._exchange)
        else:
            super().on_message_complete()

    def _begin(self, exchange: Exchange) -> None:
        try:
            exchange.begin()
        except Exception:  # the parser would call it the client's fault
            log.exception("a request could not be answered")
            self._raw.abort()
        self.poller.streak.add(exchange.is_alone)
        self.poller.attend()

    def write_reply(self, reply: Reply, request_id: bytes, keep_alive: bool) -> None:
        """Write an exchange's reply in one piece, then end the connection or expect the next request."""
        transport = self._raw
        if transport.is_closing():
            return
        self._joining.flush()
        is_last = not keep_alive or self.inference.dispatcher.state.is_draining or CLOSE in reply.head
        head = self._head_of(reply, request_id, is_last)
        if len(reply.body) <= JOINED_BYTES:
            transport.write(head + reply.body)
        else:
            transport.writelines((head, reply.body))
        if is_last:
            self._close()
        self.on_response_complete()
        self.poller.attend()

    def _head_of(self, reply: Reply, request_id: bytes, is_last: bool) -> bytes:
        """Return a reply's status line and headers, with those that all replies have."""
        defaults = self.server_state.default_headers
        if defaults is not Protocol._rendered[0]:  # uvicorn makes a new list each second, for the date
            Protocol._rendered = (defaults, b"".join(b"%b: %b\r\n" % header for header in defaults))
        return b"%b%b%b%bx-request-id: %b\r\n\r\n" % (
            STATUS_LINE[reply.status],
            Protocol._rendered[1],
            reply.head,
            CLOSE if is_last and CLOSE not in reply.head else b"",
            request_id,
        )

    def on_response_complete(self) -> None:
        """Begin the pipelined request that waits, or expect the next one."""
        self.server_state.total_requests += 1
        if len(self._cycles) == 1 and self._cycles[0].response_complete:
            self._cycles.clear()
        else:
            self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if self._raw.is_closing():
            return
        self._since_s = self.loop.time()  # of the next request, or of what is left of it
        self._received_bytes = 0
        if self._failure is not None and not any(not cycle.more_body for cycle in self._cycles):
            self._end(self._failure)
        elif self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self._parse_soon()
        self.flow.resume_reading()

    def shutdown(self) -> None:
        """End the connection, now or after the reply; a request that has not arrived whole is not waited for."""
        if self._timer is not None:
            self._timer.cancel()
        self._watch()
        whole = [cycle for cycle in self._cycles if not cycle.response_complete and not cycle.more_body]
        if whole:
            whole[-1].keep_alive = False
        elif self._exchange is not None and self._exchange.more_body and not self._exchange.response_complete:
            self._exchange.refuse(DrainingError(DRAINING))
        elif self.cycle is not None and not self.cycle.response_complete and not self.cycle.response_started:
            cycle = self.cycle  # whose body is still to come
            self._fail(DrainingError(DRAINING))
            cycle.disconnected = True  # for the app
            cycle.message_event.set()
        else:
            super().shutdown()

    def _close(self) -> None:
        """Close the connection, at once unless the client may still be sending a request."""
        if self._is_receiving and not self._raw.is_closing():
            lingering = Lingering(self._raw, self.loop, self)
            self._joining.end(lingering)
            self._raw = cast("asyncio.Transport", lingering)
        else:
            self._raw.close()

    def _refuse(self, sentence: str) -> None:
        """Answer bytes that are no request with 400, after the whole requests before them; close the connection."""
        log.debug("a connection is refused: %s", sentence)
        if self._is_answered():
            self._end_answered()
            return
        reply = error_reply(BadRequestError(sentence))
        self._end(self._head_of(reply, request_id_of({}), is_last=True) + reply.body)

    def _fail(self, error: Exception) -> None:
        """Answer a request of which no more than the headers is read; a fault of the server is logged."""
        if self._is_answered():
            logged_reply(error, request_id_of(headers_of(self.headers)))
            self._end_answered()
        else:
            self._end(self._reply_to_head(error))

    def _reply_to_head(self, error: Exception) -> bytes:
        """Return the last reply to a request by its headers alone; one of inference is counted."""
        headers = headers_of(self.headers)
        request_id = request_id_of(headers)
        operation = self.inference.operation(self.url.partition(b"?")[0].decode("latin-1"))
        if operation is None:
            reply = logged_reply(error, request_id)
        else:
            reply = self.inference.refuse(error, operation, headers, request_id, time.monotonic_ns())
        head = self._head_of(reply, request_id, is_last=True)
        return head if self.parser.get_method() == b"HEAD" else head + reply.body

    def _is_answered(self) -> bool:
        """Say whether what comes is the rest of a request that has its one reply."""
        is_rest = self._failure is None and not self._is_in_head
        return is_rest and self.cycle is not None and self.cycle.response_complete

    def _end_answered(self) -> None:
        """Close the connection of a request that has its reply."""
        self._failure = b""
        self._close()

    def _end(self, reply: bytes) -> None:
        """Write a last reply, after those to the whole requests before it, and close the connection."""
        if self._failure is None:
            self._failure = reply
        if self._raw.is_closing() or any(not each.response_complete and not each.more_body for each in self._cycles):
            return
        self.transport.write(self._failure)
        self.transport.close()


def protocol(inference: Inference, settings: Settings) -> type[Protocol]:
    """Return the protocol class of one server, of which uvicorn makes an instance per connection."""
    members = {
        "inference": inference,
        "keep_alive_s": settings.keep_alive_s,
        "receive_timeout_s": settings.receive_timeout_s,
        "max_connections": settings.max_connections,
        "heads": Heads(),
        "poller": Poller(settings.spin_us),
    }
    return type("BoundProtocol", (Protocol,), members)
