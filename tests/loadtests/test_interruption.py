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
def work():
    user.join()
try:
    interruption.interruptible(work)
except KeyboardInterrupt:
    print("caught")
"""
SENT_BY_THE_MAIN_GREENLET = """
import os
{imported}
from loadtests import interruption

interruption.handle()
def work():
    os.kill(os.getpid(), {number})
    while True:
        pass
try:
    interruption.interruptible(work)
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
def work():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        print("written")
interruption.interruptible(work)
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


LOST = """
import os, signal, sys, weakref
from loadtests import interruption

interruption.handle()
interrupt = lambda *_: signal.raise_signal(signal.SIGINT)
class Left:
    __del__ = interrupt
class Held:
    pass
def work():
    {lose}
    while True:
        pass
try:
    interruption.interruptible(work)
except KeyboardInterrupt:
    print("caught")
"""


@pytest.mark.parametrize(
    "lose",
    [
        "os.register_at_fork(after_in_parent=interrupt); os.fork() or os._exit(0)",
        "Left()",
        "held = Held(); kept = weakref.ref(held, interrupt); del held",
    ],
    ids=["after a fork", "in a finalizer", "in a weak reference's callback"],
)
def test_an_interrupt_in_a_hook_whose_errors_python_forgets_is_raised_after_it(lose: str) -> None:
    done = run(LOST.format(lose=lose))
    assert (done.stdout, done.stderr) == ("caught\n", "")


def test_an_error_of_a_hook_is_still_told() -> None:
    done = run("""
from loadtests import interruption

interruption.handle()
class Left:
    def __del__(self):
        raise ValueError("of a hook")
Left()
""")
    assert "ValueError: of a hook" in done.stderr


def test_an_interrupt_in_the_midst_of_an_import_waits_for_its_end(tmp_path: Path) -> None:
    (tmp_path / "interrupting.py").write_text("""
import signal
try:
    signal.raise_signal(signal.SIGINT)
    print("imported", flush=True)
except KeyboardInterrupt:
    print("broken off", flush=True)
""")
    done = run(f"""
import sys
from loadtests import interruption

interruption.handle()
sys.path.insert(0, {str(tmp_path)!r})
def work():
    import interrupting
    while True:
        pass
try:
    interruption.interruptible(work)
except KeyboardInterrupt:
    print("caught")
""")
    assert (done.stdout, done.stderr) == ("imported\ncaught\n", "")


def test_an_interrupt_leaves_no_lock_of_logging_held() -> None:
    done = run("""
import logging, signal
from loadtests import interruption

interruption.handle()
class Interrupting(logging.Handler):
    def emit(self, record):
        signal.raise_signal(signal.SIGINT)
        print("logged")
handler = Interrupting()
def work():
    logging.getLogger().addHandler(handler)
    logging.getLogger().error("a line")
    while True:
        pass
try:
    interruption.interruptible(work)
except KeyboardInterrupt:
    print("caught")
""")
    assert (done.stdout, done.stderr) == ("logged\ncaught\n", "")


def test_a_signal_at_the_end_does_not_change_the_status() -> None:
    done = run("""
import atexit, signal, sys
from loadtests import interruption

interruption.handle()
atexit.register(signal.raise_signal, signal.SIGTERM)
interruption.ignore()
sys.exit(3)
""")
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize("imported", ["import gevent", ""], ids=["greenlets", "no greenlets"])
def test_a_late_interrupt_does_not_break_off_what_ends_the_program(imported: str) -> None:
    done = run(f"""
import os, signal
from loadtests import interruption

interruption.REPEAT_S = 0.0  # however late
interruption.handle()
{imported}
def press():
    os.kill(os.getpid(), signal.SIGINT)
try:
    interruption.interruptible(press)
except KeyboardInterrupt:
    press()
    print("ended")
press()
print("and left")
""")
    assert (done.stdout, done.stderr) == ("ended\nand left\n", "")


@pytest.mark.parametrize("imported", ["import gevent", ""], ids=["greenlets", "no greenlets"])
def test_an_interrupt_before_the_work_counts(imported: str) -> None:
    done = run(f"""
import os, signal
from loadtests import interruption

interruption.handle()
{imported}
os.kill(os.getpid(), signal.SIGINT)
print("begins")
try:
    interruption.interruptible(lambda: print("works"))
except KeyboardInterrupt:
    print("ended")
""")
    assert (done.stdout, done.stderr) == ("begins\nended\n", "")
