"""The two doors of inference, and the time that a connection is given, over a real port."""

import contextlib
import gzip
import json
import os
import re
import signal
import socket
import threading
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.running_server import RunningServer, Start, answer, resident_kib, talk

pytestmark = pytest.mark.slow  # real servers

GOOD = [[float(value % 17) for value in range(64)]]
BODY = json.dumps({"inputs": GOOD}).encode()
EAGER = ("--backends", "eager")


def request(
    target: str = "/predict", body: bytes = BODY, *headers: str, version: str = "1.1", is_chunked: bool = False
) -> bytes:
    length = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(body)}"
    lines = [f"POST {target} HTTP/{version}", "host: x", "content-type: application/json", length, *headers]
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + sent


def parsed(reply: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = reply.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


CLOSE = "connection: close"
DOORS: dict[str, dict[str, Any]] = {
    "usual": {},
    "chunked": {"is_chunked": True},
    "query": {"target": "/predict?x=1"},
    "escaped": {"target": "/%70redict"},
    "old": {"version": "1.0"},
    "expecting": {"headers": ("expect: 100-continue",)},
}


def through(port: int, door: dict[str, Any], body: bytes = BODY, *headers: str) -> tuple[int, dict[str, Any]]:
    door = dict(door)
    headers = (*door.pop("headers", ()), *headers, CLOSE)
    return parsed(talk(port, request(door.pop("target", "/predict"), body, *headers, **door)))


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_every_way_to_ask_is_answered_alike(server: RunningServer, client: httpx.Client, door: dict[str, Any]) -> None:
    status, reply = through(server.port, door)
    usual = client.post("/predict", json={"inputs": GOOD}).json()
    assert status == 200
    assert reply["outputs"][0] == pytest.approx(usual["outputs"][0], abs=1e-4)
    assert [*reply] == [*usual]


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (b"{", (), (400, "bad_request")),
        (json.dumps({"inputs": GOOD * 2000}).encode(), (), (413, "too_large")),
        (BODY, ("content-encoding: br",), (415, "unsupported_media_type")),
        (gzip.compress(bytes(50 << 20)), ("content-encoding: gzip",), (413, "too_large")),
        (json.dumps({"inputs": GOOD, "backend": "turbo"}).encode(), (), (400, "bad_request")),
        (json.dumps({"inputs": GOOD, "timeout_ms": 1e-6}).encode(), (), (504, "deadline_exceeded")),
    ],
    ids=["malformed", "rows", "encoding", "bomb", "backend", "deadline"],
)
def test_every_way_to_ask_is_refused_alike(
    server: RunningServer, door: dict[str, Any], body: bytes, headers: tuple[str, ...], expected: tuple[int, str]
) -> None:
    status, reply = through(server.port, door, body, *headers)
    assert (status, reply["code"], sorted(reply)) == (*expected, ["code", "error"])


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(
    ("encoding", "packed"), [("gzip", gzip.compress(BODY)), ("deflate", zlib.compress(BODY))], ids=["gzip", "deflate"]
)
def test_a_packed_body_is_unpacked(server: RunningServer, door: dict[str, Any], encoding: str, packed: bytes) -> None:
    status, reply = through(server.port, door, packed, f"content-encoding: {encoding}")
    assert (status, len(reply["outputs"])) == (200, 1)


def test_requests_sent_ahead_are_answered_in_their_order(server: RunningServer) -> None:
    bodies = [json.dumps({"inputs": GOOD, "id": str(index)}).encode() for index in range(20)]
    ahead = [request("/predict", body, is_chunked=index % 3 == 2) for index, body in enumerate(bodies[:-1])]
    replies = talk(server.port, b"".join(ahead) + request("/predict", bodies[-1], CLOSE))
    assert [part.split(b'"')[0] for part in replies.split(b'"id":"')[1:]] == [b"%d" % index for index in range(20)]


