"""Spans as a collector receives them: a real server, and a real OTLP endpoint over HTTP."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from tests.service.running_server import ROOT, RunningServer, Start, free_port

STAGES = ("decode", "queue", "batch", "compute", "encode")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
LOADED = "google/_upb"  # protobuf's library, mapped into a process that loads the exporter


class Collector:
    """Takes traces on a free port; refuses them with 400 while `is_refusing`."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.is_refusing = False
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces" and not collector.is_refusing:
                    collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(400 if collector.is_refusing else 200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.05,)).start()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for each in request.resource_spans:
            names = {pair.key: pair.value.string_value for pair in each.resource.attributes}
            self.services.add(names["service.name"])
            for scope in each.scope_spans:
                self.spans.extend(scope.spans)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    @property
    def requests(self) -> list[Span]:
        return [span for span in self.spans if span.kind == Span.SPAN_KIND_SERVER]

    def inside(self, parent: Span) -> list[Span]:
        return [span for span in self.spans if span.parent_span_id == parent.span_id]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Span) -> dict[str, str | int]:
    values = {pair.key: pair.value for pair in span.attributes}
    return {key: value.string_value or value.int_value for key, value in values.items()}


def ask(
    server: RunningServer, width: int = 8, path: str = "/predict", request_id: str = "", traceparent: str = ""
) -> httpx.Response:
    headers = {"x-request-id": request_id, "traceparent": traceparent}
    given = {name: value for name, value in headers.items() if value}
    return server.post(path, json={"inputs": [[0.5] * width] * 2}, headers=given)


def loads_the_sdk(server: RunningServer) -> bool:
    return LOADED in Path(f"/proc/{server.pid_of('http')}/maps").read_text()


@pytest.mark.slow
def test_a_request_leaves_a_span_for_each_of_its_stages(start: Start, tiny_model: Path, collector: Collector) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager", "--otlp-endpoint", collector.url).wait_ready()
    assert f"traces    {collector.url}/v1/traces" in server.output
    assert loads_the_sdk(server)  # or that it does not without an endpoint says nothing
    headers = ask(server, request_id="a", traceparent=f"00-{TRACE}-{PARENT}-01").headers
    assert ask(server, traceparent=f"00-{TRACE}-{PARENT}-00").status_code == 200  # which the caller does not record
    assert ask(server, path="/predict/eager").status_code == 200
    assert ask(server, width=7).status_code == 400
    server.post("/predict", content=b"x", headers={"content-type": "text/plain"})
    with server.stopped("worker"):
        late = {"inputs": [[0.5] * 8], "timeout_ms": 20}
        assert server.post("/predict", json=late).status_code == 504
    assert server.stop() == 0  # what is left is sent at the end: no span was due before
    assert collector.services == {"fused-mlp-server"}
    first, second, bad, media, expired = collector.requests
    assert [span.name for span in collector.requests] == [
        "POST /predict",
        "POST /predict/{backend}",
        *["POST /predict"] * 3,
    ]
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert second.trace_id.hex() != TRACE
    assert attributes(first) == {
        "http.request.method": "POST",
        "http.route": "/predict",
        "http.response.status_code": 200,
        "mlp.request_id": "a",
        "mlp.backend": "eager",
        "mlp.implementation": "torch",
        "mlp.rows": 2,
        "mlp.batch_rows": 2,
    }
    for span in (first, second):
        stages = {each.name: each for each in collector.inside(span)}
        assert tuple(stages) == STAGES
        assert all(stage.trace_id == span.trace_id for stage in stages.values())
        edges = [(stages[name].start_time_unix_nano, stages[name].end_time_unix_nano) for name in STAGES]
        in_order = [span.start_time_unix_nano, *chain.from_iterable(edges), span.end_time_unix_nano]
        assert in_order == sorted(in_order)
    took_us = {
        each.name: (each.end_time_unix_nano - each.start_time_unix_nano) // 1000 for each in collector.inside(first)
    }
    assert {name: took_us[name] for name in ("queue", "batch", "compute")} == {
        name: int(headers[f"x-{name}-us"]) for name in ("queue", "batch", "compute")
    }
    assert took_us["decode"] + took_us["encode"] == pytest.approx(int(headers["x-encode-us"]), abs=2)
    for span, status, code in (
        (bad, 400, "bad_request"),
        (media, 415, "unsupported_media_type"),
        (expired, 504, "deadline_exceeded"),
    ):
        assert attributes(span) | {"http.response.status_code": status, "error.type": code} == attributes(span)
        assert collector.inside(span) == []
        assert span.status.code == (Status.STATUS_CODE_ERROR if status == 504 else Status.STATUS_CODE_UNSET)


