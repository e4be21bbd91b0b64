"""The GPUs that kernels are compiled for, and what a program may have there."""

from typing import NamedTuple


class Arch(NamedTuple):
    """A GPU to compile for.

    Args:
        backend: Triton's name of it.
        target: Triton's name of the architecture.
        warp: threads per warp.
        shared_bytes: the most that one program may have.
    """

    backend: str
    target: int | str
    warp: int
    shared_bytes: int


# Source of the bounds: CUDA C++ Programming Guide, technical specifications per compute capability; CDNA3 ISA, LDS.
ARCHS = {
    "sm_80": Arch("cuda", 80, 32, 163 * 1024),
    "sm_90": Arch("cuda", 90, 32, 227 * 1024),
    "sm_100": Arch("cuda", 100, 32, 227 * 1024),
    "gfx942": Arch("hip", "gfx942", 64, 64 * 1024),
}
