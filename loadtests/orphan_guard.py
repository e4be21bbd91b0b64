"""`python -m loadtests.orphan_guard PARENT COMMAND...`: becomes a command that is told to end when its parent is gone.

A killed measurement cannot end the server that it started, so the kernel does it.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # kept by execve. Source: prctl(2)


def guarded(command: list[str]) -> list[str]:
    """Return the command that becomes another one, tied to this process."""
    return [sys.executable, "-m", "loadtests.orphan_guard", str(os.getpid()), *command]


def main(parent: int, command: list[str]) -> None:
    """Replace this process by the command.

    Raises:
        OSError: the kernel does not tie it to its parent.
        SystemExit: there is no such command; the line on stderr names it.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() == parent:  # else it was gone before it could be asked for
        try:
            os.execvp(command[0], command)  # noqa: S606  as it is, with no shell
        except OSError as error:
            sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
