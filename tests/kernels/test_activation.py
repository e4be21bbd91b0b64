import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import activation as op
from kernels.activation import ACTIVATIONS, gated_activation, gated_activation_torch
from kernels.numerics import disagreement

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Mutant = Callable[[ModuleType, str, str], ModuleType]


def halves(*shape: int, dtype: torch.dtype, device: torch.device, offset: float = 0) -> tuple[Tensor, Tensor]:
    """Make gate and up as the two halves of one tensor, gate around `offset`."""
    both = torch.randn(*shape[:-1], 2 * shape[-1], generator=torch.Generator().manual_seed(0))
    both[..., : shape[-1]] += offset
    gate, up = both.to(device, dtype).chunk(2, -1)
    return gate, up


def check(result: Tensor, gate: Tensor, up: Tensor, activation: str) -> str | None:
    exact = gated_activation_torch(gate.double(), up.double(), activation)
    return disagreement(result, gated_activation_torch(gate, up, activation), exact)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 19), (2, 3, 57), (5, 1030), (1100, 1), (0, 8), (2, 0, 8), (33,)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_as_exact_as_eager(
    dtype: torch.dtype, shape: tuple[int, ...], activation: str, device: torch.device
) -> None:
    gate, up = halves(*shape, dtype=dtype, device=device)
    result = gated_activation(gate, up, activation)
    assert result.is_contiguous()
    assert result.device == gate.device
    assert check(result, gate, up, activation) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_may_be_strided_anyhow(dtype: torch.dtype, device: torch.device) -> None:
    gate, up = halves(6, 4, 19, dtype=dtype, device=device)
    apart = gate[::2, :, 3:], up[1::2, :, :16]
    for left, right in ((gate.transpose(0, 1), up.transpose(0, 1)), apart, (gate[:1].expand(6, 4, 19), up)):
        assert check(gated_activation(left, right, "silu"), left, right, "silu") is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_writes_every_element_and_nothing_else(dtype: torch.dtype, device: torch.device) -> None:
    gate, up = halves(5, 1030, dtype=dtype, device=device)
    band = torch.full((9, 1062), torch.nan, dtype=dtype, device=device)
    out = band[2:7, 16:1046]
    op._launch(out, gate, up, "gelu")
    assert check(out, gate, up, "gelu") is None
    out.fill_(torch.nan)
    assert band.isnan().all()


def test_offsets_pass_int32(far_apart: Callable[[Tensor], Tensor], device: torch.device) -> None:
    gate, up = halves(3, 19, dtype=torch.float16, device=device)
    out = far_apart(torch.full_like(gate, torch.nan))
    op._launch(out, far_apart(gate), far_apart(up), "silu")
    assert check(out, gate, up, "silu") is None


def test_operands_are_not_written_to(device: torch.device) -> None:
    gate, up = halves(5, 19, dtype=torch.float32, device=device)
    before = gate.clone(), up.clone()
    gated_activation(gate, up, "gelu")
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


# NumPy, on which the interpreter runs, warns of what a GPU passes over.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_infinity_and_large_values_pass_through_as_in_eager(
    dtype: torch.dtype, activation: str, device: torch.device
) -> None:
    largest = torch.finfo(dtype).max
    special = [
        torch.nan,
        torch.inf,
        -torch.inf,
        largest,
        -largest,
        200.0,
        -200.0,
        0.0,
        -0.0,
        1.0,
        torch.finfo(dtype).tiny,
    ]
    gate = torch.tensor(special, dtype=dtype, device=device)
    for factor in (1.0, -1.0, torch.nan, torch.inf):
        up = torch.full_like(gate, factor)
        # Eager's own vectorized erf has gelu(inf) NaN; its scalar one, met one element at a time, does not.
        eager = torch.cat(
            [gated_activation_torch(z, u, activation) for z, u in zip(gate[:, None], up[:, None], strict=True)]
        )
        rtol = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(gated_activation(gate, up, activation), eager, rtol=rtol, atol=rtol, equal_nan=True)


