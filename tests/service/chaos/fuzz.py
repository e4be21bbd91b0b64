"""Requests that no client means: `PYTHONPATH=. python tests/service/chaos/fuzz.py --seconds 600 --json FILE`.

Each case is made from the seed and its number alone, so that `--case N` sends one again. After each, the server has to
answer a good request rightly. A fault is a reply outside the contract, a 500, a trace of our inside in a reply or in
the log, a connection that is neither answered nor closed, a process that ended, or one that grew.
"""

import argparse
import collections
import contextlib
import copy
import gzip
import itertools
import json
import random
import re
import socket
import struct
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.service.running_server import ROOT, RunningServer, answer, descendants, memory_kib

WIDTH = 64
SENDERS = 6
FLAGS = (
    *("--backends", "eager,fused", "--api-servers", "2"),
    *("--receive-timeout-s", "0.5", "--keep-alive-s", "0.5"),  # so that what is left half sent ends soon
)
HANG_S = 30.0  # after which a connection that is neither answered nor closed counts as hung
GROWTH_KIB = 96 << 10
STATUS = {
    "bad_request": 400,
    "unauthorized": 401,
    "not_found": 404,
    "method_not_allowed": 405,
    "too_large": 413,
    "unsupported_media_type": 415,
    "non_finite_output": 422,
    "overloaded": 429,
    "deadline_exceeded": 504,
}
"""What the contract's table lets a healthy server answer with, by code."""
LEAK = re.compile(r"Traceback|File \"|/\S*\.py\b|\.py:\d|site-packages|0x[0-9a-f]{8}|" + re.escape(str(ROOT)))
TOKENS = (
    b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\u0000", b"\\ud800", b"null", b"true", b"NaN", b"-Infinity",
    b"1e999", b"-0", b"1e-400", b"9" * 30, b"0x1", b"\x00", b"\xff", b"\xed\xa0\x80", b"[" * 200, b'"inputs":',
    b'"shape":[-1,64]', b'"binary_data_size":', b"\r\n", b"\r\n\r\n",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 64, 2**31, 2**32, 2**63, 2**64, 10**30, 1.5, -0.0, 3.5e38, 1e-320, "", "input", "FP32",
    "x" * 2000, "\x00", "\U0001f600", [], [[]], {}, {"a": 1}, [1, [2]], [["1"]], [None], [[1] * WIDTH] * 3, [0] * WIDTH,
)  # fmt: skip
SHAPES: tuple[Any, ...] = (
    [1, WIDTH], [WIDTH], [-1, WIDTH], [1, -WIDTH], [-1, -WIDTH], [0, WIDTH], [WIDTH, 1], [2**32, WIDTH], [2**31, 2**33],
    [2**63, WIDTH], [2**64, WIDTH], [2**40] * 16, [1] * 100, [1.0, WIDTH], ["1", WIDTH], [], None, WIDTH, [[1], WIDTH],
    [1, 1, WIDTH], [0, 2**62, WIDTH], [2**32, 2**32, WIDTH], [True, WIDTH], [1025, WIDTH],
)  # fmt: skip
BINARY = ("FP32", "FP64", "FP16", "BF16")
DATATYPES: tuple[Any, ...] = (*BINARY, "INT8", "BYTES", "fp32", "", None, 32)
ITEM_BYTES = {"FP32": 4, "FP64": 8, "FP16": 2, "BF16": 2}
LENGTHS = (
    *b"-1 +1 0 1 1e3 0x10 00000 12abc 4294967296 18446744073709551616".split(),
    *(b"9" * 30, b"", b" 5", b"5, 5", b"\xb2"),
)
CHUNK_SIZES = (b"-1", b"0x5", b"ffffffffffffffff", b"10000000000000000", b"", b"5;", b"5;a=b", b"5 ", b" 5", b"g", b"0")
ODD_HEADERS = (
    *(
        b"x: a\r\n b",
        b"x: a\x00b",
        b"x : y",
        b": y",
        b"x",
        b"x: \xff",
        b"host: z",
        b"x-request-id: a\tb",
        b"x-api-key: ",
    ),
    *(b"content-type: text/plain", b"content-type: application/json\x00", b"content-type: " + b"a" * 500),
    *(b"upgrade: websocket", b"upgrade: h2c", b"connection: keep-alive, upgrade, close", b"expect: 200-nothing"),
    *(b"authorization: Bearer", b"accept-encoding: gzip", b"te: trailers"),
)
METHODS = tuple(b"GET PUT DELETE PATCH OPTIONS TRACE CONNECT BREW".split())
TARGETS = (
    *b"/%70redict /predict/%00 /predict/%ff //predict /predict/ http://x/predict * /../predict /predict#x".split(),
    *b"/v2/models/%2e%2e/infer /v2/models//infer /v2/models/digits/ready /v2 /backend /backend/ /metrics /nope".split(),
    *b"/openapi.json /docs /docs/oauth2-redirect / /static/../../etc/passwd /\xc3\xa9 predict".split(),
)
OTHER_TARGETS = (
    *b"/backend /v2/models/other/infer /v2/health/live /nope /metrics /docs /compare /profile /profile/0.json".split(),
)
ENDINGS = ("wait", "wait", "wait", "wait", "wait", "reset", "leave", "half")


