"""The routes beside `/predict`, over a real port."""

import gzip
import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.service.running_server import Start, descendants, title

pytestmark = pytest.mark.slow  # real servers

ROW = [0.5] * 64


def infer(client: httpx.Client, **changes: Any) -> httpx.Response:
    tensor = {"name": "input", "shape": [1, 64], "datatype": "FP32", "data": ROW}
    return client.post("/v2/models/digits/infer", json={"inputs": [tensor]} | changes)


def test_the_protocols_health_and_metadata_routes_answer(client: httpx.Client) -> None:
    assert client.get("/v2").json() == client.get("/v2/").json()
    assert client.get("/v2").json()["name"] == "fused-mlp-server"
    assert client.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    assert client.get("/v2/models/digits/ready").json() == {"name": "digits", "ready": True}
    metadata = client.get("/v2/models/digits").json()
    assert metadata["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 64]}]
    assert metadata["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 10]}]


@pytest.mark.parametrize("backend", ["eager", "compiled", "fused"])
def test_the_protocols_inference_gives_what_predict_gives(client: httpx.Client, backend: str) -> None:
    reply = infer(client, id="42", parameters={"backend": backend}, outputs=[{"name": "output"}])
    document = reply.json()
    (output,) = document["outputs"]
    expected = client.post(f"/predict/{backend}", json={"inputs": ROW}).json()["outputs"]
    assert output["data"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert (output["name"], output["datatype"], output["shape"]) == ("output", "FP32", [1, 10])
    assert (document["model_name"], document["id"], document["parameters"]["backend"]) == ("digits", "42", backend)
    assert reply.headers["x-backend"] == backend


@pytest.mark.parametrize("backend", ["eager", "compiled", "fused"])
def test_binary_tensors_go_both_ways_and_match_json(client: httpx.Client, backend: str) -> None:
    rows = np.array([ROW, [1.0] * 64], dtype="<f4")
    tensor = {"name": "input", "shape": [2, 64], "datatype": "FP32", "parameters": {"binary_data_size": rows.nbytes}}
    head = json.dumps(
        {"id": "7", "inputs": [tensor], "parameters": {"backend": backend, "binary_data_output": True}}
    ).encode()
    reply = client.post(
        "/v2/models/digits/infer",
        content=head + rows.tobytes(),
        headers={"inference-header-content-length": str(len(head))},
    )
    length = int(reply.headers["inference-header-content-length"])
    document = json.loads(reply.content[:length])
    outputs = np.frombuffer(reply.content[length:], dtype="<f4").reshape(2, 10)
    assert document["outputs"][0]["parameters"] == {"binary_data_size": outputs.nbytes}
    assert (document["id"], reply.headers["x-backend"]) == ("7", backend)
    expected = client.post(f"/predict/{backend}", json={"inputs": rows.tolist()}).json()["outputs"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-4)


def test_a_binary_reply_carries_what_json_cannot(client: httpx.Client) -> None:
    rows = np.full((1, 64), np.nan, dtype="<f4")
    tensor = {"name": "input", "shape": [1, 64], "datatype": "FP32", "parameters": {"binary_data_size": rows.nbytes}}

    def ask(is_binary: bool) -> httpx.Response:
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": is_binary}}).encode()
        headers = {"inference-header-content-length": str(len(head))}
        return client.post("/v2/models/digits/infer", content=head + rows.tobytes(), headers=headers)

    assert (ask(False).status_code, ask(False).json()["code"]) == (422, "non_finite_output")
    reply = ask(True)
    outputs = np.frombuffer(reply.content[int(reply.headers["inference-header-content-length"]) :], dtype="<f4")
    assert np.isnan(outputs).all()


def test_the_protocols_shape_is_kept(client: httpx.Client) -> None:
    tensor = {"name": "input", "shape": [2, 1, 64], "datatype": "FP64", "data": [[ROW], [ROW]]}
    assert infer(client, inputs=[tensor]).json()["outputs"][0]["shape"] == [2, 1, 10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": []}, "expected one tensor, named 'input'"),
        ({"outputs": [{"name": "x"}]}, "named 'output'"),
        (
            {"parameters": {"backend": "turbo"}},
            "expected one of eager, compiled, fused, got 'turbo'",
        ),
        ({"extra": 1}, "'extra': no such field"),
    ],
    ids=["inputs", "outputs", "backend", "field"],
)
def test_the_protocols_errors_have_the_one_form(client: httpx.Client, changes: dict[str, Any], message: str) -> None:
    reply = infer(client, **changes)
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_request")
    assert message in reply.json()["error"]


def test_the_default_backend_can_be_switched_and_follows_what_is_available_by_default(
    start: Start, tiny_model: Any
) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager,fused", "--api-servers", "2").wait_ready()

    def used() -> set[str]:
        found: set[str] = set()
        for _ in range(12):  # a new connection each time, so that both HTTP processes answer some
            found.add(server.post("/predict", json={"inputs": [0.5] * 8}).json()["backend"])
        return found

    before = server.get("/backend").json()
    assert (before["default"], before["is_auto"]) == ("fused", True)
    fused = before["backends"]["fused"]
    assert (fused["implementation"], fused["state"], fused["reason"]) == ("onednn", "ready", None)
    assert used() == {"fused"}
    after = server.put("/backend", json={"default": "eager"}).json()
    assert (after["default"], after["is_auto"]) == ("eager", False)
    assert used() == {"eager"}
    assert server.post("/predict/fused", json={"inputs": [0.5] * 8}).json()["backend"] == "fused"
    assert server.put("/backend", json={"default": "auto"}).json() == before


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'{"default": "turbo"}',
            "default: expected one of eager, compiled, fused, or auto for the best available, got 'turbo'",
        ),
        (b'{"canary": {"turbo": 0.1}}', "canary: expected one of eager, compiled, fused, got 'turbo'"),
        (b'{"default": 1}', "default: expected a valid string, got 1"),
        (b'{"put_back": ["turbo"]}', "put_back: expected one of eager, compiled, fused, got 'turbo'"),
        (b'{"put_back": "fused"}', "put_back: expected a list, got 'fused'"),
        (b'{"canary": "fused=0.5"}', "canary: expected an object, got 'fused=0.5'"),
        (b"{}", "default: this field is required, or canary, or put_back"),
        (b'{"canary": {"fused": 1e-7}}', "canary.'fused': expected 0, or a share of at least 0.000001, got 1e-07"),
        (b'{"backend": "eager"}', "'backend': no such field; expected one of default"),
        (b'["eager"]', "expected a JSON object with default, canary, put_back, got a list"),
        (b"{", "not valid JSON"),
    ],
    ids=str,
)
def test_a_default_that_cannot_be_is_refused_and_changes_nothing(
    client: httpx.Client, body: bytes, message: str
) -> None:
    before = client.get("/backend").json()
    reply = client.put("/backend", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["code"]) == (400, "bad_request")
    assert message in reply.json()["error"]
    assert client.get("/backend").json() == before


