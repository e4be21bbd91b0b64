"""The files that a generator process may have open: each request in flight needs one, for its connection."""

import resource

from loadtests.errors import LoadTestError

OTHERS = 64  # its own modules, sockets to the other processes, a timer


class OpenFilesError(LoadTestError):
    """The process may not open as many files as the load has connections."""


def require_open_files(connections: int) -> None:
    """Raise the soft limit of this process, and of those it starts, to what so many connections need.

    Raises:
        OpenFilesError: the hard limit is below that.
    """
    needed = connections + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OpenFilesError(
            f"expected that a generator process may open {needed} files, for {connections} connections and its own, "
            f"got a hard limit of {hard}; raise it (ulimit -Hn), or load with fewer --users, --max-in-flight or more "
            "--processes"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
