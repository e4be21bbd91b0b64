"""Bad input over a real port: the right row of the error table, the server unharmed, the neighbours answered."""

import contextlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.exposition import value
from tests.service.running_server import ROOT, RunningServer, Start, talk

pytestmark = pytest.mark.slow  # real servers

GOOD = [[float(value % 17) for value in range(64)]]
TYPE = {"content-type": "application/json"}
MEBIBYTE = 1 << 20
INSIDE = re.compile(
    r"Traceback|File \\?\"|\.py\b|site-packages|0x[0-9a-f]{6}|" + re.escape(str(ROOT))
)  # nobody's business


def require_error(reply: httpx.Response, status: int, code: str) -> str:
    """Assert the one form that errors have, and return the sentence."""
    document = reply.json()
    assert (reply.status_code, document.get("code"), sorted(document)) == (status, code, ["code", "error"]), reply.text
    assert reply.headers["x-request-id"]
    assert "\n" not in document["error"]
    assert not INSIDE.search(reply.text + str(reply.headers))
    sentence: str = document["error"]
    return sentence


@pytest.fixture(autouse=True)
def _server_stays_unharmed(server: RunningServer, client: httpx.Client) -> Iterator[None]:
    yield
    assert client.post("/predict", json={"inputs": GOOD}).status_code == 200
    assert "Traceback" not in server.output


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "got an empty one"),
    (b'{"inputs": [', "not valid JSON"),
    (b"\xff\x00", "not valid JSON"),
    (b'{"inputs": [[NaN]]}', "not valid JSON"),
    (b"null", "expected a JSON object"),
    (b"{}", "inputs: this field is required"),
    (b'{"inputs": []}', "at least one row of 64 numbers"),
    (json.dumps({"inputs": [[1.0] * 63]}).encode(), "rows of 64 numbers, got 63"),
    (json.dumps({"inputs": [[1.0] * 64, [1.0] * 63]}).encode(), "inputs[1]: expected a list of 64"),
    (json.dumps({"inputs": [["1.0"] * 64]}).encode(), "expected a number, got a string"),
    (json.dumps({"inputs": [[None] * 64]}).encode(), "expected a number, got null"),
    (json.dumps({"inputs": [[1e39] * 64]}).encode(), "within float32's range"),
    (json.dumps({"inputs": GOOD, "backend": "turbo"}).encode(), "expected one of eager, compiled, fused, got 'turbo'"),
    (json.dumps({"inputs": GOOD, "turbo": True}).encode(), "'turbo': no such field"),
    (json.dumps({"inputs": GOOD, "timeout_ms": -1}).encode(), "timeout_ms"),
]


@pytest.mark.parametrize(("body", "message"), BAD_BODIES, ids=[message for _, message in BAD_BODIES])
def test_a_bad_body_is_a_bad_request_that_says_why(client: httpx.Client, body: bytes, message: str) -> None:
    assert message in require_error(client.post("/predict", content=body, headers=TYPE), 400, "bad_request")
    if b'"backend"' not in body:
        assert message in require_error(client.post("/predict/eager", content=body, headers=TYPE), 400, "bad_request")


def test_an_unknown_backend_in_the_path_lists_those_there_are(client: httpx.Client) -> None:
    sentence = require_error(client.post("/predict/turbo", json={"inputs": GOOD}), 400, "bad_request")
    assert "eager, compiled, fused" in sentence


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/predict/{}", (400, "bad_request")),
        ("GET", "/predict/{}", (405, "method_not_allowed")),
        ("POST", "/v2/models/{}/infer", (404, "not_found")),
        ("GET", "/v2/models/{}", (404, "not_found")),
        ("GET", "/static/{}", (404, "not_found")),
        ("GET", "/docs/{}", (404, "not_found")),
        ("GET", "/{}", (404, "not_found")),
    ],
    ids=str,
)
def test_a_long_name_in_the_path_is_shown_in_part(
    client: httpx.Client, method: str, path: str, expected: tuple[int, str]
) -> None:
    reply = client.request(method, path.format("long" * 2000), json={"inputs": GOOD} if method == "POST" else None)
    sentence = require_error(reply, *expected)
    assert "longlong" in sentence
    assert len(sentence) < 300


