from collections.abc import Iterator

import gevent
import pytest
from gevent.event import Event

from loadtests.generator.callers import Callers


class Server:
    """Answers each request once it is let to; keeps what came, from which greenlet, and what was lost."""

    def __init__(self) -> None:
        self.answers = Event()
        self.sent: list[tuple[int, int, float]] = []
        self.senders: list[int] = []
        self.lost: list[tuple[int, float]] = []

    def send(self, kind: int, payload: int, due_s: float) -> None:
        self.sent.append((kind, payload, due_s))
        self.senders.append(id(gevent.getcurrent()))
        self.answers.wait()

    def lose(self, kind: int, due_s: float) -> None:
        self.lost.append((kind, due_s))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def callers(server: Server) -> Iterator[Callers]:
    callers = Callers(server.send, server.lose)
    yield callers
    callers.kill()


def test_requests_are_in_flight_beside_each_other(server: Server, callers: Callers) -> None:
    for due in ((0, 1, 0.1), (1, 2, 0.2)):
        callers.send(due)
    gevent.sleep(0)
    assert server.sent == [(0, 1, 0.1), (1, 2, 0.2)]
    assert callers.busy == 2
    server.answers.set()
    callers.join(10.0)
    assert callers.busy == 0
    assert server.lost == []


def test_a_caller_that_was_answered_sends_the_next_request(server: Server, callers: Callers) -> None:
    server.answers.set()
    for number in range(3):
        callers.send((0, number, 0.0))
        while callers.busy:
            gevent.sleep(0)
    assert [payload for _, payload, _ in server.sent] == [0, 1, 2]
    assert len(set(server.senders)) == 1


def test_what_is_not_answered_in_time_is_lost_and_what_was_answered_is_not(server: Server, callers: Callers) -> None:
    server.answers.set()
    callers.send((0, 0, 0.0))
    while callers.busy:
        gevent.sleep(0)
    server.answers.clear()
    for number in (1, 2):
        callers.send((1, number, number / 2))
    gevent.sleep(0)
    callers.join(0.01)
    assert server.lost == []
    callers.kill()
    assert sorted(server.lost) == [(1, 0.5), (1, 1.0)]
    assert callers.busy == 0
