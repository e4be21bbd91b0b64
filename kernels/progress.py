"""Shows on stderr how far a long measurement or compilation is."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

PATIENCE_S = 2.0
REFRESH_S = 0.1


class Progress:
    """A bar where stderr is a terminal, else a line at the start and one at the end; nothing below two seconds.

    Args:
        label: what is going on.
        total: steps altogether, above zero.
        stream: where to write; stderr if None.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._start = time.monotonic()
        self._shown_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def step(self, note: str = "") -> None:
        """Count one step done; `note` is a few words to stand at the end of the bar."""
        self.done += 1
        now = time.monotonic()
        if now - self._start < PATIENCE_S:
            return
        if not self._stream.isatty():
            if self._shown_at is None:
                self._write(f"{self.label}: {self.total} steps ...\n", now)
            return
        if self._shown_at is None or now - self._shown_at >= REFRESH_S:
            share = self.done / self.total
            left_s = (now - self._start) * (1 / share - 1)
            bar = "#" * round(24 * share)
            line = f"{self.label}  [{bar:.<24}] {self.done}/{self.total}  {left_s:.0f} s left  {note}"
            self._write(f"\r\x1b[K{line[:118]}", now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._shown_at is None:
            return
        now = time.monotonic()
        start = "\r\x1b[K" if self._stream.isatty() else ""
        verb = "done in" if kind is None else "stopped after"
        self._write(f"{start}{self.label}: {verb} {now - self._start:.1f} s\n", now)

    def _write(self, text: str, now: float) -> None:
        self._shown_at = now
        self._stream.write(text)
        self._stream.flush()