def test_a_path_and_a_body_that_disagree_on_the_backend_are_refused(client: httpx.Client) -> None:
    reply = client.post("/predict/fused", json={"inputs": GOOD, "backend": "eager"})
    assert "the path asks for 'fused' and the body for 'eager'" in require_error(reply, 400, "bad_request")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/predict", "/predict/fused", "/v2/models/digits/infer"])
def test_another_method_is_not_allowed_and_the_right_one_named(client: httpx.Client, method: str, path: str) -> None:
    reply = client.request(method, path)
    require_error(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "POST"


def test_another_method_on_a_route_with_several_names_them_all(client: httpx.Client) -> None:
    reply = client.patch("/backend")
    require_error(reply, 405, "method_not_allowed")
    assert reply.headers["allow"] == "GET, HEAD, PUT"


@pytest.mark.parametrize(
    "path", ["/", "/health", "/v2/health/live", "/v2/models/digits", "/metrics", "/backend", "/nope"]
)
def test_head_is_answered_as_get_is_without_the_body(client: httpx.Client, path: str) -> None:
    told, whole = client.head(path), client.get(path)
    assert (told.status_code, told.content) == (whole.status_code, b"")
    assert told.headers["content-type"] == whole.headers["content-type"]


def test_head_is_not_allowed_where_get_is_not(client: httpx.Client) -> None:
    for path in ("/predict", "/v2/models/digits/infer", "/compare"):
        reply = client.head(path)
        assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/nope", "/v2/nope", "/v2/models/other", "/predict/a/b"])
def test_a_route_or_model_that_is_not_there_is_not_found(client: httpx.Client, path: str) -> None:
    method = "POST" if path == "/predict/a/b" else "GET"
    status, code = (400, "bad_request") if path == "/predict/a/b" else (404, "not_found")
    require_error(client.request(method, path, json={"inputs": GOOD} if method == "POST" else None), status, code)


def test_no_route_is_found_with_a_slash_too_many(client: httpx.Client) -> None:
    routes = client.get("/openapi.json").json()["paths"]
    hidden = {"/docs": ["get"], "/openapi.json": ["get"], "/static/page.js": ["get"]}
    asked = 0
    for path, methods in (routes | hidden).items():
        if path in ("/", "/v2"):  # the protocol's own client asks for /v2/
            continue
        for method in methods:
            url = path.format(name="digits", backend="eager", id="x") + "/"
            reply = client.request(method, url, json={"inputs": GOOD})
            if url.startswith("/predict/"):
                assert "expected one of eager, compiled, fused" in require_error(reply, 400, "bad_request")
            else:
                assert f"no such route: {url}" in require_error(reply, 404, "not_found")
            asked += 1
    assert asked > 15


def test_inference_on_another_model_is_not_found_and_counts(client: httpx.Client) -> None:
    def counted() -> tuple[float, float]:
        text = client.get("/metrics").text
        return (
            value(text, "mlp_rejected_total", code="not_found"),
            value(text, "mlp_requests_total", backend="none", status="404"),
        )

    before = counted()
    reply = client.post("/v2/models/other/infer", json={})
    assert "no model 'other' here; this server has 'digits'" in require_error(reply, 404, "not_found")
    assert client.get("/v2/models/other").status_code == client.post("/v2/models/digits/nope").status_code == 404
    assert counted() == (before[0] + 1, before[1] + 1)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", "multipart/form-data"]
)
@pytest.mark.parametrize("path", ["/predict", "/v2/models/digits/infer"])
def test_another_content_type_is_unsupported(client: httpx.Client, path: str, content_type: str) -> None:
    reply = client.post(path, content=json.dumps({"inputs": GOOD}).encode(), headers={"content-type": content_type})
    assert content_type in require_error(reply, 415, "unsupported_media_type")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", None])
