"""Ctrl-C ends a command with one line and 130, wherever the command is and however often it is pressed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def catches(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Say whether the process has a handler for the signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


def maps(process: subprocess.Popen[str], library: str) -> bool:
    """Say whether the process has loaded a library."""
    return library in Path(f"/proc/{process.pid}/maps").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", [("models", "run", "digits"), ("kernels", "roof", "--device", "cpu")], ids=" ".join)
@pytest.mark.parametrize("library", ["", "libtorch_cpu.so", "_asyncio."])
def test_ctrl_c_pressed_again_and_again_ends_a_command_with_130(command: tuple[str, ...], library: str) -> None:
    pipe = subprocess.PIPE
    arguments = [sys.executable, "-m", *command]
    with subprocess.Popen(arguments, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        while process.poll() is None and not (catches(process, signal.SIGALRM) and maps(process, library)):
            time.sleep(0.01)
        while process.poll() is None:  # while it imports PyTorch, works, and takes itself down
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == f"python -m {command[0]} {command[1]}: interrupted\n"


@pytest.mark.slow
def test_ctrl_c_ends_the_processes_that_compile_as_well(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    arguments = [sys.executable, "-m", "kernels", "aot", "--cache", str(tmp_path), "--jobs", "2"]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        tasks, children = Path(f"/proc/{process.pid}/task"), set[str]()
        while process.poll() is None and len(children) < 2:
            time.sleep(0.01)
            children = {pid for each in tasks.glob("*/children") for pid in each.read_text().split()}
        process.send_signal(signal.SIGINT)  # not to them, as a terminal does
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "python -m kernels aot: interrupted"
    places = [Path(f"/proc/{pid}/cmdline") for pid in children]
    assert not any(place.exists() and place.read_bytes() for place in places)  # empty: ended, and not yet waited for


def printed(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    return done.stdout


def test_an_interrupt_waits_for_the_end_of_an_import(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    print('inside')\n"
    )
    assert (
        printed(f"""
import sys
from kernels import interruption
sys.path.insert(0, {str(tmp_path)!r})
interruption.handle()
def work():
    import slow
    while True:
        pass
try:
    interruption.interruptible(work)
except KeyboardInterrupt:
    print("outside")
""")
        == "outside\n"
    )


def test_an_interrupt_in_a_hook_is_raised_again_after_it() -> None:
    assert (
        printed("""
import os, signal
from kernels import interruption

class Hook:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

interruption.handle()
def work():
    Hook()
    while True:
        pass
try:
    interruption.interruptible(work)
except KeyboardInterrupt:
    print("caught")
""")
        == "caught\n"
    )


def test_an_error_that_c_code_makes_of_an_interrupt_is_told_from_others() -> None:
    assert (
        printed("""
import os, signal
from kernels import interruption

interruption.handle()
print(interruption.is_cause(ValueError()), interruption.is_cause(KeyboardInterrupt()))
def work():
    os.kill(os.getpid(), signal.SIGINT)
try:
    interruption.interruptible(work)
except KeyboardInterrupt:
    print(interruption.is_cause(ValueError()))
""")
        == "False True\nTrue\n"
    )


def test_a_late_interrupt_does_not_break_off_what_ends_the_program() -> None:
    assert (
        printed("""
import os, signal
from kernels import interruption

interruption.REPEAT_S = 0.0  # however late
interruption.handle()
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
        == "ended\nand left\n"
    )


def test_an_interrupt_before_the_work_counts() -> None:
    assert (
        printed("""
import os, signal
from kernels import interruption

interruption.handle()
os.kill(os.getpid(), signal.SIGINT)
print("begins")
try:
    interruption.interruptible(lambda: print("works"))
except KeyboardInterrupt:
    print("ended")
""")
        == "begins\nended\n"
    )