@dataclass(frozen=True, slots=True)
class Case:
    """What one connection sends, in the pieces that it sends, and how it ends: waiting, or not."""

    kind: str
    pieces: tuple[bytes, ...]
    ending: str


def http(
    draw: random.Random, target: bytes, body: bytes, *headers: bytes, method: bytes = b"POST", is_last: bool = True
) -> bytes:
    """Spell one request; its length is told truly, in one of the ways there are."""
    lines = [method + b" " + target + b" HTTP/1.1", b"host: x", *headers]
    if is_last:
        lines.append(b"connection: close")
    if draw.random() < 0.15:
        lines.append(b"transfer-encoding: chunked")
        return b"\r\n".join(lines) + b"\r\n\r\n" + chunked(draw, body)
    if draw.random() < 0.03:
        lines.append(b"expect: 100-continue")
    return b"\r\n".join([*lines, b"content-length: %d" % len(body)]) + b"\r\n\r\n" + body


def chunked(draw: random.Random, body: bytes) -> bytes:
    """Cut a body into chunks."""
    sent, at = b"", 0
    while at < len(body):
        size = draw.randint(1, max(1, len(body) // draw.randint(1, 4)))
        piece = body[at : at + size]
        sent += b"%x\r\n%b\r\n" % (len(piece), piece)
        at += size
    return sent + b"0\r\n\r\n"


def mutated(draw: random.Random, data: bytes) -> bytes:
    """Damage bytes in one to four places."""
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(data))
        end = min(len(data), at + draw.randint(0, 12))
        match draw.randrange(6):
            case 0:
                data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:at] + draw.choice(TOKENS) + data[at:]
            case 3:
                data = data[:at] + draw.choice(TOKENS) + data[end:]
            case 4:
                data = data[:end] + data[at:end] * draw.randint(1, 40) + data[end:]
            case _:
                data = data[:at]
    return data


def value(draw: random.Random) -> Any:
    """Return a value that hardly any field takes; a copy, since a case may change it."""
    return copy.deepcopy(draw.choice(VALUES))


def row(draw: random.Random) -> list[float]:
    return [round(draw.uniform(-16, 16), 3) for _ in range(WIDTH)]


def predict_document(draw: random.Random) -> dict[str, Any]:
    """Make a body of `/predict`, often a good one but for one value."""
    document: dict[str, Any] = {"inputs": [row(draw) for _ in range(draw.choice((1, 1, 2, 5)))]}
    if draw.random() < 0.3:
        document["backend"] = draw.choice(("eager", "fused", "turbo", "auto"))
    if draw.random() < 0.2:
        document["timeout_ms"] = draw.choice((1, 1000, 1e-6, 1e300, -1))
    if draw.random() < 0.35:
        document[draw.choice(("inputs", "backend", "id", "timeout_ms", "outputs", ""))] = value(draw)
    if draw.random() < 0.2:
        inside = document["inputs"]
        if isinstance(inside, list) and inside and isinstance(inside[0], list) and inside[0]:
            inside[0] = [*inside[0]]
            inside[0][draw.randrange(len(inside[0]))] = value(draw)
    return document


def spelled(document: Any) -> bytes:
    return json.dumps(document).encode("utf-8", "surrogatepass")


