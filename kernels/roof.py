"""What an operator moves and computes, and the most that the device can do, measured in the same run."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kernels.dtypes import name_of
from kernels.onednn import PackedLinear, unavailable
from kernels.output import four_digits
from kernels.timing import seconds_of

# Far beyond every cache, and square products that keep every core busy; which of them is fastest, nobody knows before.
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
PRODUCT_SIDES = {"cpu": (1024, 2048), "cuda": (8192,)}
PATIENCE_S = 1.0  # a product whose tries have taken this long is not tried again


class Work(NamedTuple):
    """Bytes that must cross memory, each operand read and each result written once, and FLOPs of the products."""

    bytes: int
    flops: int


class Roof(NamedTuple):
    """The most a device was seen to do: bytes a second of a copy, FLOPs a second of a product by dtype."""

    bytes_per_s: float
    flops_per_s: dict[torch.dtype, float]

    def ridge(self, dtype: torch.dtype) -> float:
        """Return the FLOPs for each byte below which memory sets the time, and above which the products do."""
        return self.flops_per_s[dtype] / self.bytes_per_s

    def floor_s(self, work: Work, dtype: torch.dtype) -> float:
        """Return the least time `work` can take: the longer of moving its bytes and computing its products."""
        return max(work.bytes / self.bytes_per_s, work.flops / self.flops_per_s[dtype])


def measured_roof(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, int, int]] = (),
    repetitions: int = 9,
) -> Roof:
    """Measure the roof: copy 256 MiB (1 GiB on a GPU), and multiply matrices, square ones and those of `shapes`.

    On a CPU each is multiplied by PyTorch and by oneDNN with a packed weight, where that runs. The fastest try of the
    fastest product counts, since a roof is what can be done at most.

    Args:
        device: to measure on.
        dtypes: of the products.
        shapes: (rows, in, out) of products beside `PRODUCT_SIDES`, say those of a model.
        repetitions: tries of each; fewer where they take longer than `PATIENCE_S`.

    Raises:
        RuntimeError: the device does not multiply one of `dtypes`.
    """
    source = torch.zeros(COPY_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    bytes_per_s = 2 * source.numel() / _best_s(partial(target.copy_, source), device, repetitions)
    del source, target
    squares = [(side, side, side) for side in PRODUCT_SIDES[device.type]]
    return Roof(
        bytes_per_s,
        {
            dtype: max(
                2 * rows * width * out / _best_s(call, device, repetitions)
                for rows, width, out in dict.fromkeys([*squares, *shapes])
                for call in _products(rows, width, out, dtype, device)
            )
            for dtype in dtypes
        },
    )


def roof_record(roof: Roof) -> dict[str, object]:
    """Return what JSON holds, rounded to four significant digits."""
    return {
        "copy_gb_per_s": four_digits(roof.bytes_per_s / 1e9),
        "product_tflop_per_s": {name_of(it): four_digits(rate / 1e12) for it, rate in roof.flops_per_s.items()},
        "ridge_flop_per_byte": {name_of(it): four_digits(roof.ridge(it)) for it in roof.flops_per_s},
    }


def described(roof: Roof) -> str:
    """Describe a roof in words."""
    products = (
        f"product in {name_of(dtype)} {rate / 1e12:.3f} TFLOP/s, ridge {roof.ridge(dtype):.1f} FLOP per byte"
        for dtype, rate in roof.flops_per_s.items()
    )
    return "; ".join((f"copy {roof.bytes_per_s / 1e9:.1f} GB/s", *products))


def _products(
    rows: int, width: int, out: int, dtype: torch.dtype, device: torch.device
) -> Iterator[Callable[[], object]]:
    a, b = (torch.randn(sizes, device=device).to(dtype) for sizes in ((rows, width), (width, out)))
    yield partial(torch.mm, a, b, out=torch.empty(rows, out, dtype=dtype, device=device))
    if device.type == "cpu" and unavailable(dtype) is None:
        yield partial(PackedLinear(b.T), a)


def _best_s(call: Callable[[], object], device: torch.device, repetitions: int) -> float:
    call()
    best_s, spent_s = math.inf, 0.0
    for _ in range(repetitions):
        seconds = seconds_of(call, device)
        best_s, spent_s = min(best_s, seconds), spent_s + seconds
        if spent_s > PATIENCE_S:
            break
    return best_s
