"""What the HTTP processes share with each other and with their parent: a few bytes of memory, no lock.

Each value is one aligned word that is written whole, so every process sees a change at once.
"""

import mmap
import struct

AUTO = -1
_WORD = struct.Struct("<i")


class SharedState:
    """The default backend, who is ready and whether the server is draining, in memory that forked processes inherit."""

    def __init__(self, processes: int = 1) -> None:
        """`processes` is the number of HTTP processes."""
        self._memory = mmap.mmap(-1, 2 * _WORD.size + processes)
        self.default_backend = AUTO

    @property
    def default_backend(self) -> int:
        """Index of the backend that serves requests that name none, or `AUTO`."""
        return int(_WORD.unpack_from(self._memory, 0)[0])

    @default_backend.setter
    def default_backend(self, index: int) -> None:
        _WORD.pack_into(self._memory, 0, index)

    @property
    def is_draining(self) -> bool:
        """Whether the server is stopping: accepted requests are answered, new ones refused."""
        return bool(_WORD.unpack_from(self._memory, _WORD.size)[0])

    def start_draining(self) -> None:
        """Let every process refuse new requests from now on."""
        _WORD.pack_into(self._memory, _WORD.size, 1)

    def set_ready(self, process: int, is_ready: bool) -> None:
        """Tell whether the HTTP process number `process` can reach every worker."""
        self._memory[2 * _WORD.size + process] = is_ready

    @property
    def are_all_ready(self) -> bool:
        """Whether every HTTP process can reach every worker."""
        return all(self._memory[2 * _WORD.size :])