def predict(draw: random.Random) -> bytes:
    body = spelled(predict_document(draw))
    return http(
        draw, draw.choice((b"/predict", b"/predict/eager", b"/predict/fused") * 4 + (b"/predict/x",)), body, JSON
    )


def predict_bytes(draw: random.Random) -> bytes:
    return http(draw, b"/predict", mutated(draw, spelled(predict_document(draw))), JSON)


def infer_document(draw: random.Random) -> dict[str, Any]:
    """Make a JSON part of the protocol's inference, often a good one but for one value."""
    tensor: dict[str, Any] = {"name": "input", "shape": [1, WIDTH], "datatype": "FP32", "data": row(draw)}
    if draw.random() < 0.3:
        tensor["shape"] = copy.deepcopy(draw.choice(SHAPES))
    if draw.random() < 0.15:
        tensor["datatype"] = draw.choice(DATATYPES)
    if draw.random() < 0.15:
        tensor[draw.choice(("name", "shape", "datatype", "data", "parameters"))] = value(draw)
    document: dict[str, Any] = {"inputs": [tensor] * draw.choice((1,) * 12 + (2, 30))}
    if draw.random() < 0.2:
        names = ("output", "output", "logits", "", "x" * 500)
        wanted = [{"name": draw.choice(names)} for _ in range(draw.choice((0, 1, 1, 2, 50)))]
        document["outputs"] = draw.choice((wanted, wanted, wanted, value(draw)))
    if draw.random() < 0.2:
        name = draw.choice(("backend", "timeout", "binary_data_output", "priority"))
        document["parameters"] = {name: value(draw)}
    if draw.random() < 0.2:
        document[draw.choice(("id", "model_name", "inputs", "outputs", "parameters"))] = value(draw)
    return document


def infer(draw: random.Random) -> bytes:
    return http(draw, INFER, spelled(infer_document(draw)), JSON)


def infer_binary(draw: random.Random) -> bytes:
    """Make a binary body whose lengths are right, or lie in one place."""
    document = infer_document(draw)
    datatype = draw.choice(BINARY)
    data = draw.randbytes(WIDTH * ITEM_BYTES[datatype])
    size: Any = draw.choice((len(data),) * 60 + (0, -1, 1, len(data) + 1, 2**31, 2**63, 2**64, 1.5, "256", None, True))
    tensor = {"name": "input", "shape": [1, WIDTH], "datatype": datatype, "parameters": {"binary_data_size": size}}
    if draw.random() < 0.3:
        tensor["shape"] = copy.deepcopy(draw.choice(SHAPES))
    document["inputs"] = [tensor] * draw.choice((1,) * 8 + (2,))
    if draw.random() < 0.6:  # what JSON could not carry
        document.setdefault("parameters", {"binary_data_output": True})
    head = spelled(document)
    if draw.random() < 0.2:
        head = mutated(draw, head)
    told = draw.choice((b"%d" % len(head),) * 90 + (b"%d" % (len(head) + draw.choice((-1, 1, 300))), *LENGTHS))
    data = draw.choice((data,) * 20 + (data + b"x", data[:-1], b"", data * 2))
    headers = [b"inference-header-content-length: " + told]
    if draw.random() < 0.1:
        headers.append(b"inference-header-content-length: " + draw.choice(LENGTHS))
    return http(draw, INFER, head + data, *headers)


def packed(draw: random.Random) -> bytes:
    """Make a compressed body: good, bomb, cut off, doubled, or named wrongly."""
    zeros = bytes(draw.choice((1 << 16, 8 << 20)))
    plain = draw.choice((*(spelled(predict_document(draw)) for _ in range(3)), b"", zeros, b"[" * 3_000_000))
    framed = zlib.compress(plain, 1)
    way, body = draw.choice(
        ((b"gzip", gzip.compress(plain, 1, mtime=0)), (b"deflate", framed), (b"deflate", framed[2:-4]))
    )
    match draw.randrange(7):
        case 0:
            body = body[: draw.randint(0, len(body))]
        case 1:
            body = body * 2
        case 2:
            body = mutated(draw, body[: 64 << 10])
        case 3:
            body = gzip.compress(body, 1, mtime=0)
    way = draw.choice((way,) * 5 + (b"gzip, gzip", b"br", b"", b"identity", b"GZIP", b"x" * 300, b"deflate;q=1"))
    return http(draw, b"/predict", body, JSON, b"content-encoding: " + way)