def test_json_by_any_of_its_names_or_none_is_read(client: httpx.Client, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    reply = client.post("/predict", content=json.dumps({"inputs": GOOD}).encode(), headers=headers)
    assert reply.status_code == 200


def test_a_body_of_100_megabytes_is_too_large(server: RunningServer) -> None:
    body = b'{"inputs": [' + b" " * 100_000_000 + b"]}"
    reply = httpx.post(server.url + "/predict", content=body, headers=TYPE, timeout=60)
    assert "at most 2162688 bytes, got 100000014" in require_error(reply, 413, "too_large")
    assert reply.headers["connection"] == "close"


def test_a_refused_body_that_waits_to_be_asked_for_closes_the_connection_once(server: RunningServer) -> None:
    head = b"POST /predict HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 100000014\r\n\r\n"
    reply = talk(server.port, head)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert reply.count(b"connection: close\r\n") == 1


@pytest.mark.parametrize(("method", "path"), [("POST", "/predict"), ("PUT", "/backend")])
def test_a_body_that_does_not_tell_its_length_is_cut_off_at_the_bound(
    server: RunningServer, method: str, path: str
) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * MEBIBYTE

    reply = httpx.request(method, server.url + path, content=chunks(), headers=TYPE, timeout=60)
    assert "at most 2162688 bytes, got more" in require_error(reply, 413, "too_large")


def test_more_rows_than_the_bound_are_too_large(client: httpx.Client) -> None:
    reply = client.post("/predict", json={"inputs": [[0] * 64] * 1025})
    assert "at most 1024 rows in one request, got 1025" in require_error(reply, 413, "too_large")


@pytest.mark.parametrize("levels", [17, 70, 300])
@pytest.mark.parametrize("innermost", ["0", '"a"'])
def test_nesting_deeper_than_any_tensor_is_a_bad_request(client: httpx.Client, levels: int, innermost: str) -> None:
    nest = "[" * levels + innermost + "]" * levels
    for body in (f'{{"inputs": {nest}}}', f'{{"inputs": [0], "id": {nest}}}', f'{{"inputs": [{{"a": {nest}}}]}}'):
        require_error(client.post("/predict", content=body.encode(), headers=TYPE), 400, "bad_request")
    require_error(client.put("/backend", content=f'{{"default": {nest}}}'.encode(), headers=TYPE), 400, "bad_request")


def test_an_empty_backend_is_no_backend(client: httpx.Client) -> None:
    require_error(client.post("/predict", json={"inputs": GOOD, "backend": ""}), 400, "bad_request")
    require_error(client.post("/predict/", json={"inputs": GOOD}), 400, "bad_request")


def test_what_a_caller_sent_is_never_echoed_without_bound(client: httpx.Client) -> None:
    for body in ({"inputs": GOOD, "x" * 100_000: 1}, {"inputs": GOOD, "backend": "x" * 100_000}):
        assert len(require_error(client.post("/predict", json=body), 400, "bad_request")) <= 1000


def request_bytes(*headers: str) -> bytes:
    body = json.dumps({"inputs": GOOD}).encode()
    lines = ["POST /predict HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join([*lines, *headers]).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("path", ["/predict", "/compare"])
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(
    ("twice", "shown"),
    [
        (("content-encoding: gzip", "content-encoding: identity"), "gzip, identity"),
        (("content-encoding: identity", "content-encoding: gzip"), "identity, gzip"),
        (("content-type: application/json", "content-type: text/plain"), "application/json, text/plain"),
        (("content-type: text/plain", "content-type: application/json"), "text/plain, application/json"),
    ],
)
def test_no_line_of_a_header_that_comes_twice_is_taken_for_the_only_one(
    server: RunningServer, path: str, is_chunked: bool, twice: tuple[str, str], shown: str
) -> None:
    body = json.dumps({"inputs": GOOD}).encode()
    length = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(body)}"
    content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    head = "\r\n".join([f"POST {path} HTTP/1.1", "host: x", "connection: close", length, *twice])
    reply = talk(server.port, head.encode() + b"\r\n\r\n" + content)
    assert reply.startswith(b"HTTP/1.1 415")
    assert f"got '{shown}'".encode() in reply


@pytest.mark.parametrize("path", ["/predict", "/compare"])
@pytest.mark.parametrize("codings", [("gzip, chunked",), ("gzip", "chunked")])
def test_a_body_that_is_packed_for_its_way_is_refused_and_not_taken_for_a_plain_one(
    server: RunningServer, path: str, codings: tuple[str, ...]
) -> None:
    body = json.dumps({"inputs": GOOD}).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", *(f"transfer-encoding: {coding}" for coding in codings)]
    head = "\r\n".join([*lines, "content-type: application/json", "\r\n"]).encode()
    last = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    reply = talk(server.port, head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) + last)
    assert reply.startswith(b"HTTP/1.1 415")
    assert b"transfer-encoding: expected chunked or none, got 'gzip, chunked'" in reply
    assert reply.count(b"HTTP/1.1 200") == 1  # of the request behind it


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_an_offer_to_upgrade_is_ignored_and_the_body_read(server: RunningServer, upgrade: str) -> None:
    reply = talk(server.port, request_bytes(f"Upgrade: {upgrade}", "Connection: Upgrade, close"))
    assert reply.startswith(b"HTTP/1.1 200")


