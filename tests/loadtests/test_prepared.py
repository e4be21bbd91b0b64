import os
import subprocess
import sys

import pytest

from tests.loadtests import prepared


@pytest.mark.parametrize("arguments", [("compare", "--rows", "3"), ("report", "--help")], ids=" ".join)
def test_a_forked_command_ends_and_says_what_one_in_a_process_of_its_own_does(arguments: tuple[str, ...]) -> None:
    environment = os.environ | {"MLP_API_KEY": "a-secret", "COLUMNS": "71"}
    command = [sys.executable, "-m", "loadtests", *arguments]
    alone = subprocess.run(command, cwd=prepared.ROOT, env=environment, capture_output=True, text=True, check=False)
    for _ in range(2):
        forked = prepared.loadtests(*arguments, environment=environment)
        assert (forked.returncode, forked.stdout, forked.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_a_forked_command_that_dies_of_a_signal_has_its_number() -> None:
    done = prepared.run(("json",), ["timeit", "-n1", "-r1", "import os; os.kill(os.getpid(), 9)"], os.environ)
    assert done.returncode == -9
