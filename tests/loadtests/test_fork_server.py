import os
import subprocess
import sys

import pytest

from tests.loadtests import fork_server


@pytest.mark.parametrize("arguments", [("compare", "--rows", "3"), ("report", "--help")], ids=" ".join)
def test_a_forked_command_ends_and_says_what_one_in_a_process_of_its_own_does(arguments: tuple[str, ...]) -> None:
    environment = os.environ | {"MLP_API_KEY": "a-secret", "COLUMNS": "71"}
    command = [sys.executable, "-m", "loadtests", *arguments]
    alone = subprocess.run(command, cwd=fork_server.ROOT, env=environment, capture_output=True, text=True, check=False)
    for _ in range(2):
        forked = fork_server.run_loadtests(*arguments, environment=environment)
        assert (forked.returncode, forked.stdout, forked.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def timed(statement: str) -> "subprocess.CompletedProcess[str]":
    return fork_server.run(("json",), ["timeit", "-n1", "-r1", statement], os.environ)


def test_a_forked_command_that_dies_of_a_signal_has_its_number() -> None:
    assert timed("import os; os.kill(os.getpid(), 9)").returncode == -9


def test_a_command_that_takes_too_long_is_ended_and_leaves_its_status_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as shorter:
        shorter.setattr(fork_server, "LIMIT_S", 0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            timed("import time; time.sleep(600)")
    assert timed("import os; os.kill(os.getpid(), 9)").returncode == -9
