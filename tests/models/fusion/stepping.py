"""What another thread may do between any two lines of a module, done there by the thread that runs them."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


@contextlib.contextmanager
def between_lines(module: ModuleType, act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` before each line of a module's functions, with how many came before it; it is not stepped through."""
    number = 0

    def step(frame: FrameType, event: str, _: object) -> Any:
        nonlocal number
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            sys.settrace(None)
            act(number)
            sys.settrace(step)
            number += 1
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        yield
    finally:
        sys.settrace(before)