def rows_of(value: int) -> bytes:
    """A body of always the same length."""
    return json.dumps({"inputs": [[float(value)] * 64], "id": f"{value:04d}"}).encode()


def ids_in(replies: bytes) -> list[bytes]:
    return [part.split(b'"')[0] for part in replies.split(b'"id":"')[1:]]


def test_requests_that_begin_alike_are_each_answered_for_their_own_rows(server: RunningServer) -> None:
    sent = [request("/predict", rows_of(value)) for value in range(1, 8)]
    replies = talk(server.port, *sent, request("/predict", rows_of(9), CLOSE), pause_s=0.02)
    assert ids_in(replies) == [b"%04d" % value for value in (*range(1, 8), 9)]
    alone = [talk(server.port, request("/predict", rows_of(value), CLOSE)) for value in (1, 7)]
    for one in alone:
        outputs = one.partition(b'"outputs":')[2].partition(b"]]")[0]
        assert outputs in replies


def test_a_head_seen_before_may_have_a_body_in_pieces_or_another_request_behind_it(server: RunningServer) -> None:
    first, second, third = (request("/predict", rows_of(value)) for value in (1, 2, 3))
    pieces = (first, second[:-9], second[-9:] + third[:40], third[40:] + first, request("/predict", rows_of(4), CLOSE))
    replies = talk(server.port, *pieces, pause_s=0.02)
    assert ids_in(replies) == [b"0001", b"0002", b"0003", b"0001", b"0004"]


def test_more_heads_than_are_remembered_are_all_answered(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for index in [*range(300), 0, 1, 299]:
            connection.sendall(request("/predict", rows_of(index), f"x-request-id: head-{index}"))
            reply = connection.recv(65536)
            assert b"x-request-id: head-%d\r\n" % index in reply
            assert ids_in(reply) == [b"%04d" % index]


def test_a_body_that_comes_in_pieces_is_one_request(server: RunningServer) -> None:
    sent = request("/predict", BODY, CLOSE)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(sent), 7):
            connection.sendall(sent[at : at + 7])
        reply = b""
        while data := connection.recv(65536):
            reply += data
    assert parsed(reply)[0] == 200