def framing(draw: random.Random) -> bytes:
    """Make a request whose framing lies, or is odd."""
    body = spelled(predict_document(draw))
    head = b"POST /predict HTTP/1.1\r\nhost: x\r\n" + JSON + b"\r\nconnection: close\r\n"
    length = b"content-length: %d\r\n" % len(body)
    in_chunks = b"transfer-encoding: chunked\r\n\r\n"
    match draw.randrange(9):
        case 0:
            return head + b"content-length: " + draw.choice(LENGTHS) + b"\r\n\r\n" + body
        case 1:
            return head + length + b"content-length: " + draw.choice(LENGTHS) + b"\r\n\r\n" + body
        case 2:
            return head + length + in_chunks + draw.choice((body, chunked(draw, body)))
        case 3:
            named = draw.choice((b"chunked, gzip", b"gzip", b"identity", b"xchunked", b"chunked\r\n chunked"))
            return head + b"transfer-encoding: " + named + b"\r\n\r\n" + chunked(draw, body)
        case 4:
            return head + in_chunks + draw.choice(CHUNK_SIZES) + b"\r\n" + chunked(draw, body)
        case 5:
            return head + in_chunks + mutated(draw, chunked(draw, body))
        case 6:
            trailers = (b"content-length: 3", b"x-api-key: x", b"a" * 70_000 + b": b", b"broken", b": ", b"\x00: a")
            return head + in_chunks + chunked(draw, body)[:-2] + draw.choice(trailers) + b"\r\n\r\n"
        case 7:
            told = len(body) + draw.randint(1, 1000)  # so that the body is cut off
        case _:
            told = max(0, len(body) - draw.randint(1, 100))  # so that something trails it
    return head + b"content-length: " + str(told).encode() + b"\r\n\r\n" + body


def head(draw: random.Random) -> bytes:
    """Make a request with a head that is odd or broken."""
    body = spelled({"inputs": row(draw)})
    long = b"x: " + b"y" * draw.choice((1000, 70_000))
    many = b"\r\n".join(b"x-%d: y" % index for index in range(draw.choice((100, 9000))))
    odd = draw.choice((long, many, b"x" * 70_000 + b": y", b"x-request-id: " + b"z" * 500, *ODD_HEADERS))
    method = draw.choice((b"POST",) * 6 + METHODS)
    target = draw.choice((b"/predict",) * 5 + (b"/predict?" + b"a" * 500, b"/predict/" + b"a" * 5000, *TARGETS))
    return http(draw, target, body, odd, method=method)


def head_bytes(draw: random.Random) -> bytes:
    sent = http(draw, b"/predict", spelled({"inputs": row(draw)}), JSON)
    end = sent.index(b"\r\n\r\n") + 4
    return mutated(draw, sent[:end]) + sent[end:]


def route(draw: random.Random) -> bytes:
    """Make a request of another route, with a body that may be wrong."""
    rows = spelled({"inputs": row(draw)})
    body = draw.choice(
        (b'{"default": "eager"}', b'{"default": "fused"}', b'{"rows": 3}', rows, spelled(value(draw)), b"")
    )
    if draw.random() < 0.4:
        body = mutated(draw, body)
    target = draw.choice(OTHER_TARGETS)
    return http(draw, target, body, JSON, method=draw.choice((b"PUT", b"PUT", b"POST", b"GET", b"DELETE")))


def garbage(draw: random.Random) -> bytes:
    return draw.choice(
        (
            draw.randbytes(draw.randint(1, 3000)),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(200),
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /predict HTTP/1.0\r\n\r\n",
            b"\r\n" * 500,
            b"GET /\r\n\r\n",
            b"POST /predict HTTP/1.1\n\n",
        )
    )


JSON = b"content-type: application/json"
INFER = b"/v2/models/digits/infer"
BODIES: tuple[Callable[[random.Random], bytes], ...] = (predict, predict_bytes, infer, infer_binary, infer_binary)
KINDS = (*BODIES, packed, framing, framing, head, head_bytes, route, garbage)


