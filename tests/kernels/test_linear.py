from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import linear as op
from kernels import tiles
from kernels.activation import ACTIVATIONS
from kernels.linear import linear, linear_torch
from kernels.numerics import disagreement
from kernels.operands import with_descriptors
from kernels.tiles import Tile

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 19, 57), (5, 1, 1), (2, 1100, 33), (17, 200, 33), (3, 64, 32)]  # rows, in, out; the third splits K
SMALL = Tile(16, 16, 16, 4, 3)
Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
Mutant = Callable[[ModuleType, str, str], ModuleType]


def operands(
    rows: int, width: int, out: int, dtype: torch.dtype, device: torch.device, bias: bool = True, residual: bool = True
) -> Operands:
    """Make x, weight, bias and residual, so that products are about one."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, weight, b, r = normal(rows, width), normal(out, width) / width**0.5, normal(out), normal(rows, out)
    return (
        x.to(device, dtype),
        weight.to(device, dtype),
        b.to(device, dtype) if bias else None,
        r.to(device, dtype) if residual else None,
    )


def check(result: Tensor, args: Operands, activation: str | None) -> str | None:
    x, weight, bias, residual = args
    eager = linear_torch(x, weight, bias, activation=activation, residual=residual)
    exact = linear_torch(
        x.double(),
        weight.double(),
        None if bias is None else bias.double(),
        activation=activation,
        residual=None if residual is None else residual.double(),
    )
    return disagreement(result, eager, exact)


def launch(module: ModuleType, args: Operands, activation: str | None, split: int, tile: Tile = SMALL) -> Tensor:
    x, weight, bias, residual = args
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=x.dtype, device=x.device)
    module.launch(out, x, weight, bias, activation, residual, tile, split)
    return out


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_is_as_exact_as_eager(
    dtype: torch.dtype, shape: tuple[int, int, int], activation: str | None, device: torch.device
) -> None:
    args = operands(*shape, dtype, device, residual=False)
    result = linear(*args[:3], activation=activation)
    assert result.is_contiguous()
    assert check(result, args, activation) is None


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_is_as_exact_as_eager(
    dtype: torch.dtype, shape: tuple[int, int, int], activation: str | None, bias: bool, device: torch.device
) -> None:
    args = operands(*shape, dtype, device, bias=bias)
    assert check(linear(*args[:3], activation=activation, residual=args[3]), args, activation) is None


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("tile", [SMALL, Tile(32, 16, 16, 4, 3), Tile(16, 32, 64, 4, 3)], ids=str)
@pytest.mark.parametrize("shape", [(16, 128, 16), (33, 57, 19), (70, 16, 150)], ids=str)
def test_every_tile_and_split_covers_shapes_it_divides_and_shapes_it_does_not(
    shape: tuple[int, int, int], tile: Tile, split: int, device: torch.device
) -> None:
    args = operands(*shape, torch.float32, device)
    assert check(launch(op, args, "silu", split, tile), args, "silu") is None


def test_a_split_gives_the_same_bits_every_time(device: torch.device) -> None:
    args = operands(4, 1000, 40, torch.float32, device)
    first = launch(op, args, None, 8)
    assert all(torch.equal(first, launch(op, args, None, 8)) for _ in range(2))
    assert not torch.equal(first, launch(op, args, None, 1))


def launch_within_nan(module: ModuleType, args: Operands, split: int) -> tuple[Tensor, Tensor]:
    """Launch on operands and a result that lie in wider tensors of NaN; give the result and that wider tensor."""

    def within_nan(tensor: Tensor) -> Tensor:
        band = torch.full([size + 64 for size in tensor.shape], torch.nan, dtype=tensor.dtype, device=tensor.device)
        return band[tuple(slice(24, 24 + size) for size in tensor.shape)].copy_(tensor)

    x, weight, bias, residual = (None if each is None else within_nan(each) for each in args)
    assert residual is not None
    band = torch.full([size + 64 for size in residual.shape], torch.nan, dtype=residual.dtype, device=residual.device)
    out = band[24 : 24 + residual.shape[0], 24 : 24 + residual.shape[1]]
    module.launch(out, x, weight, bias, "silu", residual, SMALL, split)
    return out, band


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_and_writes_only_its_operands(dtype: torch.dtype, split: int, device: torch.device) -> None:
    args = operands(19, 57, 21, dtype, device)
    out, band = launch_within_nan(op, args, split)
    assert check(out, args, "silu") is None
    out.fill_(torch.nan)
    assert band.isnan().all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mask=is_row[:, None] & is_deep[None, :]", "mask=is_row[:, None]"),
        ("mask=is_deep[:, None] & is_column[None, :]", "mask=is_column[None, :]"),
    ],
)
def test_a_dropped_mask_is_seen(old: str, new: str, mutant: Mutant, device: torch.device) -> None:
    args = operands(19, 57, 21, torch.float32, device)
    out, _ = launch_within_nan(mutant(op, old, new), args, 1)
    assert check(out, args, "silu") is not None


@pytest.mark.parametrize("mask", ["(rows < M)[:, None]", "(columns < N)[None, :]"])
def test_a_dropped_mask_of_the_result_is_seen(mask: str, mutant: Mutant, device: torch.device) -> None:
    args = operands(19, 57, 21, torch.float32, device)
    changed = mutant(tiles, "(rows < M)[:, None] & (columns < N)[None, :]", mask)
    changed = mutant(op, "from kernels.tiles import", f"from {changed.__name__} import")
    out, band = launch_within_nan(changed, args, 1)
    assert check(out, args, "silu") is None
    out.fill_(torch.nan)
    assert not band.isnan().all()


@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_leading_dimensions_are_kept(dtype: torch.dtype, leading: tuple[int, ...], device: torch.device) -> None:
    _, weight, bias, _ = operands(1, 19, 57, dtype, device)
    x, residual = (torch.randn(*leading, n, generator=torch.Generator().manual_seed(n)) for n in (19, 57))
    args = x.to(device, dtype), weight, bias, residual.to(device, dtype)
    assert check(linear(*args[:3], activation="relu", residual=args[3]), args, "relu") is None


@pytest.mark.parametrize("split", [1, 2])
def test_offsets_pass_int32(split: int, far_apart: Callable[[Tensor], Tensor], device: torch.device) -> None:
    args = operands(3, 19, 3, torch.float16, device)
    x, weight, bias, residual = args
    assert residual is not None
    out = far_apart(torch.full((3, 3), torch.nan))
    op.launch(out, far_apart(x), far_apart(weight), bias, "silu", far_apart(residual), SMALL, split)
    assert check(out, args, "silu") is None


def test_operands_may_be_strided_and_are_not_written_to(device: torch.device) -> None:
    x, weight, bias, residual = operands(8, 57, 19, torch.float32, device)
    assert residual is not None
    args = x[::3], weight.repeat_interleave(2, 0)[::2], bias, residual[1::3].repeat(1, 2)[:, 19:]
    before = [each.clone() for each in args if each is not None]
    args = args[0], args[1], args[2], torch.cat([args[3], args[3]])[:3]
    assert check(linear(*args[:3], residual=args[3]), args, None) is None
    square = x @ torch.randn(57, 57, generator=torch.Generator().manual_seed(2)).to(device)
    kept = square.clone()
    linear(square, torch.eye(57, device=device), residual=square)
    assert torch.equal(square, kept)
    assert torch.equal(x[::3], before[0])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "silu", "relu"])
def test_nan_and_infinity_pass_through_as_in_eager(activation: str | None, device: torch.device) -> None:
    x, weight, bias, residual = operands(5, 32, 48, torch.float32, device)
    assert residual is not None
    x[1, 3], x[2, 4], x[4, 0], residual[0, 0], residual[3, 1] = torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf
    eager = linear_torch(x, weight, bias, activation=activation, residual=residual)
    result = linear(x, weight, bias, activation=activation, residual=residual)
    torch.testing.assert_close(result, eager, equal_nan=True)


@pytest.mark.parametrize(("meant", "wrong"), [("gelu", "gelu_tanh"), ("gelu_tanh", "gelu")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_erf_and_tanh_gelu_are_told_apart(dtype: torch.dtype, meant: str, wrong: str, device: torch.device) -> None:
    x, weight, bias, _ = operands(32, 48, 32, dtype, device)
    assert bias is not None
    args = x, weight / 16, torch.full_like(bias, -3), None  # at -3 they are 10% apart
    for split in (1, 2):
        assert check(launch(op, args, meant, split), args, meant) is None
        assert check(launch(op, args, wrong, split), args, meant) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "split"),
    [
        ("first = part * steps * BLOCK_K", "first = part * (steps - 1) * BLOCK_K", 2),
        ("for step in range(steps):", "for step in range(steps - 1):", 1),
        ("for step in range(steps):", "for step in range(steps - 1):", 2),
        ("for _ in tl.static_range(SPLIT):", "for _ in tl.static_range(SPLIT - 1):", 4),
        ("part_ptrs += part_stride", "part_ptrs += 0", 2),
        ("if bias_ptr is not None:", "if False:", 1),
        ("if residual_ptr is not None:", "if False:", 1),
        ("if residual_ptr is not None:", "if False:", 2),
        ("if ACTIVATION is not None:", "if False:", 1),
        ("rows[:, None] * residual_stride_m", "rows[:, None] * N", 1),
        ("\n    rows = tile_m.to(tl.int64) * BLOCK_M", "\n    rows = tile_m.to(tl.int64) * 0", 1),
        ("(program // column_blocks).to(tl.int64) * BLOCK_M", "(program // column_blocks).to(tl.int64) * 0", 2),
    ],
)
def test_mutations_fail_the_rule(old: str, new: str, split: int, mutant: Mutant, device: torch.device) -> None:
    x, weight, bias, residual = operands(37, 57, 40, torch.bfloat16, device)  # where the rule is loosest
    assert residual is not None
    args = x, weight, bias, torch.cat([residual, residual], dim=1)[:, 40:]
    assert check(launch(op, args, "silu", split), args, "silu") is None
    assert check(launch(mutant(op, old, new), args, "silu", split), args, "silu") is not None


def test_is_a_well_formed_op(device: torch.device) -> None:
    x, weight, bias, residual = operands(3, 8, 5, torch.float32, device)
    for rest in ((bias, "gelu_tanh", None), (None, None, residual)):
        torch.library.opcheck(torch.ops.mlp.linear.default, (x, weight, *rest))


def test_meta_tensors_give_shapes_alone() -> None:
    result = linear(torch.empty(2, 3, 8, device="meta"), torch.empty(5, 8, device="meta"))
    assert (result.shape, result.device.type) == ((2, 3, 5), "meta")


ONES, WEIGHT, BIAS = torch.ones(4, 6), torch.ones(5, 6), torch.ones(5)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((ONES.double(), WEIGHT), TypeError, r"x must be float32, float16 or bfloat16, got torch\.float64"),
        ((ONES, WEIGHT.half()), TypeError, r"weight must be torch\.float32 as x is, got torch\.float16"),
        ((ONES, WEIGHT, BIAS.half()), TypeError, r"bias must be torch\.float32 as x is"),
        ((ONES, WEIGHT, None, torch.ones(4, 5).half()), TypeError, r"residual must be torch\.float32 as x is"),
        ((ONES[:, :0], WEIGHT[:, :0]), ValueError, r"width above zero, got \(4, 0\)"),
        ((ONES, WEIGHT[:0]), ValueError, r"weight must be \(out, in\) with out above zero, got \(0, 6\)"),
        ((ONES, BIAS), ValueError, r"weight must be \(out, in\) with out above zero, got \(5,\)"),
        ((ONES, WEIGHT[:, :5]), ValueError, r"weight must be \(5, 6\), got \(5, 5\)"),
        ((ONES, WEIGHT, BIAS[:4]), ValueError, r"bias must be \(5,\), got \(4,\)"),
        ((ONES, WEIGHT, None, torch.ones(5)), ValueError, r"residual must be \(4, 5\), got \(5,\)"),
        ((torch.ones(6, 4).t(), WEIGHT), ValueError, "x's last dimension must be contiguous, got stride 4"),
        ((ONES, torch.ones(6, 5).t()), ValueError, "weight's last dimension must be contiguous"),
        ((ONES, WEIGHT, None, torch.ones(5, 4).t()), ValueError, "residual's last dimension must be contiguous"),
        ((ONES, WEIGHT.to("meta")), ValueError, "weight must be on cpu as x is, got meta"),
    ],
)
def test_rejects(args: tuple[Tensor, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^linear: .*{message}"):
        linear(*args[:3], residual=args[3] if len(args) == 4 else None)


def test_rejects_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"^linear: activation must be one of .*, got 'swish'"):
        linear(ONES, WEIGHT, activation="swish")


TMA = Tile(16, 16, 16, 4, 3, "tma")


@pytest.mark.slow
@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_programs_fed_by_the_copy_engine_cover_every_tile(
    dtype: torch.dtype, multiprocessors: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "multiprocessor_count", lambda _: multiprocessors)
    monkeypatch.setattr(tiles, "listed_tile", lambda *_: TMA)
    generator = torch.Generator().manual_seed(0)
    sizes = ((37, 56), (40, 56), (40,), (37, 40))
    x, weight, bias, residual = (torch.randn(each, generator=generator).to(device, dtype) for each in sizes)
    for end, added in ((None, residual), ("gelu", None), ("silu", residual)):
        exact = linear_torch(
            *(each.double() for each in (x, weight, bias)),
            activation=end,
            residual=None if added is None else added.double(),
        )
        eager = linear_torch(x, weight, bias, activation=end, residual=added)
        assert disagreement(linear(x, weight, bias, activation=end, residual=added), eager, exact) is None


def test_the_callers_allocator_of_descriptors_is_left_alone() -> None:
    from triton.runtime import _allocation

    before = _allocation._allocator.get()
    seen: list[object] = []
    with_descriptors(lambda *values: seen.extend((*values, _allocation._allocator.get())), torch.ones(1))(3)
    assert seen[0] == 3
    assert seen[1] is not before
    assert _allocation._allocator.get() is before