def test_a_connection_without_requests_is_closed_in_time(lend: Start) -> None:
    server = lend("--keep-alive-s", "0.3")
    body = json.dumps({"inputs": [0.5] * 8}).encode()
    assert talk(server.port, b"") == b""
    assert answer(server.port, request("/predict", body)).startswith(b"HTTP/1.1 200")
    assert answer(server.port, b"GET /backend HTTP/1.1\r\nhost: x\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent", [request()[:20], request()[:-5], request(is_chunked=True)[:-5]], ids=["head", "body", "chunk"]
)
def test_a_request_that_does_not_arrive_whole_is_given_up(lend: Start, sent: bytes) -> None:
    server = lend("--receive-timeout-s", "0.3")
    status, reply = parsed(talk(server.port, sent))
    assert (status, reply["code"]) == (400, "bad_request")
    assert re.fullmatch(r"expected a whole request, got part of one in \d+\.\d s; send it faster, .*", reply["error"])


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (b"\x16\x03\x01\x00\x05hello\r\n\r\n", r"expected an HTTP/1\.1 request, got bytes that are none; send .*"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 65536, r"expected at most 65536 bytes of headers, got more; send fewer .*"),
        (
            b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n"
            b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: y\r\n\r\n",
            r"expected an Upgrade header, .*, got another; leave it out, .*",
        ),
    ],
    ids=["TLS", "headers", "upgrade"],
)
def test_what_is_no_request_is_refused_in_a_whole_sentence(server: RunningServer, sent: bytes, sentence: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(sent)
        reply = b""
        while data := connection.recv(65536):
            reply += data
    status, document = parsed(reply[reply.rindex(b"HTTP/1.1 4") :])
    assert (status, document["code"]) == (400, "bad_request")
    assert re.fullmatch(sentence, document["error"])
    assert re.search(rb"\r\nx-request-id: [0-9a-f]{16}\r\n\r\n{", reply)


def test_a_slow_answer_is_no_idle_connection(lend: Start) -> None:
    server = lend("--keep-alive-s", "0.5", "--receive-timeout-s", "0.5")
    body = json.dumps({"inputs": [0.5] * 8}).encode()
    kinds = (
        request("/predict", body),
        request("/predict", body, is_chunked=True),
        request("/predict", body) + request("/predict", body)[:-5],  # read no further while the first waits
    )

    def accepted(callers: ThreadPoolExecutor, sent: bytes) -> Future[bytes]:
        before = server.accepted()
        for _ in range(20):
            reply = callers.submit(talk, server.port, sent)
            server.wait_until(lambda reply=reply: reply.done() or server.accepted() > before)  # type: ignore[misc]
            if server.accepted() > before:
                return reply
        raise AssertionError("expected to be accepted, got let go as idle each time")

    with ThreadPoolExecutor(len(kinds)) as callers:
        with server.stopped("worker"):
            replies = [accepted(callers, sent) for sent in kinds]
            time.sleep(2)  # for longer than either limit; nothing is asserted of it
        assert [reply.result()[:12] for reply in replies] == [b"HTTP/1.1 200"] * len(kinds)


@pytest.mark.parametrize("is_chunked", [False, True], ids=["usual", "chunked"])
def test_what_nobody_waits_for_any_more_is_not_computed(lend: Start, is_chunked: bool) -> None:
    server = lend()
    body = json.dumps({"inputs": [[0.5] * 8] * 3}).encode()
    replies: list[bytes] = []
    accepted, abandoned = server.accepted(), server.metric("mlp_abandoned_total")
    with server.stopped("worker"):
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            leaving.sendall(request("/predict", body, is_chunked=is_chunked))
            server.wait_until(lambda: server.accepted() == accepted + 1)
        server.wait_until(lambda: server.metric("mlp_abandoned_total") == abandoned + 1)
        staying = threading.Thread(target=lambda: replies.append(talk(server.port, request("/predict", body, CLOSE))))
        staying.start()
        server.wait_until(lambda: server.accepted() == accepted + 2)
    staying.join()
    status, reply = parsed(replies[0])
    assert (status, reply["timing"]["batch_rows"]) == (200, 3)
    server.wait_until(lambda: server.metric("mlp_queue_rows") == 0)


def test_a_client_that_never_reads_is_let_go(lend: Start) -> None:
    server = lend("--keep-alive-s", "0.3")
    many = request("/predict", json.dumps({"inputs": [[0.5] * 8] * 1024}).encode())
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            connection.sendall(many * 1000)  # until the server gives it up


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "in pieces"])
def test_an_offer_to_upgrade_never_loses_the_body(server: RunningServer, is_whole: bool) -> None:
    sent = request("/predict", BODY, "upgrade: h2c", "connection: upgrade, close")
    at = sent.index(b"upgrade: h2c") + 4
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(sent if is_whole else sent[:at])
        time.sleep(
            0 if is_whole else 0.2
        )  # so that the rest comes by itself; either reply below would do if it did not
        connection.sendall(b"" if is_whole else sent[at:])
        reply = b""
        with contextlib.suppress(ConnectionResetError):
            while data := connection.recv(65536):
                reply += data
    assert parsed(reply)[0] in ((200,) if is_whole else (200, 400))
    assert "WebSocket" not in server.output


def test_a_wrong_key_is_refused_by_every_door(lend: Start) -> None:
    server = lend(MLP_API_KEY="right")
    body = json.dumps({"inputs": [0.5] * 8}).encode()
    for door in DOORS.values():
        assert through(server.port, door, body, "x-api-key: wrong")[1]["code"] == "unauthorized"
        assert through(server.port, door, body)[0] == 401
        assert through(server.port, door, body, "x-api-key: right")[0] == 200


