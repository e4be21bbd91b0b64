import json
import os
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import STATUS
from service.metrics import SECONDS, Metrics
from tests.service.exposition import samples, value
from tests.service.running_server import ROOT, Start

BACKENDS = ("eager", "fused")


def scraped(metrics: Metrics) -> str:
    return metrics.text().decode()


def test_every_metric_is_there_before_anything_happened() -> None:
    names = {name for name, _ in samples(scraped(Metrics(BACKENDS, 2)))}
    assert {
        "mlp_requests_total",
        "mlp_request_seconds_bucket",
        "mlp_queue_seconds_sum",
        "mlp_compute_seconds_count",
        "mlp_batch_rows_bucket",
        "mlp_queue_rows",
        "mlp_queue_counted_rows",
        "mlp_queue_limit_rows",
        "mlp_inflight_requests",
        "mlp_inflight_profiles",
        "mlp_rejected_total",
        "mlp_worker_restarts_total",
        "mlp_shadow_drift_bucket",
        "mlp_backend_fallbacks_total",
    } <= names


@settings(max_examples=20)
@given(seconds=st.lists(st.floats(0, 100), max_size=20))
def test_a_histogram_counts_each_value_once_and_sums_it(seconds: list[float]) -> None:
    metrics = Metrics(BACKENDS, 1)
    for each in seconds:
        metrics.answered("fused", each, 0.0, 0.0, 1)
    text = scraped(metrics)
    for bound in SECONDS:
        expected = sum(each <= bound for each in seconds)
        assert value(text, "mlp_request_seconds_bucket", backend="fused", le=f"{bound:g}") == expected
    assert value(text, "mlp_request_seconds_bucket", backend="fused", le="+Inf") == len(seconds)
    assert value(text, "mlp_request_seconds_count", backend="fused") == len(seconds)
    assert value(text, "mlp_request_seconds_sum", backend="fused") == pytest.approx(sum(seconds))
    assert value(text, "mlp_request_seconds_count", backend="eager") == 0


@pytest.mark.parametrize("code", STATUS)
def test_an_error_is_counted_by_its_code_and_its_status(code: str) -> None:
    metrics = Metrics(BACKENDS, 1)
    metrics.refused("fused", code)
    metrics.refused(None, code)
    metrics.refused("turbo", code)
    text = scraped(metrics)
    assert value(text, "mlp_rejected_total", code=code) == 3
    assert value(text, "mlp_requests_total", backend="fused", status=str(STATUS[code])) == 1
    assert value(text, "mlp_requests_total", backend="none", status=str(STATUS[code])) == 2


def test_drift_and_its_consequence_are_counted_by_backend() -> None:
    metrics = Metrics(BACKENDS, 2)
    metrics.drifted("fused", 3e-6)
    metrics.claim(1)
    metrics.drifted("fused", 0.5)
    metrics.fell_back("fused", "drift")
    text = scraped(metrics)
    assert value(text, "mlp_shadow_drift_bucket", backend="fused", le="1e-05") == 1
    assert value(text, "mlp_shadow_drift_count", backend="fused") == 2
    assert value(text, "mlp_shadow_drift_sum", backend="fused") == pytest.approx(0.500003)
    assert value(text, "mlp_shadow_drift_count", backend="eager") == 0
    assert value(text, "mlp_backend_fallbacks_total", backend="fused", reason="drift") == 1
    assert value(text, "mlp_backend_fallbacks_total", backend="fused", reason="fault") == 0


def test_what_forked_processes_count_is_added_up() -> None:
    metrics = Metrics(BACKENDS, 3)
    for process in range(3):
        child = os.fork()
        if child == 0:
            metrics.claim(process)
            for _ in range(1000):
                metrics.answered("eager", 0.001, 0.001, 0.001, process + 1)
            metrics.in_flight(process, 1, 2, 10 * process, 100)
            os._exit(0)
        os.waitpid(child, 0)
    metrics.worker_restarted()
    text = scraped(metrics)
    assert value(text, "mlp_requests_total", backend="eager", status="200") == 3000
    assert value(text, "mlp_batch_rows_sum", backend="eager") == 6000
    assert (value(text, "mlp_queue_rows"), value(text, "mlp_inflight_requests")) == (3, 3)
    assert value(text, "mlp_inflight_profiles") == 6
    assert (value(text, "mlp_queue_counted_rows"), value(text, "mlp_queue_limit_rows")) == (30, 300)
    assert value(text, "mlp_worker_restarts_total") == 1


def test_the_dashboard_asks_for_what_there_is_and_leaves_nothing_out() -> None:
    dashboard = json.loads((ROOT / "docs/grafana.json").read_text())
    queries = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    asked = set(re.findall(r"mlp_\w+", queries))
    there = {name for name, _ in samples(scraped(Metrics(BACKENDS, 1)))}
    assert asked <= there
    kinds = re.compile(r"_(bucket|sum|count|total)$")
    assert {kinds.sub("", name) for name in asked} == {kinds.sub("", name) for name in there}


@pytest.mark.slow
def test_every_scrape_is_exact_however_many_processes_answer(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager,fused", "--api-servers", "2").wait_ready()

    def ask(backend: str) -> None:
        for index in range(25):  # a connection each, so that both processes take some
            body = {"inputs": [[0.5] * (8 if index % 5 else 7)] * 3}
            server.post(f"/predict/{backend}", json=body)

    threads = [threading.Thread(target=ask, args=(backend,)) for backend in ("eager", "fused", "fused", "turbo")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(10):
        text = server.get("/metrics").text
        assert value(text, "mlp_requests_total", backend="eager", status="200") == 20
        assert value(text, "mlp_requests_total", backend="fused", status="200") == 40
        assert value(text, "mlp_request_seconds_count", backend="fused") == 40
        assert value(text, "mlp_queue_seconds_count", backend="eager") == 20
        assert value(text, "mlp_rejected_total", code="bad_request") == 15 + 25
        assert (value(text, "mlp_queue_rows"), value(text, "mlp_inflight_requests")) == (0, 0)
    assert server.stop() == 0
