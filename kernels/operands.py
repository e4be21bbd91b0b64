"""What every Triton operator requires of its operands, and the device it launches on."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import copy_context

import torch
import triton
from torch import Tensor

from kernels.dtypes import DTYPES
from kernels.interpreter import INTERPRETED

# The multiprocessors of an H200: what tensors on no GPU stand for, so that the interpreter meets its splits.
INTERPRETED_MULTIPROCESSORS = 132


def check_rows(op: str, name: str, tensor: Tensor) -> None:
    """Check that `tensor` is (..., width) of a supported dtype, width above zero, last dimension contiguous.

    Raises:
        TypeError: its dtype is not supported.
        ValueError: its shape or last stride is not.
    """
    if tensor.dtype not in DTYPES.values():
        raise TypeError(f"{op}: {name} must be float32, float16 or bfloat16, got {tensor.dtype}")
    if tensor.ndim == 0 or tensor.shape[-1] == 0:
        raise ValueError(f"{op}: {name} must be (..., width) with width above zero, got {tuple(tensor.shape)}")
    _check_last_stride(op, name, tensor)


def check_like(op: str, name: str, tensor: Tensor, shape: Sequence[int], like_name: str, like: Tensor) -> None:
    """Check that `tensor` has `shape`, a contiguous last dimension, and dtype and device of `like`.

    Raises:
        TypeError: its dtype differs.
        ValueError: its shape, last stride or device is wrong.
    """
    if tensor.shape != tuple(shape):
        raise ValueError(f"{op}: {name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
    if tensor.dtype != like.dtype:
        raise TypeError(f"{op}: {name} must be {like.dtype} as {like_name} is, got {tensor.dtype}")
    if tensor.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device} as {like_name} is, got {tensor.device}")
    _check_last_stride(op, name, tensor)


def _check_last_stride(op: str, name: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{op}: {name}'s last dimension must be contiguous, got stride {tensor.stride(-1)}")


def as_rows(tensor: Tensor) -> Tensor:
    """Fold the leading dimensions into one, (..., n) to (rows, n): a view, unless they are permuted."""
    return tensor.reshape(-1, tensor.shape[-1])


def launch_on(op: str, tensor: Tensor) -> AbstractContextManager[object]:
    """Make the device of `tensor` the current one, since Triton launches on that and not on the operands'.

    Raises:
        ValueError: it is no GPU, and Triton does not interpret.
    """
    if tensor.is_cuda:
        return torch.cuda.device(tensor.device)
    if not INTERPRETED:
        raise ValueError(
            f"{op}: operands must be on a CUDA or ROCm GPU, got {tensor.device}; on a CPU use kernels.onednn, or set "
            "TRITON_INTERPRET=1 before the first import to check results slowly"
        )
    return nullcontext()


def multiprocessor_count(tensor: Tensor) -> int:
    """Count the multiprocessors (compute units on ROCm) that `tensor`'s device spreads programs over.

    On a CPU, where the interpreter runs programs one by one, it is `INTERPRETED_MULTIPROCESSORS`.
    """
    if not tensor.is_cuda:
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def takes_tma(*operands: Tensor) -> bool:
    """Tell whether the copy engine can read `operands`, (rows, columns): start and rows on 16 bytes, neither empty.

    Source: cuTensorMapEncodeTiled, CUDA Driver API.
    """
    return all(
        each.numel() > 0
        and each.stride(1) == 1
        and each.stride(0) > 0
        and each.data_ptr() % 16 == 0
        and each.stride(0) * each.element_size() % 16 == 0
        for each in operands
    )


def with_descriptors(launch: Callable[..., object], tensor: Tensor) -> Callable[..., None]:
    """Let `launch`'s kernel make tensor descriptors, in memory that PyTorch allocates on `tensor`'s device.

    Triton asks for an allocator and keeps it in a context variable; a copied context leaves the caller's alone.
    """

    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        del alignment, stream  # PyTorch's allocator aligns to 512 bytes, and to the current stream
        return torch.empty(size, dtype=torch.int8, device=tensor.device)

    def in_context(*args: object, **options: object) -> None:
        triton.set_allocator(allocate)
        launch(*args, **options)

    def call(*args: object, **options: object) -> None:
        copy_context().run(in_context, *args, **options)

    return call
