"""Records how each step ended, and ends it when no time is left."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.errors import first_line

STOPPED = "stopped: no time was left"


@dataclass(slots=True)
class Report:
    """What has been done: the state of each step, and what the steps found; `deadline` is by `time.monotonic`."""

    out: Path
    deadline: float
    steps: list[dict[str, Any]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def step(self, name: str, run: Callable[[], str | None]) -> None:
        """Run one step until the deadline and note "done", or why not.

        Args:
            name: of the step.
            run: returns what kept it from being done, None for nothing.
        """
        start = time.monotonic()
        if start >= self.deadline:
            state = "left out: no time was left"
        else:
            try:
                with stopped_after(self.left_s):
                    state = run() or "done"
            except StoppedError:
                state = STOPPED
            except Exception as error:
                state = f"failed: {first_line(error)}"
        self.steps.append({"step": name, "state": state, "seconds": round(time.monotonic() - start, 1)})
        print(f"{name}: {state}", flush=True)

    def write(self, name: str, document: Any) -> None:
        """Write gpu-`name`.json."""
        (self.out / f"gpu-{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @property
    def left_s(self) -> float:
        """Seconds until the step in progress ends, and none is begun any more."""
        return self.deadline - time.monotonic()


class StoppedError(BaseException):
    """No time is left. It is not an `Exception`, so that code which catches those and goes on lets it pass."""


@contextmanager
def stopped_after(limit_s: float) -> Iterator[None]:
    """End the block inside after so many seconds, as soon as Python runs; for the main thread.

    Raises:
        StoppedError: it ended so.
    """

    def stop(*_: object) -> None:
        raise StoppedError

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, max(limit_s, 1e-6))  # 0 would set none
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)