@pytest.mark.slow
def test_a_request_whose_caller_goes_away_leaves_a_span_that_says_so(
    start: Start, tiny_model: Path, collector: Collector
) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager", "--otlp-endpoint", collector.url).wait_ready()
    body = b'{"inputs": [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]}'
    usual = b"POST /predict HTTP/1.1\r\nhost: x\r\ntraceparent: 00-%b-%b-01\r\n%b\r\nx-request-id: %b\r\n\r\n%b"
    whole, chunked = b"content-length: %d" % len(body), b"transfer-encoding: chunked"  # which goes through ASGI
    parts = ((whole, b"a", body), (chunked, b"b", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)))
    with server.stopped("worker"):
        for length, name, content in parts:
            accepted, abandoned = server.accepted(), server.metric("mlp_abandoned_total")
            with socket.create_connection(("127.0.0.1", server.port)) as caller:
                caller.sendall(usual % (TRACE.encode(), PARENT.encode(), length, name, content))
                server.wait_until(lambda accepted=accepted: server.accepted() == accepted + 1)  # type: ignore[misc]
            server.wait_until(lambda seen=abandoned: server.metric("mlp_abandoned_total") == seen + 1)  # type: ignore[misc]
    assert ask(server, request_id="c").status_code == 200
    assert server.stop() == 0
    *gone, answered = collector.requests
    assert [attributes(span)["mlp.request_id"] for span in (*gone, answered)] == ["a", "b", "c"]
    for span in gone:
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("POST /predict", TRACE, PARENT)
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert span.status.message == "the caller closed the connection before the reply"
        assert attributes(span)["error.type"] == "abandoned"
        assert "http.response.status_code" not in attributes(span)
        assert span.start_time_unix_nano < span.end_time_unix_nano < answered.end_time_unix_nano
        assert collector.inside(span) == []


@pytest.mark.slow
def test_a_share_of_the_requests_is_traced_and_all_that_callers_trace(
    start: Start, tiny_model: Path, collector: Collector
) -> None:
    arguments = ("--model", str(tiny_model), "--backends", "eager", "--trace-sample-rate", "0")
    server = start(*arguments, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_SERVICE_NAME="mine").wait_ready()
    for _ in range(20):
        assert ask(server).status_code == 200
    assert ask(server, traceparent=f"00-{TRACE}-{PARENT}-01").status_code == 200
    assert server.stop() == 0
    assert [span.parent_span_id.hex() for span in collector.requests] == [PARENT]
    assert collector.services == {"mine"}


@pytest.mark.slow
def test_without_an_endpoint_nothing_is_loaded(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager").wait_ready()
    assert ask(server, traceparent=f"00-{TRACE}-{PARENT}-01").status_code == 200
    assert not loads_the_sdk(server)
    assert server.stop() == 0


def test_the_server_s_parts_do_not_load_the_sdk() -> None:
    code = "import sys, service.server; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_a_collector_that_does_not_answer_hurts_no_request_and_is_told_once(
    start: Start, tiny_model: Path, kind: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never replies
        port = silent.getsockname()[1] if kind == "silent" else free_port()
        arguments = ("--model", str(tiny_model), "--backends", "eager", "--otlp-endpoint", f"http://127.0.0.1:{port}")
        server = start(*arguments, **SOON).wait_ready()
        assert ask(server).status_code == 200
        server.wait_until(lambda: "traces do not reach" in server.output)
        for _ in range(40):
            assert ask(server).status_code == 200
        assert server.stop() == 0
    told = [line for line in server.output.splitlines() if "traces" in line and "WARNING" in line]
    assert len(told) == 1
    assert "requests are served all the same" in told[0]
    assert "opentelemetry" not in server.output.replace(told[0], "")


@pytest.mark.slow
def test_a_collector_that_does_not_answer_does_not_hold_up_the_end(start: Start, tiny_model: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    server = start("--model", str(tiny_model), "--backends", "eager", "--otlp-endpoint", url).wait_ready()
    assert ask(server).status_code == 200
    assert server.stop() == 0  # its next try is seconds away, and the server would be killed before
    assert server.output.splitlines()[-1].endswith(f"{url}/v1/traces did not take them within 0.8 s")


@pytest.mark.slow
def test_a_collector_that_comes_back_is_told_and_gets_the_spans_from_then_on(
    start: Start, tiny_model: Path, collector: Collector
) -> None:
    collector.is_refusing = True
    arguments = ("--model", str(tiny_model), "--backends", "eager", "--otlp-endpoint", collector.url)
    server = start(*arguments, **SOON).wait_ready()
    for _ in range(3):
        assert ask(server).status_code == 200
        server.wait_until(lambda: "traces do not reach" in server.output)
    assert "code: 400, reason: Bad Request" in server.output
    collector.is_refusing = False
    assert ask(server, request_id="back").status_code == 200
    server.wait_until(lambda: f"traces reach {collector.url}/v1/traces again" in server.output)
    server.wait_until(lambda: any(attributes(span)["mlp.request_id"] == "back" for span in collector.requests))
    assert server.stop() == 0
    assert server.output.count("traces do not reach") == 1
