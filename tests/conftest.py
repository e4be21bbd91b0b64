"""Fixtures for the whole suite."""

import os

# Before any kernel is imported: without a GPU, Triton kernels run under its interpreter.
if not os.path.exists("/dev/nvidiactl") and not os.path.exists("/dev/kfd"):  # noqa: PTH110
    os.environ.setdefault("TRITON_INTERPRET", "1")
