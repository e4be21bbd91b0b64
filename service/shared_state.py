"""What the HTTP processes share with each other and with their parent: a few words of memory.

Each value is one aligned word that is written whole, so every process sees a change at once and reads without a lock; a
sentence is written before the word that says it is there. Record locks on the same memory serialise changes, and claim
what only one process may do at a time; the kernel releases them whatever becomes of their holder.

Source: https://man7.org/linux/man-pages/man2/fcntl.2.html, "Advisory record locking".
"""

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

AUTO = -1
SHARES = 1_000_000  # what a canary's weight of 1 is stored as
LEAST_SHARE = 1 / SHARES  # of a canary's that are not 0
_WORD_BYTES = 4
_DEFAULT, _DRAINING, _CHANGES, _FIRST = range(4)
_RECORD = struct.Struct("<dI500s")  # when, how many bytes of the sentence, the sentence
_PROFILE_LOCK, _CHANGE_LOCK = range(2)  # the bytes that their holders have locked; what is stored there is not meant


def is_share(weight: float) -> bool:
    """Say whether a canary can take this share of the requests: none, or as much as can be stored, up to all."""
    return weight == 0 or LEAST_SHARE <= weight <= 1


class Outage(NamedTuple):
    """Why a backend was taken out, one sentence without a full stop, and when, in seconds since 1970."""

    since_s: float
    reason: str


class SharedState:
    """The default backend and the canaries, which backends are taken out and why, who is ready, what is draining.

    It is in memory that forked processes inherit.
    """

    def __init__(self, processes: int = 1, backends: int = 3) -> None:
        """`processes` is the number of HTTP processes, `backends` that of the server's backends."""
        self._canary = _FIRST
        self._out = self._canary + backends
        self._put_backs = self._out + backends
        self._ready = self._put_backs + backends
        words = self._ready + processes
        self._records = words * _WORD_BYTES
        size = self._records + backends * _RECORD.size
        self._file = os.memfd_create("fused-mlp-server")
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)
        self._words = memoryview(self._memory)[: self._records].cast("i")
        self._is_profiling = False
        self._words[_DEFAULT] = AUTO

    @property
    def changes(self) -> int:
        """How often the default, the canaries or what is taken out changed, so that what is derived can be cached."""
        return self._words[_CHANGES]

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, _CHANGE_LOCK)
        try:
            yield
            self._words[_CHANGES] += 1
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _CHANGE_LOCK)

    @property
    def default_backend(self) -> int:
        """Index of the backend that serves requests that name none, or `AUTO`."""
        return self._words[_DEFAULT]

    @default_backend.setter
    def default_backend(self, index: int) -> None:
        with self._change():
            self._words[_DEFAULT] = index

    @property
    def canary(self) -> tuple[float, ...]:
        """Each backend's share of the requests that name none, which it takes before the default does."""
        return tuple(share / SHARES for share in self._words[self._canary : self._out])

    @canary.setter
    def canary(self, weights: Sequence[float]) -> None:
        with self._change():
            for index, weight in enumerate(weights):
                self._words[self._canary + index] = round(weight * SHARES)

    def outage(self, backend: int) -> Outage | None:
        """Return why and since when a backend is taken out; None where it is not."""
        if not self._words[self._out + backend]:
            return None
        since_s, length, sentence = _RECORD.unpack_from(self._memory, self._records + backend * _RECORD.size)
        return Outage(since_s, sentence[:length].decode(errors="ignore"))

    def take_out(self, backend: int, outage: Outage) -> bool:
        """Let no process use a backend from now on; False if that is already so."""
        sentence = outage.reason.encode()[:500]
        with self._change():
            if self._words[self._out + backend]:
                return False
            place = self._records + backend * _RECORD.size
            _RECORD.pack_into(self._memory, place, outage.since_s, len(sentence), sentence)
            self._words[self._out + backend] = 1
        return True

    def put_back(self, backend: int) -> None:
        """Let all processes use a backend again."""
        with self._change():
            self._words[self._out + backend] = 0
            self._words[self._put_backs + backend] += 1

    def times_put_back(self, backend: int) -> int:
        """Return how often a backend was put back."""
        return self._words[self._put_backs + backend]

    @property
    def is_draining(self) -> bool:
        """Whether the server is stopping: accepted requests are answered, new ones refused."""
        return bool(self._words[_DRAINING])

    def start_draining(self) -> None:
        """Let every process refuse new requests from now on."""
        self._words[_DRAINING] = 1

    def set_ready(self, process: int, is_ready: bool) -> None:
        """Tell whether the HTTP process number `process` can reach every worker."""
        self._words[self._ready + process] = is_ready

    @property
    def are_all_ready(self) -> bool:
        """Whether every HTTP process can reach every worker."""
        return all(self._words[self._ready :])

    def begin_profile(self) -> bool:
        """Claim the one profile that may run at a time in all processes; False if another has it."""
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
