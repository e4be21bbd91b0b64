import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SENT_BY_A_USER = """
import os
import gevent
from loadtests import interruption

def send():
    os.kill(os.getpid(), {number})
    while True:
        gevent.sleep(0)

interruption.handle()
user = gevent.spawn(send)
try:
    user.join()
except KeyboardInterrupt:
    print("caught")
"""
SENT_BY_THE_MAIN_GREENLET = """
import os
{imported}
from loadtests import interruption

interruption.handle()
try:
    os.kill(os.getpid(), {number})
    while True:
        pass
except KeyboardInterrupt:
    print("caught")
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("number", ["signal.SIGINT", "signal.SIGTERM", "signal.SIGHUP"])
@pytest.mark.parametrize(
    "program",
    [
        SENT_BY_A_USER,
        SENT_BY_THE_MAIN_GREENLET.replace("{imported}", "import gevent"),
        SENT_BY_THE_MAIN_GREENLET.replace("{imported}", ""),
    ],
    ids=["user", "main greenlet", "no greenlets"],
)
def test_an_interrupt_is_raised_in_the_main_greenlet_alone(program: str, number: str) -> None:
    done = run("import signal\n" + program.format(number=number))
    assert done.stdout == "caught\n"
    assert done.stderr == ""


def test_of_several_in_quick_succession_the_first_one_counts() -> None:
    done = run("""
import os, signal
from loadtests import interruption

interruption.handle()
try:
    os.kill(os.getpid(), signal.SIGTERM)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    print("written")
""")
    assert (done.stdout, done.stderr) == ("written\n", "")


def test_a_terminal_s_end_that_is_ignored_stays_so() -> None:
    done = run("""
import os, signal
from loadtests import interruption

signal.signal(signal.SIGHUP, signal.SIG_IGN)
interruption.handle()
os.kill(os.getpid(), signal.SIGHUP)
print("goes on")
""")
    assert (done.stdout, done.stderr) == ("goes on\n", "")