def case(seed: int, number: int) -> Case:
    """Make a case from its number."""
    draw = random.Random(f"{seed} {number}")
    make = draw.choice(KINDS)
    name, sent = make.__name__, make(draw)
    if draw.random() < 0.2:  # behind others on the same connection
        ahead = [draw.choice(BODIES)(draw).replace(b"connection: close\r\n", b"") for _ in range(draw.randint(1, 4))]
        name, sent = f"{name} behind others", b"".join(ahead) + sent
    if draw.random() < 0.05:
        sent = sent[: draw.randint(0, len(sent))]
    cuts = sorted(draw.randint(0, len(sent)) for _ in range(draw.choice((0, 0, 0, 1, 3, 8))))
    bounds = [0, *cuts, len(sent)]
    pieces = tuple(sent[a:b] for a, b in itertools.pairwise(bounds) if a < b)
    return Case(name, pieces, draw.choice(ENDINGS))


def sent_over(port: int, case: Case) -> bytes:
    """Send a case over a connection of its own and return what came back until the server closed it.

    Raises:
        TimeoutError: it did neither.
    """
    reply = b""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for index, piece in enumerate(case.pieces):
                if index:
                    time.sleep(0.002)  # so that most pieces are read by themselves
                connection.sendall(piece)
            if case.ending == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if case.ending in ("reset", "leave"):
                return b""
            if case.ending == "half":
                with contextlib.suppress(OSError):  # reset meanwhile
                    connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 18):
                reply += data
        except (ConnectionResetError, BrokenPipeError):  # it closed while more was sent
            pass
    return reply


def statuses_of(reply: bytes, is_bodiless: bool) -> list[int]:
    """Read the replies that one connection brought, and check each against the contract.

    Raises:
        ValueError: one is not as the contract says.
    """
    found: list[int] = []
    while reply:
        head, separator, rest = reply.partition(b"\r\n\r\n")
        line, *lines = head.split(b"\r\n")
        match = re.fullmatch(rb"HTTP/1\.1 (\d{3}) [A-Za-z -]*", line)
        if not match or not separator:
            raise ValueError(f"no reply of HTTP: {reply[:200]!r}")
        status = int(match[1])
        headers = {name.lower(): value for name, _, value in (each.partition(b": ") for each in lines)}
        if status == 100:
            reply = rest
            continue
        found.append(status)
        size = 0 if is_bodiless else int(headers.get(b"content-length", b"0"))
        body, reply = rest[:size], rest[size:]
        if len(body) < size:
            raise ValueError(f"a reply that is cut off: {status}, {len(body)} of {size} bytes")
        if status >= 400 and not is_bodiless:
            check_error(status, headers, body)
        elif status not in (200, 307) and status < 400:
            raise ValueError(f"unexpected status {status}")
        if LEAK.search(head.decode("latin-1")):
            raise ValueError(f"the head tells of the inside: {head!r}")
    return found


def check_error(status: int, headers: dict[bytes, bytes], body: bytes) -> None:
    """Check one error reply.

    Raises:
        ValueError: it has not the one form, or says what it should not.
    """
    try:
        document = json.loads(body)
    except ValueError:
        raise ValueError(f"{status} with a body that is no JSON: {body[:300]!r}") from None
    if sorted(document) != ["code", "error"] or STATUS.get(document["code"]) != status:
        raise ValueError(f"{status} outside the contract: {body[:300]!r}")
    if not isinstance(document["error"], str) or "\n" in document["error"] or LEAK.search(document["error"]):
        raise ValueError(f"{status} tells of the inside: {body[:300]!r}")
    if status == 429 and b"retry-after" not in headers:
        raise ValueError("429 without Retry-After")


