"""`POST /predict` on the trained demo model, over a real port."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.service.running_server import RunningServer

pytestmark = pytest.mark.slow  # real servers

BACKENDS = {"eager": "torch", "compiled": "inductor", "fused": "onednn"}


@pytest.fixture(scope="module")
def unseen() -> tuple[list[list[float]], list[str]]:
    """Digits that the training never saw, and what they show."""
    from models.digits import load_split

    split = load_split()
    return split.test_rows.tolist(), [str(label) for label in split.test_labels.tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_unseen_digits_are_read_right(
    client: httpx.Client, unseen: tuple[list[list[float]], list[str]], backend: str
) -> None:
    pixels, shown = unseen
    read = client.post(f"/predict/{backend}", json={"inputs": pixels}).json()["labels"]
    right = sum(a == b for a, b in zip(read, shown, strict=True)) / len(shown)
    assert right >= 0.96


def test_the_backends_agree(client: httpx.Client, unseen: tuple[list[list[float]], list[str]]) -> None:
    replies = [client.post(f"/predict/{name}", json={"inputs": unseen[0]}).json() for name in BACKENDS]
    assert replies[0]["labels"] == replies[1]["labels"] == replies[2]["labels"]
    for reply in replies[1:]:
        for row, expected in zip(reply["outputs"], replies[0]["outputs"], strict=True):
            assert row == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(("backend", "implementation"), BACKENDS.items())
@pytest.mark.parametrize("where", ["body", "path"])
def test_a_reply_names_what_really_ran(client: httpx.Client, backend: str, implementation: str, where: str) -> None:
    path, body = (f"/predict/{backend}", {}) if where == "path" else ("/predict", {"backend": backend})
    reply = client.post(path, json={"inputs": [[0] * 64, [1] * 64], "id": "seven"} | body)
    document = reply.json()
    assert (document["backend"], document["implementation"], document["id"]) == (backend, implementation, "seven")
    assert (reply.headers["x-backend"], reply.headers["x-implementation"]) == (backend, implementation)
    assert int(reply.headers["x-batch-rows"]) >= 2
    assert int(reply.headers["x-queue-us"]) >= 0
    assert int(reply.headers["x-batch-us"]) >= 0
    assert int(reply.headers["x-compute-us"]) > 0
    assert int(reply.headers["x-encode-us"]) > 0
    timing = document["timing"]
    assert timing["batch_rows"] == int(reply.headers["x-batch-rows"])
    assert timing["total_ms"] >= timing["compute_ms"] > 0
    assert timing["total_ms"] >= timing["queue_ms"] >= 0


def test_the_stages_of_a_request_follow_each_other(server: RunningServer) -> None:
    started_ns = time.monotonic_ns()
    accepted = server.accepted()
    with ThreadPoolExecutor(1) as pool:
        with server.stopped("worker"):
            answer = pool.submit(httpx.post, server.url + "/predict", json={"inputs": [[1.0] * 64]}, timeout=60)
            server.wait_until(lambda: server.accepted() > accepted)
            time.sleep(0.5)
        headers = answer.result().headers
    took_us = (time.monotonic_ns() - started_ns) / 1e3
    stages = {name: int(headers[f"x-{name}-us"]) for name in ("queue", "batch", "compute", "encode")}
    assert stages["queue"] >= 500_000
    assert sum(stages.values()) <= took_us


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1, 2, 2)], ids=str)
def test_leading_dimensions_are_kept(client: httpx.Client, shape: tuple[int, ...]) -> None:
    inputs: Any = [1.0] * 64
    for size in reversed(shape):
        inputs = [inputs] * size
    reply = client.post("/predict", json={"inputs": inputs}).json()
    outputs, labels = reply["outputs"], reply["labels"]
    for size in shape:
        assert (len(outputs), len(labels)) == (size, size)
        outputs, labels = outputs[0], labels[0]
    assert len(outputs) == 10
    assert labels in list("0123456789")


def test_a_reply_without_an_id_asked_has_none(client: httpx.Client) -> None:
    assert "id" not in client.post("/predict", json={"inputs": [0] * 64}).json()


def test_a_row_gets_the_same_answer_alone_and_in_company(client: httpx.Client) -> None:
    row = [float(value % 17) for value in range(64)]
    alone = client.post("/predict", json={"inputs": [row]}).json()["outputs"][0]
    company = client.post("/predict", json={"inputs": [[16.0] * 64, row, [0.0] * 64] * 7}).json()["outputs"]
    for index in range(1, 21, 3):
        assert company[index] == pytest.approx(alone, rel=1e-4, abs=1e-4)


def test_one_request_may_fill_a_whole_batch(client: httpx.Client) -> None:
    reply = client.post("/predict", json={"inputs": [[0] * 64] * 1024})
    assert reply.status_code == 200
    assert len(reply.json()["outputs"]) == 1024
