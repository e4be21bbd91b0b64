"""Corrects what Triton's interpreter gets wrong about bfloat16; compiled kernels are not affected.

The interpreter holds bfloat16 as 16-bit integers. It multiplies those bit patterns in `tl.dot`, and truncates where a
GPU rounds to nearest even (triton-lang/triton#11584).
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit  # type: ignore[untyped-decorator]
def dot(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Compute ``total + a b`` with float32 sums: (M, K), (K, N), (M, N). float32 stays float32, no TF32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def rounded(value: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Round float32 to `DTYPE`, to nearest even."""
    if INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = value.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.uint32)
        value = tl.where(
            value == value, nearest.to(tl.float32, bitcast=True), value
        )  # adding to NaN would make it zero
    return value.to(DTYPE)