class Fuzz:
    """Cases sent side by side, and what became of them."""

    def __init__(self, server: RunningServer, seed: int, first: int, expected: dict[str, list[float]]) -> None:
        self.server = server
        self.seed = seed
        self.expected = expected
        self.statuses: collections.Counter[str] = collections.Counter()
        self.kinds: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self._numbers = itertools.count(first)
        self._counting = threading.Lock()  # threads that add to one count can lose some

    def send_until(self, end_s: float, last: int) -> None:
        """Send one case after the other, until then or to the case of that number."""
        while time.monotonic() < end_s and not self.problems and (number := next(self._numbers)) <= last:
            try:
                self.send(number)
            except Exception as error:  # a sender that ends in silence would send nothing for the rest of the time
                self.problems.append(f"case {number} could not be made or sent: {error!r}")
                raise

    def send(self, number: int) -> None:
        """Send one case, and a good request after it."""
        made = case(self.seed, number)
        with self._counting:
            self.kinds[made.kind] += 1
        is_bodiless = made.pieces[:1] != () and made.pieces[0].startswith(b"HEAD")
        try:
            for status in statuses_of(sent_over(self.server.port, made), is_bodiless):
                with self._counting:
                    self.statuses[str(status)] += 1
            self.require_good()
        except (ValueError, OSError) as error:
            sent = b"|".join(made.pieces)
            self.problems.append(f"case {number} ({made.kind}, {made.ending}): {error!r}; it sent {sent[:4000]!r}")

    def require_good(self) -> None:
        """Ask for what is right and check the answer.

        Raises:
            ValueError: it is wrong.
        """
        head, _, body = answer(self.server.port, GOOD).partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"a good request got {head + body!r}")
        document = json.loads(body)
        expected = self.expected[document["backend"]]
        if any(abs(a - b) > 1e-3 for a, b in zip(document["outputs"], expected, strict=True)):
            raise ValueError(f"a good request got {document['outputs']}, expected {expected}")


GOOD_BODY = json.dumps({"inputs": [float(value % 17) for value in range(WIDTH)]}).encode()
GOOD_HEAD = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
GOOD = GOOD_HEAD % (b"/predict", len(GOOD_BODY), GOOD_BODY)


def good_outputs(port: int, backend: str) -> list[float]:
    reply = answer(port, GOOD_HEAD % (f"/predict/{backend}".encode(), len(GOOD_BODY), GOOD_BODY))
    outputs: list[float] = json.loads(reply.partition(b"\r\n\r\n")[2])["outputs"]
    return outputs


def fuzz(server: RunningServer, seed: int, first: int, last: int, seconds: float) -> dict[str, Any]:
    """Send cases, for some time or to the last one, stop the server, and tell what was seen."""
    state = Fuzz(server, seed, first, {name: good_outputs(server.port, name) for name in ("eager", "fused")})
    processes = descendants(server.process.pid)
    end_s = time.monotonic() + seconds
    early: dict[str, int] = {}
    senders = [threading.Thread(target=state.send_until, args=(end_s, last)) for _ in range(SENDERS)]
    for sender in senders:
        sender.start()
    while any(sender.is_alive() for sender in senders):
        time.sleep(0.1)
        if not early and time.monotonic() > end_s - seconds * 0.75:
            early = memory_kib(server)
    for sender in senders:
        sender.join()
    problems = list(state.problems)
    if not problems:
        server.wait_until(lambda: server.metric("mlp_inflight_requests") == 0)
    late = memory_kib(server)
    problems += [
        f"{name} grew from {held} to {late.get(name)} KiB"
        for name, held in early.items()
        if late.get(name, 0) > held + GROWTH_KIB
    ]
    if descendants(server.process.pid) != processes:
        problems.append("a process ended or was started")
    if "Traceback" in server.output:
        problems.append("a traceback in the log: " + server.output[-4000:])
    if server.stop() != 0:
        problems.append(f"the server ended with {server.process.returncode}")
    return {
        "seconds": seconds,
        "seed": seed,
        "cases": sum(state.kinds.values()),
        "statuses": dict(sorted(state.statuses.items())),
        "kinds": dict(sorted(state.kinds.items())),
        "memory_kib_early": early,
        "memory_kib_late": late,
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to send")
    parser.add_argument("--seed", type=int, default=0, help="which cases are made")
    parser.add_argument("--case", type=int, help="send this case alone")
    parser.add_argument("--json", type=Path, help="file to write what was seen to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server = RunningServer(Path(directory) / "log", *FLAGS).wait_ready()
        try:
            first, last = (0, sys.maxsize) if options.case is None else (options.case, options.case)
            report = fuzz(server, options.seed, first, last, options.seconds)
        finally:
            server.end()
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
