"""What is compiled: every shipped kernel with every dtype, activation and tile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from kernels.activation import ACTIVATIONS
from kernels.activation import BLOCK as ACTIVATION_BLOCK
from kernels.aot.targets import ARCHS
from kernels.linear import BLOCK as SUM_BLOCK
from kernels.norm import WIDEST, norm_block
from kernels.tiles import shipped

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Where each kernel stands.
KERNELS = {
    "gated_activation": ("activation", "_gated_activation_kernel"),
    "gated_linear": ("gated_linear", "_gated_linear_kernel"),
    "gated_linear_tma": ("gated_linear", "_gated_linear_tma_kernel"),
    "rms_gated_linear": ("gated_linear", "_gated_linear_kernel"),
    "rms_gated_linear_tma": ("gated_linear", "_gated_linear_tma_kernel"),
    "linear": ("linear", "_linear_kernel"),
    "linear_tma": ("linear", "_linear_tma_kernel"),
    "linear_sum": ("linear", "_linear_sum_kernel"),
    "norm": ("norm", "_norm_kernel"),
}
MATRIX_KERNELS = {
    *("gated_linear", "gated_linear_tma", "rms_gated_linear", "rms_gated_linear_tma"),
    *("linear", "linear_tma"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel to compile for one architecture.

    Args:
        kernel: a key of `KERNELS`.
        arch: a key of `ARCHS`.
        dtype: a key of `DTYPES`; of the operands and the result.
        constants: compile-time parameters of the kernel.
        absent: pointers, and other operands, that are None.
        num_warps: warps per program.
        num_stages: steps whose loads are in flight.
    """

    kernel: str
    arch: str
    dtype: str
    constants: tuple[tuple[str, int | bool | str | None], ...]
    absent: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3

    @property
    def name(self) -> str:
        """A unique name, fit for a file."""
        constants = [f"{name.lower()}-{value}" for name, value in self.constants]
        absent = [f"no-{name.removesuffix('_ptr')}" for name in self.absent]
        words = [self.kernel, self.dtype, *constants, *absent, f"warps-{self.num_warps}", f"stages-{self.num_stages}"]
        return ".".join([*words, self.arch])

    def constant(self, name: str) -> int | bool | str | None:
        """Return a compile-time parameter, None where the kernel has none of that name."""
        return dict(self.constants).get(name)

    @property
    def matrix_instruction(self) -> str | None:
        """The instruction the products must run on, or None where there is none to ask for.

        float32 without TF32 has none on NVIDIA, and is multiplied by FFMA. Hopper's and Blackwell's asynchronous
        products take 64 rows and more; smaller tiles use the older HMMA there.
        """
        if self.kernel not in MATRIX_KERNELS:
            return None
        if self.arch == "gfx942":
            return "v_mfma"
        if self.dtype == "fp32":
            return None
        rows = self.constant("BLOCK_M")
        is_large = isinstance(rows, int) and rows >= 64
        return {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(self.arch, "HMMA") if is_large else "HMMA"


def cases(archs: Sequence[str] = tuple(ARCHS)) -> list[Case]:
    """List what is shipped: every kernel, dtype, activation and tile, for each of `archs`.

    An optional operand is a load outside the loop, and cases have all of them. Without it registers are allocated
    differently, and not always fewer, so in bfloat16 the gated layer is compiled with and without; the others are
    compiled once. The gated layer with the norm in it counts as a kernel of its own here.

    Raises:
        ValueError: an architecture is unknown.
    """
    for arch in archs:
        if arch not in ARCHS:
            raise ValueError(f"aot: arch must be one of {', '.join(ARCHS)}, got {arch!r}")
    return [case for arch in archs for dtype in DTYPES for case in _cases(arch, dtype)]


def _cases(arch: str, dtype: str) -> Iterator[Case]:
    def constants(**values: int | bool | str | None) -> tuple[tuple[str, int | bool | str | None], ...]:
        return tuple(values.items())

    for activation in ACTIVATIONS:
        yield Case(
            "gated_activation", arch, dtype, constants(ACTIVATION=activation, BLOCK_M=1, BLOCK_N=ACTIVATION_BLOCK)
        )
    narrow = {"BLOCK_M": ACTIVATION_BLOCK // 128, "BLOCK_N": 128}
    yield Case("gated_activation", arch, dtype, constants(ACTIVATION="gelu", **narrow))

    biases = ("gate_bias_ptr", "up_bias_ptr")
    for op, without in (("gated_linear", ("eps",)), ("rms_gated_linear", ())):
        for tile, activation in product(shipped(op, DTYPES[dtype], arch), ACTIVATIONS):
            kernel = f"{op}_tma" if tile.feed == "tma" else op
            parameters = constants(ACTIVATION=activation, **tile.constants)
            yield Case(kernel, arch, dtype, parameters, without, tile.num_warps, tile.num_stages)
            if dtype == "bf16":
                yield Case(kernel, arch, dtype, parameters, (*biases, *without), tile.num_warps, tile.num_stages)

    for tile in shipped("linear", DTYPES[dtype], arch):
        is_tma = tile.feed == "tma"
        ends: list[tuple[str | None, int, tuple[str, ...]]] = [(activation, 1, ()) for activation in ACTIVATIONS]
        ends += [(None, 1, ("bias_ptr", "residual_ptr"))]
        ends += [] if is_tma else [(None, 4, ())]
        for end, split, absent in ends:
            parameters = constants(ACTIVATION=end, **tile.constants, **({} if is_tma else {"SPLIT": split}))
            kernel = "linear_tma" if is_tma else "linear"
            yield Case(kernel, arch, dtype, parameters, absent, tile.num_warps, tile.num_stages)

    for end in (None, *ACTIVATIONS):
        parameters = constants(ACTIVATION=end, BLOCK_M=1, BLOCK_N=SUM_BLOCK, SPLIT=8)
        yield Case("linear_sum", arch, dtype, parameters)

    for width in (1024, 4096, WIDEST):
        block = norm_block(width)
        for is_centered in (False, True):
            parameters = constants(IS_CENTERED=is_centered, BLOCK_M=block.block_m, BLOCK_N=block.block_n)
            bias = () if is_centered else ("bias_ptr",)
            yield Case("norm", arch, dtype, parameters, bias, block.num_warps)
            if width == 1024:
                yield Case("norm", arch, dtype, parameters, ("residual_ptr", *bias, "total_ptr"), block.num_warps)
