"""What the HTTP processes share with each other and with their parent: a few words of memory.

Each value is one aligned word that is written whole, so every process sees a change at once and reads without a lock.
What only one process may do at a time is held by a record lock on the same memory, which the kernel gives back
whatever becomes of its holder.

Source: https://man7.org/linux/man-pages/man2/fcntl.2.html, "Advisory record locking".
"""

import fcntl
import mmap
import os

AUTO = -1
_WORD_BYTES = 4
_DEFAULT, _DRAINING, _READY = range(3)
_PROFILE_LOCK = 0  # the byte that its holder has locked; nothing is stored there for it


class SharedState:
    """The default backend, who is ready and whether the server is draining, in memory that forked processes inherit."""

    def __init__(self, processes: int = 1) -> None:
        """`processes` is the number of HTTP processes."""
        size = (_READY + processes) * _WORD_BYTES
        self._file = os.memfd_create("fused-mlp-server")
        os.ftruncate(self._file, size)
        self._words = memoryview(mmap.mmap(self._file, size)).cast("i")
        self._is_profiling = False
        self.default_backend = AUTO

    @property
    def default_backend(self) -> int:
        """Index of the backend that serves requests that name none, or `AUTO`."""
        return self._words[_DEFAULT]

    @default_backend.setter
    def default_backend(self, index: int) -> None:
        self._words[_DEFAULT] = index

    @property
    def is_draining(self) -> bool:
        """Whether the server is stopping: accepted requests are answered, new ones refused."""
        return bool(self._words[_DRAINING])

    def start_draining(self) -> None:
        """Let every process refuse new requests from now on."""
        self._words[_DRAINING] = 1

    def set_ready(self, process: int, is_ready: bool) -> None:
        """Tell whether the HTTP process number `process` can reach every worker."""
        self._words[_READY + process] = is_ready

    @property
    def are_all_ready(self) -> bool:
        """Whether every HTTP process can reach every worker."""
        return all(self._words[_READY:])

    def begin_profile(self) -> bool:
        """Claim the one profile that may run at a time over all processes; False where somebody has it."""
        if self._is_profiling:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _PROFILE_LOCK)
        except OSError:
            return False
        self._is_profiling = True
        return True

    def end_profile(self) -> None:
        """Give the claim back."""
        self._is_profiling = False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _PROFILE_LOCK)