@pytest.mark.parametrize(("meant", "wrong"), [("gelu", "gelu_tanh"), ("gelu_tanh", "gelu")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_erf_and_tanh_gelu_are_told_apart(dtype: torch.dtype, meant: str, wrong: str, device: torch.device) -> None:
    gate, up = halves(64, 64, dtype=dtype, device=device, offset=-3)  # where the two are 10% apart
    assert check(gated_activation(gate, up, meant), gate, up, meant) is None
    assert check(gated_activation(gate, up, wrong), gate, up, meant) is not None


@pytest.mark.parametrize(
    ("activation", "old", "new"),
    [
        ("gelu", "activate(gate, ACTIVATION) * up", "activate(up, ACTIVATION) * gate"),
        ("gelu", "activate(gate, ACTIVATION) * up", "activate(gate, ACTIVATION)"),
        ("gelu", "0.7071067811865476", "0.7072"),
        ("gelu_tanh", "0.044715", "0.0447"),
        ("silu", "out = z * tl.sigmoid(z)", "out = tl.sigmoid(z)"),
        ("relu", "tl.where(z < 0.0, 0.0, z)", "z"),
        ("silu", "up_ptr + rows * up_stride_m", "up_ptr + rows * gate_stride_m"),
        ("silu", "tl.program_id(0)", "tl.program_id(0) * 0"),
    ],
)
def test_mutations_fail_the_rule(activation: str, old: str, new: str, mutant: Mutant, device: torch.device) -> None:
    gate, up = halves(7, 1030, dtype=torch.float32, device=device)
    gate = gate.contiguous()
    results = []
    for module in (op, mutant(op, old, new)):
        out = torch.full_like(gate, torch.nan)
        module._launch(out, gate, up, activation)
        results.append(check(out, gate, up, activation))
    assert results[0] is None
    assert results[1] is not None


def test_is_a_well_formed_op(device: torch.device) -> None:
    gate, up = halves(3, 8, dtype=torch.float32, device=device)
    torch.library.opcheck(torch.ops.mlp.gated_activation.default, (gate, up, "gelu_tanh"))


def test_meta_tensors_give_shapes_alone() -> None:
    gate = torch.empty(2, 3, 8, device="meta", dtype=torch.bfloat16)
    result = gated_activation(gate, gate, "relu")
    assert (result.shape, result.dtype, result.device.type) == (gate.shape, gate.dtype, "meta")


def test_a_gradient_is_refused_not_dropped(device: torch.device) -> None:
    gate, up = halves(3, 8, dtype=torch.float32, device=device)
    result = gated_activation(gate.clone().requires_grad_(), up, "silu")
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.backward(result.sum())


ONES = torch.ones(4, 6)


@pytest.mark.parametrize(
    ("gate", "up", "activation", "error", "message"),
    [
        (
            ONES.double(),
            ONES.double(),
            "relu",
            TypeError,
            r"gate must be float32, float16 or bfloat16, got torch\.float64",
        ),
        (ONES, ONES.half(), "relu", TypeError, r"up must be torch\.float32 as gate is, got torch\.float16"),
        (ONES, ONES[:3], "relu", ValueError, r"up must be \(4, 6\), got \(3, 6\)"),
        (ONES, ONES[:1], "relu", ValueError, r"up must be \(4, 6\), got \(1, 6\)"),
        (ONES[:, :0], ONES[:, :0], "relu", ValueError, r"width above zero, got \(4, 0\)"),
        (ONES[0, 0], ONES[0, 0], "relu", ValueError, r"width above zero, got \(\)"),
        (ONES.t(), ONES.t(), "relu", ValueError, "gate's last dimension must be contiguous, got stride 6"),
        (ONES, torch.ones(6, 4).t(), "relu", ValueError, "up's last dimension must be contiguous, got stride 4"),
        (ONES, ONES.to("meta"), "relu", ValueError, "up must be on cpu as gate is, got meta"),
        (ONES, ONES, "tanh", ValueError, "activation must be one of gelu, gelu_tanh, silu, relu, got 'tanh'"),
    ],
)
def test_rejects(gate: Tensor, up: Tensor, activation: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^gated_activation: .*{message}"):
        gated_activation(gate, up, activation)


@pytest.mark.slow
def test_a_cpu_without_the_interpreter_is_told_what_to_do() -> None:
    code = """
import torch
from kernels.activation import gated_activation
try:
    gated_activation(torch.ones(2, 2), torch.ones(2, 2), "relu")
except ValueError as error:
    print(error)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={}, cwd=root)
    assert "must be on a CUDA or ROCm GPU, got cpu; on a CPU use kernels.onednn" in done.stdout
