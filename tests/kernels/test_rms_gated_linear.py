from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import gated_linear as op
from kernels import rms_gated_linear as wrapper
from kernels import tiles
from kernels.activation import ACTIVATIONS
from kernels.numerics import disagreement
from kernels.rms_gated_linear import fold_norm, rms_gated_linear, rms_gated_linear_torch
from kernels.tiles import Tile

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 19, 57), (5, 1, 1), (17, 72, 33), (3, 64, 32)]  # rows, in, out
EPS = 1e-5
SMALL, TMA = Tile(16, 16, 16, 4, 3), Tile(16, 16, 16, 4, 3, "tma")
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]  # x, the weights as stored, the biases
Mutant = Callable[[ModuleType, str, str], ModuleType]


def operands(
    rows: int, width: int, out: int, dtype: torch.dtype, device: torch.device, has_biases: bool = True
) -> tuple[Operands, Tensor]:
    """Make x, gate_weight, up_weight, gate_bias and up_bias, and the norm's weight, which is one give or take."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, gate_weight, up_weight = (
        3 * normal(rows, width),
        normal(out, width) / width**0.5,
        normal(out, width) / width**0.5,
    )
    biases = [normal(out), normal(out)] if has_biases else [None, None]
    placed = [None if each is None else each.to(device, dtype) for each in (x, gate_weight, up_weight, *biases)]
    return tuple(placed), (1 + normal(width) / 4).to(device, dtype)  # type: ignore[return-value]


def folded(args: Operands, norm_weight: Tensor) -> Operands:
    x, gate_weight, up_weight, gate_bias, up_bias = args
    return x, fold_norm(gate_weight, norm_weight), fold_norm(up_weight, norm_weight), gate_bias, up_bias


def check(result: Tensor, args: Operands, norm_weight: Tensor, activation: str, eps: float = EPS) -> str | None:
    """Compare with what eager and float64 compute of the weights as they are stored, norm and layer apart."""
    doubles = [None if each is None else each.double() for each in (*args, norm_weight)]
    options = {"eps": eps, "activation": activation}
    exact = rms_gated_linear_torch(*doubles[:-1], **options, norm_weight=doubles[-1])  # type: ignore[arg-type]
    eager = rms_gated_linear_torch(*args, **options, norm_weight=norm_weight)  # type: ignore[arg-type]
    return disagreement(result, eager, exact)


def launch(module: ModuleType, args: Operands, activation: str, tile: Tile = SMALL, eps: float = EPS) -> Tensor:
    out = torch.full((args[0].shape[0], args[1].shape[0]), torch.nan, dtype=args[0].dtype, device=args[0].device)
    module.launch(wrapper.OP, out, *args, activation, tile, eps)
    return out


@pytest.mark.parametrize(("shape", "activation"), [*zip(SHAPES, ACTIVATIONS, strict=True)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_with_folded_weights_it_is_as_exact_as_eager_with_stored_ones(
    dtype: torch.dtype, shape: tuple[int, int, int], activation: str, device: torch.device
) -> None:
    args, norm_weight = operands(*shape, dtype, device)
    result = rms_gated_linear(*folded(args, norm_weight), eps=EPS, activation=activation)
    assert result.is_contiguous()
    assert check(result, args, norm_weight, activation) is None


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rule_holds_however_far_the_norms_weights_are_apart(
    dtype: torch.dtype, spread: float, device: torch.device
) -> None:
    args, norm_weight = operands(24, 256, 96, dtype, device, has_biases=False)
    norm_weight = torch.exp(spread * torch.randn(256, generator=torch.Generator().manual_seed(2))).to(norm_weight)
    result = rms_gated_linear(*folded(args, norm_weight), eps=EPS, activation="gelu_tanh")
    assert check(result, args, norm_weight, "gelu_tanh") is None


@pytest.mark.parametrize("tile", [SMALL, Tile(16, 32, 64, 4, 3), Tile(32, 16, 16, 4, 3), TMA], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (33, 56, 19)], ids=str)
def test_every_tile_covers_shapes_it_divides_and_shapes_it_does_not(
    shape: tuple[int, int, int], tile: Tile, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "multiprocessor_count", lambda _: 3)
    args, norm_weight = operands(*shape, torch.float32, device)
    assert check(launch(op, folded(args, norm_weight), "silu", tile), args, norm_weight, "silu") is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_and_writes_only_its_operands(dtype: torch.dtype, device: torch.device) -> None:
    def within_nan(tensor: Tensor) -> Tensor:
        band = torch.full([size + 64 for size in tensor.shape], torch.nan, dtype=tensor.dtype, device=tensor.device)
        return band[tuple(slice(24, 24 + size) for size in tensor.shape)].copy_(tensor)

    args, norm_weight = operands(19, 57, 21, dtype, device)
    x, gate, up, *biases = folded(args, norm_weight)
    gate_bias, up_bias = (None if each is None else within_nan(each) for each in biases)
    inner = within_nan(x), within_nan(gate), within_nan(up), gate_bias, up_bias
    band = torch.full((19 + 64, 21 + 64), torch.nan, dtype=dtype, device=device)
    out = band[24:43, 24:45]
    op.launch(wrapper.OP, out, *inner, "silu", SMALL, EPS)
    assert check(out, args, norm_weight, "silu") is None
    out.fill_(torch.nan)
    assert band.isnan().all()


@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (2, 3)], ids=str)
def test_leading_dimensions_are_kept(leading: tuple[int, ...], device: torch.device) -> None:
    (_, *rest), norm_weight = operands(1, 19, 57, torch.bfloat16, device)
    x = torch.randn(*leading, 19, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    args: Operands = (x, *rest)  # type: ignore[assignment]
    result = rms_gated_linear(*folded(args, norm_weight), eps=EPS, activation="relu")
    assert check(result, args, norm_weight, "relu") is None


def test_offsets_pass_int32(far_apart: Callable[[Tensor], Tensor], device: torch.device) -> None:
    args, norm_weight = operands(3, 19, 3, torch.float16, device)
    x, gate_weight, up_weight, gate_bias, up_bias = folded(args, norm_weight)
    out = far_apart(torch.full((3, 3), torch.nan))
    apart = far_apart(x), far_apart(gate_weight), far_apart(up_weight)
    op.launch(wrapper.OP, out, *apart, gate_bias, up_bias, "silu", SMALL, EPS)
    assert check(out, args, norm_weight, "silu") is None


def test_weights_may_be_halves_of_one_tensor_and_rows_strided(device: torch.device) -> None:
    (x, gate_weight, up_weight, *biases), norm_weight = operands(8, 57, 19, torch.float32, device)
    both = fold_norm(torch.cat([gate_weight, up_weight]), norm_weight)
    result = rms_gated_linear(x[::3], *both.chunk(2), *biases, eps=EPS, activation="silu")
    assert check(result, (x[::3], gate_weight, up_weight, *biases), norm_weight, "silu") is None  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
@pytest.mark.parametrize("eps", [EPS, 0.0])
def test_nan_infinity_and_rows_of_nothing_pass_through_as_in_eager(eps: float, device: torch.device) -> None:
    args, norm_weight = operands(6, 32, 48, torch.float32, device)
    args[0][1, 3], args[0][2, 4], args[0][4, 0], args[0][5] = torch.nan, torch.inf, -torch.inf, 0
    eager = rms_gated_linear_torch(*args, eps=eps, activation="silu", norm_weight=norm_weight)
    result = rms_gated_linear(*folded(args, norm_weight), eps=eps, activation="silu")
    torch.testing.assert_close(result, eager, equal_nan=True)


POINTERS = [
    ("\n        gate *= scale", ""),
    ("\n        up *= scale", ""),
    ("\n        scale = tl.rsqrt(squares / K + eps)", "\n        scale = tl.rsqrt(squares / K)"),
    ("\n        scale = tl.rsqrt(squares / K + eps)", "\n        scale = tl.rsqrt(squares / N + eps)"),
    (
        "\n            squares += _sum_of_squares(x)\n        x_ptrs",
        "\n            squares = _sum_of_squares(x)\n        x_ptrs",
    ),
    ("tl.sum(wide * wide, axis=1)", "tl.sum(tl.abs(wide), axis=1)"),
]
FED = [("\n                squares += _sum_of_squares(x)", "\n                squares = _sum_of_squares(x)")]


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("tile", "old", "new"), [*((SMALL, *each) for each in POINTERS), *((TMA, *each) for each in FED)]
)
def test_mutations_fail_the_rule(
    tile: Tile, old: str, new: str, mutant: Mutant, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = mutant(op, old, new)
    for module in (op, changed):
        monkeypatch.setattr(module, "multiprocessor_count", lambda _: 3)
    args, norm_weight = operands(17, 56, 24, torch.float16, device)
    args = (args[0] / 8, *args[1:])  # so small that eps counts
    ours = folded(args, norm_weight)
    assert check(launch(op, ours, "gelu", tile, 0.1), args, norm_weight, "gelu", 0.1) is None
    assert check(launch(changed, ours, "gelu", tile, 0.1), args, norm_weight, "gelu", 0.1) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norms_weight_left_out_fails_the_rule(dtype: torch.dtype, device: torch.device) -> None:
    args, norm_weight = operands(17, 57, 40, dtype, device)
    assert check(launch(op, args, "gelu"), args, norm_weight, "gelu") is not None


def test_is_a_well_formed_op(device: torch.device) -> None:
    for has_biases in (True, False):
        args, _ = operands(3, 8, 5, torch.float32, device, has_biases)
        torch.library.opcheck(torch.ops.mlp.rms_gated_linear.default, (*args, EPS, "gelu_tanh"))


def test_meta_tensors_give_shapes_alone() -> None:
    x, weight = torch.empty(2, 3, 8, device="meta"), torch.empty(5, 8, device="meta")
    result = rms_gated_linear(x, weight, weight, eps=EPS, activation="relu")
    assert (result.shape, result.device.type) == ((2, 3, 5), "meta")


ONES, WEIGHT = torch.ones(4, 6), torch.ones(5, 6)


@pytest.mark.parametrize(
    ("args", "eps", "error", "message"),
    [
        (
            (ONES.double(), WEIGHT, WEIGHT),
            EPS,
            TypeError,
            r"x must be float32, float16 or bfloat16, got torch\.float64",
        ),
        ((ONES, WEIGHT, WEIGHT[:4]), EPS, ValueError, r"up_weight must be \(5, 6\), got \(4, 6\)"),
        ((ONES[:, :0], WEIGHT[:, :0], WEIGHT[:, :0]), EPS, ValueError, r"width above zero, got \(4, 0\)"),
        ((ONES, WEIGHT, WEIGHT), -1e-6, ValueError, "eps must not be negative, got -1e-06"),
        ((ONES, WEIGHT, WEIGHT), float("nan"), ValueError, "eps must not be negative, got nan"),
    ],
)
def test_rejects(args: tuple[Tensor, Tensor, Tensor], eps: float, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^rms_gated_linear: .*{message}"):
        rms_gated_linear(*args, eps=eps, activation="relu")


def test_it_takes_its_own_tiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tiles, "listed_tile", lambda name, *_: asked.append(name))
    args, _ = operands(3, 8, 5, torch.float32, device)
    rms_gated_linear(*args, eps=EPS, activation="relu")
    assert asked == [wrapper.OP]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_is_folded_with_one_rounding(dtype: torch.dtype) -> None:
    (_, weight, *_), norm_weight = operands(1, 57, 19, dtype, torch.device("cpu"))
    assert torch.equal(fold_norm(weight, norm_weight), (weight.double() * norm_weight.double()).to(dtype))
    assert torch.equal(fold_norm(weight, torch.ones(57, dtype=dtype)), weight)


def test_a_weight_is_folded_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.float64 and result.ndim == 2:
                held.append(result.shape[0])
            return result

    held: list[int] = []
    (_, weight, *_), norm_weight = operands(1, 57, 19, torch.bfloat16, torch.device("cpu"))
    expected = (weight.double() * norm_weight.double()).bfloat16()
    monkeypatch.setattr(wrapper, "FOLDED_ROWS", 8)
    with Watch():  # type: ignore[no-untyped-call]
        folded = fold_norm(weight, norm_weight)
    assert torch.equal(folded, expected)
    assert max(held) == 8


@pytest.mark.parametrize(("weight", "scale"), [(0.02, 2.0**-14), (400.0, 2.0**9)], ids=["too small", "too large"])
def test_products_that_float16_cannot_hold_are_refused(weight: float, scale: float) -> None:
    weights = torch.full((3, 8), weight, dtype=torch.float16)
    weights[0] = 0  # and nothing is lost of a row of nothing
    norm_weight = torch.full((8,), scale, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"fold_norm: 2 of 3 rows .* beyond what torch\.float16 holds precisely"):
        fold_norm(weights, norm_weight)
    fold_norm(weights.bfloat16(), norm_weight.bfloat16())


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight \(out, in\) and norm_weight \(in,\), got \(5, 6\) and \(5,\)"):
        fold_norm(WEIGHT, torch.ones(5))