def times_woken(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("voluntary_")]
    return int(line.split()[1])


def test_two_workers_share_the_load(start: Start, tiny_model: Any) -> None:
    from models.control_group import available_cores

    if available_cores() < 2:
        pytest.skip("two workers need two cores")
    server = start("--model", str(tiny_model), "--backends", "eager", "--workers", "2").wait_ready()
    workers = [pid for pid in descendants(server.process.pid) if title(pid) == "fused-mlp-server: worker"]
    before = [times_woken(pid) for pid in workers]
    statuses: list[int] = []

    def load() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            statuses.extend(client.post("/predict", json={"inputs": [0.5] * 8}).status_code for _ in range(30))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 240
    assert len(workers) == 2
    assert all(times_woken(pid) > count for pid, count in zip(workers, before, strict=True))  # an idle one sleeps on
    assert server.stop() == 0


def test_the_openapi_document_shows_every_route_and_the_form_of_errors(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    shown = {(method, path) for path, routes in document["paths"].items() for method in routes}
    assert shown >= {
        ("post", "/predict"),
        ("post", "/predict/{backend}"),
        ("get", "/backend"),
        ("put", "/backend"),
        ("post", "/compare"),
        ("post", "/profile"),
        ("get", "/profile/{id}.json"),
        ("get", "/v2"),
        ("get", "/v2/health/live"),
        ("get", "/v2/health/ready"),
        ("get", "/v2/models/{name}"),
        ("get", "/v2/models/{name}/ready"),
        ("get", "/model"),
        ("post", "/v2/models/{name}/infer"),
    }
    for routes in document["paths"].values():
        for route in routes.values():
            schema = route["responses"]["default"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorReply"}
    text = client.get("/openapi.json").text
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"]


def test_the_openapi_document_tells_of_binary_tensors_both_ways(client: httpx.Client) -> None:
    infer = client.get("/openapi.json").json()["paths"]["/v2/models/{name}/infer"]["post"]
    for body in (infer["requestBody"], infer["responses"]["200"]):
        assert set(body["content"]) == {"application/json", "application/octet-stream"}
    (header,) = [each for each in infer["parameters"] if each["in"] == "header"]
    assert (header["name"], header["required"]) == ("Inference-Header-Content-Length", False)


def test_the_hosts_own_pages_do_not_show_through(client: httpx.Client) -> None:
    assert client.get("/info").status_code == 404


def test_the_docs_page_needs_no_other_host(client: httpx.Client) -> None:
    page = client.get("/docs").text
    references = re.findall(r"""(?:src|href|url)\s*[=:]\s*["']([^"']+)""", page)
    assert len(references) == 4
    for reference in references:
        assert not re.match(r"[a-z]+:|//", reference)
        assert len(client.get(f"/{reference}").content) > 1000
    assert "//" not in re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)
    assert '"validatorUrl": null' in page
    assert client.get("/redoc").status_code == 404
    missing = client.get("/docs/..%2fcore.py")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")


BODIES: dict[str, tuple[str, str, Any]] = {
    "backend": ("PUT", "/backend", {"canary": {}}),
    "compare": ("POST", "/compare", {"inputs": ROW}),
    "profile": ("POST", "/profile", {"rows": 1}),
}


@pytest.mark.parametrize(("method", "path", "body"), BODIES.values(), ids=BODIES)
def test_every_body_may_be_packed_and_no_other_encoding_is_read_as_none(
    client: httpx.Client, method: str, path: str, body: Any
) -> None:
    for encoding, content, status in (
        ("gzip", gzip.compress(json.dumps(body).encode()), 200),
        ("br", json.dumps(body).encode(), 415),
        ("gzip", gzip.compress(bytes(50 << 20)), 413),
    ):
        headers = {"content-type": "application/json", "content-encoding": encoding}
        reply = client.request(method, path, content=content, headers=headers)
        assert reply.status_code == status, reply.text