@pytest.mark.parametrize("is_chunked", [False, True], ids=["usual", "chunked"])
def test_what_is_sent_ahead_is_let_in_only_as_it_is_answered(lend: Start, is_chunked: bool) -> None:
    server = lend()
    one = request("/predict", json.dumps({"inputs": [0.5] * 8}).encode(), is_chunked=is_chunked)
    before = resident_kib(server.pid_of("http"))
    with server.stopped("worker"), socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setblocking(False)
        sent = 0
        quiet = 0
        while quiet < 20:  # until nothing more is let in for a while
            try:
                sent += connection.send(one * 100)
                quiet = 0
            except BlockingIOError:
                quiet += 1
                time.sleep(0.02)
        assert sent >= 1000 * len(one)  # enough for the bound to be put to the test
        assert resident_kib(server.pid_of("http")) - before < 64 << 10


TRAILED = (
    b"POST /predict HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    b"%x\r\n%b\r\n0\r\n%b\r\n"
)


@pytest.mark.parametrize("trailer", ["content-type: text/plain", "content-encoding: gzip", "x-request-id: evil"])
def test_trailers_say_nothing(server: RunningServer, trailer: str) -> None:
    reply = talk(server.port, TRAILED % (len(BODY), BODY, trailer.encode() + b"\r\n"))
    assert parsed(reply)[0] == 200
    assert b"evil" not in reply


def test_a_trailer_is_no_key(lend: Start) -> None:
    server = lend(MLP_API_KEY="right")
    body = json.dumps({"inputs": [0.5] * 8}).encode()
    assert parsed(talk(server.port, TRAILED % (len(body), body, b"x-api-key: right\r\n")))[0] == 401


