"""How the server's processes begin and end: which of them take signals, and that none outlives the parent."""

import ctypes
import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

PR_SET_PDEATHSIG = 1
TRACKER_S = 1.0  # what multiprocessing's resource tracker, which has next to nothing to do, may take to end
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def begin_child(server_pid: int, directory: Path) -> None:
    """Let a forked process end with its parent and at a signal, neither of which LitServe's manager does by itself.

    The parent removes `directory` after its children have ended; if it is gone without having done so, this process
    does it.
    """

    def end(*_: object) -> None:
        if os.getppid() != server_pid:
            shutil.rmtree(directory, ignore_errors=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTERM)

    setproctitle("fused-mlp-server: helper")
    signal.signal(signal.SIGTERM, end)
    leave_to_parent()
    end_with_parent(server_pid)
    unblock_signals()


def begin_worker(server_pid: int) -> None:
    """Let a spawned process end at once with its parent or at a signal, until it can shut down in order."""
    leave_to_parent()
    end_with_parent(server_pid)
    unblock_signals()


def leave_to_parent() -> None:
    """Ignore the signals that a terminal sends to the whole group: the parent says when to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def end_with_parent(server_pid: int) -> None:
    """Ask for SIGTERM at the end of the parent, or send it if the parent ended before this call.

    Source: https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != server_pid:
        signal.raise_signal(signal.SIGTERM)


def outlive_parent() -> None:
    """Undo `end_with_parent`, for a process that watches its parent itself.

    To the system the parent is the thread that started the process, and LitServe restarts workers from a thread.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)


def stop_signals() -> frozenset[signal.Signals]:
    """Return the signals that end the server: `STOP_SIGNALS`, without SIGHUP where it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return STOP_SIGNALS - {signal.SIGHUP} if is_ignored else STOP_SIGNALS


def block_signals() -> None:
    """Keep the signals that end the server from this thread and from what it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    resource_tracker.ensure_running()  # it keeps SIGHUP blocked, and unblocks the others here when it starts
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())


def unblock_signals() -> None:
    """Take the signals that end the server from now on, including those that came meanwhile."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def ending(process: BaseProcess) -> str:
    """Say how a process ended."""
    code = process.exitcode
    return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"


def end_children() -> None:
    """End whatever LitServe has left running, and wait for it, so that nothing outlives this process."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(timeout=2)
        if child.is_alive():
            child.kill()
            child.join()
    end_resource_tracker()


def end_resource_tracker() -> None:
    """End multiprocessing's resource tracker, which would outlive us by a moment; kill it if it does not end."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._pid is not None:
        kill = threading.Timer(TRACKER_S, os.kill, (tracker._pid, signal.SIGKILL))
        kill.start()
        tracker._stop()
        kill.cancel()
