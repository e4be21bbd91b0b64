"""Shows on stderr how far a long task has got."""

import math
import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

REFRESH_S = 0.1


class Progress:
    """A bar where stderr is a terminal, else one line at the start and one at the end.

    Use it as a context manager, and call it with how much of how much is done, or call `step` after each of `total`.
    A task that reports no progress is shown by its label alone, from a thread.

    Args:
        label: what is going on.
        total: how many steps there are, where `step` counts them.
        stream: where to write; stderr if None.
        patience_s: seconds before anything is shown; most tasks are done by then.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        label: str,
        total: int = 0,
        stream: TextIO | None = None,
        patience_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._stream = sys.stderr if stream is None else stream
        self._patience_s = patience_s
        self._clock = clock
        self._start = clock()
        self._shown_at = -math.inf
        self._is_shown = False
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._show_label_in_time, name=f"progress: {label}", daemon=True)

    def __enter__(self) -> Self:
        if self._patience_s > 0:
            self._watch.start()
        else:
            self._show_label()
        return self

    def step(self, note: str = "") -> None:
        """Count one step done; `note` is a few words to stand at the end."""
        self.done += 1
        self(self.done, self.total, note)

    def __call__(self, done: float, total: float, note: str = "") -> None:
        """Tell how much is done.

        Args:
            done: steps so far.
            total: steps altogether; where it is not a positive finite number, the steps are shown without a bar.
            note: a few words to stand at the end.
        """
        with self._lock:
            self._show(done, total, note)

    def _show(self, done: float, total: float, note: str) -> None:
        now = self._clock()
        elapsed = now - self._start
        if elapsed < self._patience_s:
            return
        if not self._stream.isatty():
            if not self._is_shown:
                self._is_shown = True
                self._stream.write(f"{self.label} ...\n")
                self._stream.flush()
            return
        if now - self._shown_at < REFRESH_S and done != total:
            return
        self._shown_at, self._is_shown = now, True
        columns = shutil.get_terminal_size().columns
        self._stream.write(f"\r\x1b[K{self._line(done, total, note, elapsed)[: columns - 1]}")
        self._stream.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._watch.is_alive():
            self._watch.join()
        if not self._is_shown:
            return
        start = "\r\x1b[K" if self._stream.isatty() else ""
        verb = "done in" if kind is None else "stopped after"
        self._stream.write(f"{start}{self.label}: {verb} {self._clock() - self._start:.1f} s\n")
        self._stream.flush()

    def _show_label_in_time(self) -> None:
        if not self._is_over.wait(self._patience_s):
            self._show_label()

    def _show_label(self) -> None:
        with self._lock:
            if self._is_shown:
                return
            self._is_shown = True
            columns = shutil.get_terminal_size().columns
            line = f"{self.label} ..."
            self._stream.write(f"\r\x1b[K{line[: columns - 1]}" if self._stream.isatty() else f"{line}\n")
            self._stream.flush()

    def _line(self, done: float, total: float, note: str, elapsed: float) -> str:
        note = f"  {note}" if note else ""
        if not (math.isfinite(total) and total > 0 and math.isfinite(done)):
            return f"{self.label}  {done:g} steps{note}"
        share = min(max(done / total, 0.0), 1.0)
        bar = "#" * round(24 * share)
        left = f"  {elapsed / share - elapsed:.0f} s left" if share > 0 else ""
        return f"{self.label}  [{bar:.<24}] {done:g}/{total:g}{left}{note}"
