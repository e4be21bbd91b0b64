"""A load in a process of its own, since locust patches the standard library, and with a short limit for an answer."""

import json
import subprocess
import sys
import threading
import time

import pytest

from tests.loadtests.faulty_server import WIDTH, Server, faulty_server
from tests.service.running_server import ROOT

PROGRAM = """
import json, sys
import loadtests.generator.target as generator_target
generator_target.ANSWER_LIMIT_S = 2.0
from loadtests.generator.load import Load
from loadtests.generator.load_profile import PROFILES
from loadtests.generator.processes import Generator
from loadtests.generator.shape import ProfileShape
port, loop, width = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
target = generator_target.Target("127.0.0.1", port, "m", "json", width, width, 0)
with Generator(target) as generator:
    if loop == "shape":
        generator.environment.shape_class = ProfileShape(PROFILES["steady"], 2, 1.5, is_held=True)
    load = Load((("fused", 1),), loop, "a load", 0.0, 1.5, (0,), users=2, rate_per_s=100.0)
    (tally,) = generator.run(load)
print(json.dumps([tally.sent, tally.answered, dict(tally.errors)]))
"""


def driven(server: Server, loop: str) -> tuple[int, int, dict[str, int]]:
    """Return what one load sent, what was answered, and the errors."""
    arguments = [sys.executable, "-c", PROGRAM, str(server.server_address[1]), loop, str(WIDTH)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    sent, answered, errors = json.loads(done.stdout)
    return sent, answered, errors


@pytest.mark.slow  # imports locust
@pytest.mark.parametrize("loop", ["closed", "shape", "open"])
def test_what_is_never_answered_counts_in_every_kind_of_loop(loop: str) -> None:
    is_over = threading.Event()

    def fault(path: str, number: int, right: bytes) -> bytes | None:
        if path.startswith("/predict") and number > 5:
            is_over.wait()
            return None
        return right

    with faulty_server(fault) as server:
        try:
            sent, answered, errors = driven(server, loop)
        finally:
            is_over.set()
    assert answered == 5
    assert errors["no_answer"] == sent - answered > 0


@pytest.mark.slow
def test_a_second_reply_that_comes_while_the_next_request_is_under_way_is_found_at_the_end() -> None:
    def fault(path: str, number: int, right: bytes) -> bytes | tuple[bytes, ...]:
        if not path.startswith("/predict"):
            return right
        time.sleep(0.02)
        return (right, right) if number == 4 else right

    with faulty_server(fault) as server:
        sent, answered, errors = driven(server, "closed")
    assert sent == answered + errors.get("bad_reply", 0)  # where both come at once, since the host is busy
    assert sum(errors.values()) == 1