def require_cut_off(server: RunningServer, *pieces: bytes) -> None:
    """Assert that what is sent is refused for its length, or the connection reset before all of it is sent."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        status, reply = parsed(talk(server.port, *pieces))
        assert (status, reply["code"]) == (400, "bad_request")
        assert re.match(r"expected at most 65536 bytes .*, got more; ", reply["error"])
    assert server.answers("/v2/health/live", 200)


def test_trailers_are_bounded(server: RunningServer) -> None:
    require_cut_off(server, TRAILED % (len(BODY), BODY, b"a: b\r\n" * 100_000))


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("target", ["/predict", "/predict?x=1"])
def test_a_head_may_end_anywhere_in_what_is_read(server: RunningServer, target: str, cut: int) -> None:
    sent = request(target, json.dumps({"inputs": GOOD * 600}).encode(), CLOSE)
    at = sent.index(b"\r\n\r\n") + cut
    reply = talk(server.port, sent[:at], sent[at:], pause_s=0.05)
    assert parsed(reply)[0] == 200


@pytest.mark.parametrize("is_chunked", [False, True], ids=["usual", "chunked"])
def test_bytes_that_are_no_request_do_not_take_the_reply_before_them(server: RunningServer, is_chunked: bool) -> None:
    reply = talk(server.port, request("/predict", BODY, is_chunked=is_chunked) + b"\x00garbage\r\n\r\n")
    first, _, rest = reply.partition(b"HTTP/1.1 400")
    assert first.startswith(b"HTTP/1.1 200")
    assert b'"bad_request"' in rest


def test_the_body_behind_an_upgrade_is_never_taken_for_a_request(server: RunningServer) -> None:
    inner = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    ahead = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
    reply = talk(server.port, ahead + request("/predict", inner, "upgrade: h2c", "connection: upgrade"))
    assert reply.count(b'{"live":true}') == 1


@pytest.mark.parametrize("target", ["/predict", "/predict?x=1"])
def test_a_length_with_leading_zeros_is_a_length(server: RunningServer, target: str) -> None:
    length = f"content-length: {'0' * 5000}{len(BODY)}"
    head = f"POST {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{length}\r\n\r\n"
    assert parsed(talk(server.port, head.encode() + BODY))[0] == 200


def test_a_client_that_leaves_in_a_body_of_the_app_leaves_no_traceback(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"PUT /backend HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nab")
    assert server.get("/v2/health/live").status_code == 200
    assert "Traceback" not in server.output


def test_a_reply_without_a_body_keeps_its_place(server: RunningServer) -> None:
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(b"HEAD /nope HTTP/1.1\r\nhost: x\r\n\r\n")
            time.sleep(0.001)
            connection.sendall(request("/predict", b"{", CLOSE))
            reply = b""
            while data := connection.recv(65536):
                reply += data
        assert [part[:4] for part in reply.split(b"HTTP/1.1 ")[1:]] == [b"404 ", b"400 "]


def test_connections_beyond_the_bound_are_refused_and_those_within_it_served(lend: Start) -> None:
    server = lend("--max-connections", "2")
    body = json.dumps({"inputs": [0.5] * 8}).encode()
    with contextlib.ExitStack() as open_connections:
        pool = [
            open_connections.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            for _ in range(2)
        ]
        for connection in pool:
            connection.sendall(request("/predict", body))
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        reply = talk(server.port, request("/predict", body))
        status, document = parsed(reply)
        assert (status, document["code"]) == (429, "overloaded")
        assert b"retry-after: 1" in reply
        pool[0].sendall(request("/predict", body))
        assert pool[0].recv(65536).startswith(b"HTTP/1.1 200")
    server.wait_until(lambda: talk(server.port, request("/predict", body, CLOSE)).startswith(b"HTTP/1.1 200"))


def test_a_body_is_never_rewritten_into_another_request(server: RunningServer, client: httpx.Client) -> None:
    before = client.get("/backend").json()
    evil = b'PUT /backend HTTP/1.1\r\nhost: x\r\ncontent-length: 19\r\nx-request-id: evil\r\n\r\n{"default":"eager"}'
    body = b"x" + b"\r\nupgrade:" * 20 + evil
    sent = request("/predict", body, CLOSE)
    for cut in (1, 2, 3):
        at = sent.index(b"\r\n\r\n") + cut
        reply = talk(server.port, sent[:at], sent[at:], pause_s=0.05)
        assert reply.count(b"HTTP/1.1 ") == 1
        assert b"evil" not in reply
    assert client.get("/backend").json() == before


HALVES = (
    request()[:-5],
    request(is_chunked=True)[:-5],
    b"PUT /backend HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{",
)


def test_whole_requests_are_answered_at_the_end_whatever_is_half_sent_behind_them(
    start: Start, tiny_model: Path
) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    body = json.dumps({"inputs": [0.5] * 8}).encode()
    sent = [request(target, body) + half for target in ("/predict", "/predict?x=1") for half in HALVES]
    with server.stopped("worker"), ThreadPoolExecutor(len(sent)) as callers:
        replies = [callers.submit(talk, server.port, each) for each in sent]
        server.wait_until(lambda: server.accepted() == len(sent))
        server.process.terminate()
        server.wait_until(lambda: server.answers("/v2/health/live", 503) or not server.is_listening())
        os.kill(server.pid_of("worker"), signal.SIGCONT)
        assert [reply.result()[:12] for reply in replies] == [b"HTTP/1.1 200"] * len(sent)
    assert server.wait_exit() == 0


@pytest.mark.parametrize("endless", [b"x: " + b"a" * (1 << 22), b"a" * (1 << 22)], ids=["value", "name"])
def test_an_endless_trailer_is_cut_off(server: RunningServer, endless: bytes) -> None:
    head = b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    require_cut_off(server, head, endless)


def test_a_chunk_extension_without_end_is_cut_off(server: RunningServer) -> None:
    head = b"POST /predict HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2;a="
    require_cut_off(server, head, b"a" * (1 << 22))


def test_the_rest_of_an_answered_request_that_never_comes_ends_the_connection_silently(lend: Start) -> None:
    server = lend("--receive-timeout-s", "0.3")
    reply = talk(server.port, b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nab")
    assert reply.count(b"HTTP/1.1 ") == 1
    assert parsed(reply)[0] == 404


SHORTEST = b"GET / HTTP/1.1\r\nhost:\r\n\r\n"


def test_of_what_is_sent_ahead_little_is_parsed_before_its_turn(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()  # whose heap no other test has grown
    one = request("/predict", json.dumps({"inputs": [0.5] * 8}).encode())
    pid, accepted = server.pid_of("http"), server.accepted()
    with contextlib.ExitStack() as connections, server.stopped("worker"):
        before = resident_kib(pid)
        with server.stopped("http"):  # so that one read brings all that a socket holds
            for _ in range(24):
                connection = connections.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                connection.setblocking(False)
                assert connection.send(one + SHORTEST * 8000) > 60_000  # more than 2400 requests
        server.wait_until(lambda: server.accepted() == accepted + 24)
        assert resident_kib(pid) - before < 24 << 10  # 1 kB for each request would be twice that


def test_requests_sent_ahead_and_refused_at_once_leave_others_their_turn(lend: Start) -> None:
    server = lend()
    before = server.metric("mlp_rejected_total", code="bad_request")
    packed = request("/predict", gzip.compress(bytes(60_000)), "content-encoding: gzip")
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as greedy,
        socket.create_connection(("127.0.0.1", server.port), timeout=60) as other,
    ):
        with server.stopped("http"):
            greedy.sendall(packed * 200)
            other.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        shown = b""
        while data := other.recv(65536):
            shown += data
        refused = sum(float(line.split()[-1]) for line in shown.splitlines() if b'code="bad_request"' in line)
        assert refused - before < 100
        replies = b""
        while replies.count(b"HTTP/1.1 400") < 200:
            replies += greedy.recv(65536)


def test_many_requests_sent_ahead_of_every_kind_are_all_answered_in_their_order(server: RunningServer) -> None:
    kinds = (
        lambda name: b"GET /nope HTTP/1.1\r\nhost: x\r\nx-request-id: %b\r\n\r\n" % name,
        lambda name: request("/predict", b"{", f"x-request-id: {name.decode()}"),
        lambda name: request("/predict", b"\r\n\r\n" * 200, f"x-request-id: {name.decode()}"),
        lambda name: request("/predict", b"\r\n\r\n" * 200, f"x-request-id: {name.decode()}", is_chunked=True),
        lambda name: request("/predict", BODY, f"x-request-id: {name.decode()}"),
    )
    names = [b"ahead-%d" % index for index in range(150)]
    sent = b"".join(kinds[(index + index // 5) % 5](name) for index, name in enumerate(names))
    replies = talk(server.port, sent + request("/predict", BODY, CLOSE))
    assert re.findall(rb"x-request-id: (ahead-\d+)\r", replies) == names
    assert replies.count(b"HTTP/1.1 ") == len(names) + 1


HOSTS = (
    (b"", "expected one Host header, got none; "),
    (b"host: x\r\nhost: x\r\n", "expected one Host header, got 2; "),
    (b"host: x\r\nHost: y\r\n", "expected one Host header, got 2; "),
    (b"host: x y\r\n", "host: expected a name or an address, with or without a port, got 'x y'"),
    (b"host: http://x/\r\n", "got 'http://x/'"),
    (b"host: x@y\r\n", "got 'x@y'"),
    (b"host: caf\xe9\r\n", "got 'caf"),
    (b"host: x:http\r\n", "got 'x:http'"),
)
ROUTES = (
    b"POST /predict HTTP/1.%d\r\ncontent-length: %d\r\n",
    b"POST /predict?x=1 HTTP/1.%d\r\ncontent-length: %d\r\n",
    b"GET /v2/health/live HTTP/1.%d\r\ncontent-length: %d\r\n",
    b"GET /nope HTTP/1.%d\r\ncontent-length: %d\r\n",
)


@pytest.mark.parametrize("route", ROUTES, ids=["usual", "query", "live", "nope"])
@pytest.mark.parametrize(("hosts", "sentence"), HOSTS, ids=[sentence for _, sentence in HOSTS])
def test_a_request_that_leaves_its_host_open_is_refused_on_every_route(
    server: RunningServer, route: bytes, hosts: bytes, sentence: str
) -> None:
    ahead, behind = request("/predict", BODY), request("/predict", BODY)
    for sent in (b"", ahead):
        reply = talk(server.port, sent + route % (1, len(BODY)) + hosts + b"\r\n" + BODY + behind)
        assert reply.count(b"HTTP/1.1 200") == bool(sent)
        reply = reply[reply.index(b"HTTP/1.1 400") :]
        assert b"\r\nconnection: close\r\nx-request-id: " in reply
        status, document = parsed(reply)
        assert (status, document["code"]) == (400, "bad_request")
        assert sentence in document["error"]


@pytest.mark.parametrize(
    ("version", "host"),
    [(1, b"x"), (1, b""), (1, b"127.0.0.1:8000"), (1, b"[::1]:8000"), (1, b"a_b.c-d.e:"), (1, b"x%20y"), (0, None)],
    ids=str,
)
@pytest.mark.parametrize("route", ROUTES[:3], ids=["usual", "query", "live"])
def test_one_host_of_any_form_is_taken_and_old_http_needs_none(
    server: RunningServer, route: bytes, version: int, host: bytes | None
) -> None:
    line = b"" if host is None else b"host: %b\r\n" % host
    head = route % (version, len(BODY)) + line + b"connection: close\r\n\r\n"
    assert talk(server.port, head + BODY).startswith(b"HTTP/1.1 200")


def test_two_hosts_are_refused_in_old_http_too(server: RunningServer) -> None:
    head = b"GET /v2/health/live HTTP/1.0\r\nhost: x\r\nhost: x\r\n\r\n"
    assert parsed(talk(server.port, head))[0] == 400


def test_a_head_request_without_a_host_is_refused_without_a_body(server: RunningServer) -> None:
    head, _, body = talk(server.port, b"HEAD / HTTP/1.1\r\n\r\n").partition(b"\r\n\r\n")
    assert (head[:12], body) == (b"HTTP/1.1 400", b"")


class FaultyServer(RunningServer):
    program = ("-m", "tests.service.faulty_server")


def test_a_fault_of_ours_at_the_headers_is_told_as_one_and_logged(tmp_path: Path, tiny_model: Path) -> None:
    server = FaultyServer(tmp_path / "log", "--model", str(tiny_model), *EAGER)
    try:
        server.wait_ready()
        for door in ("usual", "query"):
            status, reply = through(server.port, DOORS[door])
            assert (status, reply["code"]) == (500, "internal")
        assert server.output.count("LookupError: planted") == 2
    finally:
        server.end()


def test_a_key_of_any_bytes_is_compared_by_them_and_bad_requests_leave_no_lines(lend: Start) -> None:
    server = lend(MLP_API_KEY=os.fsdecode(b"caf\xe9"))
    ask = b"GET /backend HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-api-key: %b\r\n\r\n"
    assert parsed(talk(server.port, ask % b"caf\xe9"))[0] == 200
    assert parsed(talk(server.port, ask % "café".encode()))[0] == 401
    body = json.dumps({"inputs": [0.5] * 8}).encode()
    assert parsed(talk(server.port, request("/predict", body, CLOSE)))[0] == 401
    assert parsed(talk(server.port, b"garbage\r\n\r\n"))[0] == 400
    assert "Invalid HTTP request" not in server.output
