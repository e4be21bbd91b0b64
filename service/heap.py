"""Keeping Python's garbage collector off what a process has loaded before it serves."""

import gc


def freeze_heap() -> None:
    """Collect once, then leave everything that is there out of later collections.

    FastAPI, pydantic and torch leave some hundred thousand objects for good; each full collection would walk them all
    while requests wait. Source: https://docs.python.org/3/library/gc.html#gc.freeze.
    """
    gc.collect()
    gc.freeze()
