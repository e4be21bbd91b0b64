import os
import signal
import sys
import threading

import psutil
import pytest

from loadtests.server_process import ServerProcess, ServerStartError, free_port


def test_a_server_that_ends_at_once_is_named_by_a_command_that_can_be_repeated() -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(ServerStartError) as caught, ServerProcess(command, free_port(), "/"):
        pass
    assert str(caught.value) == f"{sys.executable} -c 'raise SystemExit(3)': ended with 3 before it was ready"


def test_a_server_that_is_given_up_while_it_starts_is_ended() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = ServerProcess(command, free_port(), "/")
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt), server:
            pass
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert server.pid is not None
    assert not psutil.pid_exists(server.pid)
