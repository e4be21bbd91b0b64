"""The soak's judge sees what was planted, and a short soak of a real server finds nothing."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.service.chaos import soak
from tests.service.running_server import START_LIMIT_S


def report(**changes: Any) -> dict[str, Any]:
    """What a soak reports where nothing is wrong, with some of it changed."""
    return {
        "disturbances": {"kill": 1, "reload": 1},
        "callers_counted": {"200": 90, "400": 5, "503": 3, "refused": 40, "closed": 2},
        "servers_logged": {"200": 90, "400": 5, "503": 3},
        "last_server_scraped": {"200": 40, "400": 2, "503": 0},
        "last_server_logged": {"200": 40, "400": 2},
        "lives": [{"kills": 1, "worker_restarts": 1, "exit_status": 0}],
        "growth_kib": {"worker 1": soak.GROWTH_KIB},
    } | changes


def test_a_report_of_which_all_counts_agree_is_accepted() -> None:
    assert soak.judge(report()) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"servers_logged": {"200": 91, "400": 5, "503": 3}}, "status 200: 90 callers_counted, 91 servers_logged"),
        ({"servers_logged": {"200": 90, "400": 5}}, "status 503: 3 callers_counted, 0 servers_logged"),
        (
            {"last_server_logged": {"200": 39, "400": 2}},
            "status 200: 40 last_server_scraped, 39 last_server_logged",
        ),
        (
            {"last_server_logged": {"200": 40, "400": 2, "500": 1}},
            "status 500: 0 last_server_scraped, 1 last_server_logged",
        ),
        ({"callers_counted": report()["callers_counted"] | {"wrong": 1}}, "unexpected outcomes: ['wrong']"),
        (
            {"callers_counted": report()["callers_counted"] | {"closed": 17}},
            "17 requests found their connection closed, more than 16, two a caller and reload",
        ),
        (
            {"lives": [{"kills": 2, "worker_restarts": 1, "exit_status": 0}]},
            "a server's life was not as it should be: {'kills': 2, 'worker_restarts': 1, 'exit_status': 0}",
        ),
        (
            {"lives": [{"kills": 1, "worker_restarts": 1, "exit_status": 1}]},
            "a server's life was not as it should be: {'kills': 1, 'worker_restarts': 1, 'exit_status': 1}",
        ),
        ({"growth_kib": {"http 1": soak.GROWTH_KIB + 1}}, f"http 1 grew by {soak.GROWTH_KIB + 1} KiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_add_up_is_said(changes: dict[str, Any], problem: str) -> None:
    assert soak.judge(report(**changes)) == [problem]


@pytest.mark.parametrize("outputs", [[[1.0, 2.01]], [[1.0]], [[1.0, 2.0], [1.0, 2.0]], []], ids=str)
def test_another_answer_is_told_from_the_right_one(outputs: list[list[float]]) -> None:
    assert soak.agree([[1.0, 2.0001]], [[1.0, 2.0]])
    assert not soak.agree(outputs, [[1.0, 2.0]])


def has_each_asked(callers: soak.Callers, times: int) -> bool:
    return all(callers.asked[index] >= times for index in range(soak.CALLERS))


def is_enough(done: Counter[str], callers: soak.Callers) -> bool:
    return done["kill"] >= 1 and done["switch"] >= 1 and has_each_asked(callers, 12)


@pytest.mark.slow
def test_a_short_soak_finds_nothing_wrong_and_sees_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"KILL_EVERY_S": 1.0, "SWITCH_EVERY_S": 0.4, "QUESTIONS": 4}.items():
        monkeypatch.setattr(soak, name, value)
    lives = soak.Lives(tmp_path)
    try:
        questions = soak.asked_eager(lives.server.port)
        false = [[replace(each, expected=[[9.0]]) for each in some] for some in questions]
        callers = soak.Callers(lives.server.port, false, math.inf, 0.0, checked_share=1.0)
        try:
            lives.server.wait_until(lambda: has_each_asked(callers, 3))
        finally:
            callers.end_s = 0.0
            callers.join()
        assert callers.counts["wrong"] == callers.counts["200"] > 0
        found = soak.soak(lives, questions, seconds=START_LIMIT_S, rate=40.0, is_enough=is_enough)
    finally:
        lives.server.end()
    assert soak.judge(found) == []
    assert found["disturbances"]["kill"] >= 1
    assert found["disturbances"]["switch"] >= 1
    assert found["callers_counted"]["200"] > 0
