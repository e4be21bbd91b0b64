"""What the server takes from its host: open files."""

import re
import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.service.running_server import ROOT, free_port

ALLOW = "import resource; from service.surroundings import allow_descriptors; allow_descriptors({}, 2); "
SHOW = "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"


def limited(soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run(soft: int, hard: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        preexec_fn=limited(soft, hard),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("connections", "soft"), [(500, 630), (10, 200)], ids=["raised", "left"])
def test_a_soft_limit_of_open_files_is_raised_to_what_the_connections_need(connections: int, soft: int) -> None:
    assert run(200, 1000, "-c", ALLOW.format(connections) + SHOW).stdout.split() == [str(soft), "1000"]


@pytest.mark.slow
def test_more_connections_than_may_be_open_files_are_refused_at_the_start() -> None:
    ended = run(
        200, 1000, "-m", "service", "--max-connections", "900", "--backends", "eager", "--port", str(free_port())
    )
    assert ended.returncode == 2
    assert re.fullmatch(r"error: --max-connections 900: needs 1029 open files .* is 1000; raise .*\n", ended.stderr)