def test_headers_without_end_are_cut_off(server: RunningServer) -> None:
    flood = b"GET / HTTP/1.1\r\n" + b"x-a: " + b"b" * 300_000
    reply = b""
    with contextlib.suppress(ConnectionError):
        reply = talk(server.port, flood)
    assert reply == b"" or (reply.startswith(b"HTTP/1.1 400") and b"bytes of headers" in reply)


def test_clients_that_reset_their_connection_leave_no_trace_in_the_log(server: RunningServer) -> None:
    before, answered = server.output, server.metric("mlp_requests_total")
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(request_bytes() * 3)
    assert server.post("/predict", json={"inputs": GOOD}).status_code == 200
    server.wait_until(lambda: server.metric("mlp_inflight_requests") == 0)
    assert server.metric("mlp_requests_total") > answered
    assert server.output == before


def test_a_client_that_leaves_in_mid_body_harms_nobody(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")


def test_bytes_that_are_no_http_get_an_error_and_a_closed_connection(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01 what is this\r\n\r\n")
        reply = b""
        while data := connection.recv(4096):
            reply += data
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["code"] == "bad_request"


def test_a_result_that_json_cannot_hold_is_an_error_for_its_caller_alone(start: Start, tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    config["norm"]["kind"] = "none"  # so that gate times up overflows
    (tiny_model / "config.json").write_text(json.dumps(config))
    server = start("--model", str(tiny_model), "--backends", "eager,fused").wait_ready()
    replies: dict[tuple[int, str], httpx.Response] = {}

    def ask(client: httpx.Client, index: int, backend: str, value: float) -> None:
        replies[index, backend] = client.post(f"/predict/{backend}", json={"inputs": [[value] * 8]})

    with httpx.Client(base_url=server.url, timeout=60) as client:
        for backend in ("eager", "fused"):
            expected = client.post(f"/predict/{backend}", json={"inputs": [[0.5] * 8]}).json()["outputs"]
            values = [3e38 if index % 4 == 0 else 0.5 for index in range(16)]
            threads = [
                threading.Thread(target=ask, args=(client, index, backend, value)) for index, value in enumerate(values)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for index in range(16):
                if index % 4 == 0:
                    sentence = require_error(replies[index, backend], 422, "non_finite_output")
                    assert "JSON cannot carry them" in sentence
                    told = replies[index, backend].headers
                    assert (told["x-backend"], int(told["x-batch-rows"]) > 0) == (backend, True)
                    assert {"x-implementation", "x-queue-us", "x-compute-us", "x-encode-us"} <= set(told)
                else:
                    assert replies[index, backend].json()["outputs"][0] == pytest.approx(expected[0], rel=1e-4)


def test_bad_requests_between_good_ones_change_nothing_for_the_good(client: httpx.Client) -> None:
    outcomes: dict[int, int] = {}

    def ask(index: int) -> None:
        body = BAD_BODIES[index % len(BAD_BODIES)][0] if index % 2 else json.dumps({"inputs": GOOD}).encode()
        outcomes[index] = client.post("/predict", content=body, headers=TYPE).status_code

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {index: 400 if index % 2 else 200 for index in range(40)}


def test_a_deadline_that_passes_is_exceeded(client: httpx.Client) -> None:
    reply = client.post("/predict", json={"inputs": GOOD, "timeout_ms": 1e-6})
    assert "no result within 1e-06 ms" in require_error(reply, 504, "deadline_exceeded")


def test_a_request_id_is_echoed_and_one_is_made_where_none_or_a_wild_one_came(client: httpx.Client) -> None:
    body = {"inputs": GOOD}
    assert client.post("/predict", json=body, headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {client.post("/predict", json=body).headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    assert client.post("/predict", json=body, headers={"x-request-id": "x" * 500}).headers["x-request-id"] != "x" * 500


def test_a_key_guards_every_route_but_the_page_liveness_and_readiness(start: Start, tiny_model: Path) -> None:
    guarded = start("--model", str(tiny_model), "--backends", "eager", MLP_API_KEY="hush-hush").wait_ready()
    guarded.wait_until(lambda: "/docs, which asks for the key as well)" in guarded.output)
    guarded.wait_until(lambda: '-H "X-API-Key: $MLP_API_KEY" -d ' in guarded.output)
    with httpx.Client(base_url=guarded.url, timeout=60) as client:
        body = {"inputs": [0.5] * 8}
        for path in ("/predict", "/backend", "/model", "/docs", "/nope", "/static/nope.js", "/static/"):
            reply = client.get(path, headers={"x-api-key": "hush"})
            assert require_error(reply, 401, "unauthorized").endswith(": Bearer <key>, got another one")
            assert require_error(client.get(path), 401, "unauthorized").endswith(", got none")
            assert reply.headers["www-authenticate"] == "Bearer"
        for path in ("/v2/health/live", "/v2/health/ready", "/health", "/", "/static/page.js"):
            assert client.get(path).status_code == 200
        for headers in (
            {"x-api-key": "hush-hush"},
            {"authorization": "Bearer hush-hush"},
            {"authorization": "bearer  hush-hush"},
        ):
            assert client.post("/predict", json=body, headers=headers).status_code == 200
        document = client.get("/openapi.json", headers={"x-api-key": "hush-hush"}).json()
        assert document["security"] == [{"key": []}, {"bearer": []}]
        assert document["components"]["securitySchemes"]["key"] == {
            "type": "apiKey",
            "in": "header",
            "name": "X-API-Key",
        }
        routes = {path: route.get("security") for path, each in document["paths"].items() for route in each.values()}
        assert {path for path, asked in routes.items() if asked == []} == {
            "/v2/health/live",
            "/v2/health/ready",
            "/health",
        }
        assert routes["/predict"] is None  # as the whole document
    for status, key in (
        (b"200", b"X-API-Key:\thush-hush \t"),
        (b"200", b"Authorization: Bearer hush-hush "),
        (b"200", b"x-api-key:hush-hush"),
        (b"401", b"x-api-key: hush\r\nx-api-key: hush-hush"),
        (b"401", b"x-api-key: hush-hush\r\nx-api-key: hush"),
    ):
        told = talk(guarded.port, b"GET /model HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + key + b"\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 %b " % status), told
    assert "hush-hush" not in guarded.output


def test_a_full_queue_is_overloaded(start: Start, tiny_model: Path) -> None:
    bounds = ("--max-batch-rows", "4", "--max-queue-rows", "4")
    small = start("--model", str(tiny_model), "--backends", "eager", *bounds).wait_ready()
    statuses: list[int] = []

    def load() -> None:
        with httpx.Client(base_url=small.url, timeout=60) as client:
            for _ in range(50):
                reply = client.post("/predict", json={"inputs": [[0.5] * 8] * 3})
                statuses.append(reply.status_code)
                if reply.status_code != 200:
                    require_error(reply, 429, "overloaded")
                    assert reply.headers["retry-after"] == "1"

    threads = [threading.Thread(target=load) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200, 429}
