import sys

import pytest

from loadtests.server_process import ServerProcess, ServerStartError, free_port


def test_a_server_that_ends_at_once_is_named_by_a_command_that_can_be_repeated() -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(ServerStartError) as caught, ServerProcess(command, free_port(), "/"):
        pass
    assert str(caught.value) == f"{sys.executable} -c 'raise SystemExit(3)': ended with 3 before it was ready"
