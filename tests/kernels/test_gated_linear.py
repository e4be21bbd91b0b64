from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import gated_linear as op
from kernels import tiles
from kernels.activation import ACTIVATIONS
from kernels.gated_linear import gated_linear, gated_linear_torch
from kernels.numerics import disagreement
from kernels.tiles import Tile

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 19, 57), (5, 1, 1), (17, 200, 33), (3, 64, 32)]  # rows, in, out
SMALL = Tile(16, 16, 16, 4, 3)
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
Mutant = Callable[[ModuleType, str, str], ModuleType]


def operands(
    rows: int, width: int, out: int, dtype: torch.dtype, device: torch.device, biases: tuple[bool, bool] = (True, True)
) -> Operands:
    """Make x, gate_weight, up_weight, gate_bias and up_bias, so that products are about one."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, gate_weight, up_weight = normal(rows, width), normal(out, width) / width**0.5, normal(out, width) / width**0.5
    gate_bias, up_bias = (normal(out).to(device, dtype) if has_bias else None for has_bias in biases)
    return x.to(device, dtype), gate_weight.to(device, dtype), up_weight.to(device, dtype), gate_bias, up_bias


def check(result: Tensor, args: Operands, activation: str) -> str | None:
    x, gate_weight, up_weight, *biases = args
    exact_biases = [None if bias is None else bias.double() for bias in biases]
    exact = gated_linear_torch(
        x.double(), gate_weight.double(), up_weight.double(), *exact_biases, activation=activation
    )
    return disagreement(result, gated_linear_torch(*args, activation=activation), exact)


def launch(module: ModuleType, args: Operands, activation: str, tile: Tile = SMALL) -> Tensor:
    out = torch.full((args[0].shape[0], args[1].shape[0]), torch.nan, dtype=args[0].dtype, device=args[0].device)
    module.launch(op.OP, out, *args, activation, tile)
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_as_exact_as_eager(
    dtype: torch.dtype, shape: tuple[int, int, int], activation: str, device: torch.device
) -> None:
    args = operands(*shape, dtype, device)
    result = gated_linear(*args, activation=activation)
    assert result.is_contiguous()
    assert check(result, args, activation) is None


@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True)], ids=["none", "gate", "up"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_either_bias_may_be_left_out(dtype: torch.dtype, biases: tuple[bool, bool], device: torch.device) -> None:
    args = operands(5, 57, 19, dtype, device, biases)
    assert check(gated_linear(*args, activation="gelu_tanh"), args, "gelu_tanh") is None


@pytest.mark.parametrize("tile", [SMALL, Tile(16, 32, 64, 4, 3), Tile(32, 16, 16, 4, 3)], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (16, 64, 32), (33, 57, 19), (70, 16, 150)], ids=str)
def test_every_tile_covers_shapes_it_divides_and_shapes_it_does_not(
    shape: tuple[int, int, int], tile: Tile, device: torch.device
) -> None:
    args = operands(*shape, torch.float32, device)
    assert check(launch(op, args, "silu", tile), args, "silu") is None


def launch_within_nan(module: ModuleType, args: Operands) -> tuple[Tensor, Tensor]:
    """Launch on operands and a result that lie in wider tensors of NaN; give the result and that wider tensor."""

    def within_nan(tensor: Tensor) -> Tensor:
        band = torch.full([size + 64 for size in tensor.shape], torch.nan, dtype=tensor.dtype, device=tensor.device)
        return band[tuple(slice(24, 24 + size) for size in tensor.shape)].copy_(tensor)

    x, gate_weight, up_weight, gate_bias, up_bias = (None if each is None else within_nan(each) for each in args)
    assert x is not None
    assert gate_weight is not None
    shape = x.shape[0], gate_weight.shape[0]
    band = torch.full([size + 64 for size in shape], torch.nan, dtype=x.dtype, device=x.device)
    out = band[24 : 24 + shape[0], 24 : 24 + shape[1]]
    module.launch(op.OP, out, x, gate_weight, up_weight, gate_bias, up_bias, "silu", SMALL)
    return out, band


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_and_writes_only_its_operands(dtype: torch.dtype, device: torch.device) -> None:
    args = operands(19, 57, 21, dtype, device)
    out, band = launch_within_nan(op, args)
    assert check(out, args, "silu") is None
    out.fill_(torch.nan)
    assert band.isnan().all()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("is_row[:, None] & is_deep[None, :]", "is_row[:, None]"),
        ("is_deep[:, None] & is_column[None, :]", "is_column[None, :]"),
    ],
)
def test_a_dropped_mask_is_seen(old: str, new: str, mutant: Mutant, device: torch.device) -> None:
    args = operands(19, 57, 21, torch.float32, device)
    out, _ = launch_within_nan(mutant(op, old, new), args)
    assert check(out, args, "silu") is not None


@pytest.mark.parametrize("mask", ["(rows < M)[:, None]", "(columns < N)[None, :]"])
def test_a_dropped_mask_of_the_result_is_seen(mask: str, mutant: Mutant, device: torch.device) -> None:
    args = operands(19, 57, 21, torch.float32, device)
    changed = mutant(tiles, "(rows < M)[:, None] & (columns < N)[None, :]", mask)
    changed = mutant(op, "from kernels.tiles import", f"from {changed.__name__} import")
    out, band = launch_within_nan(changed, args)
    assert check(out, args, "silu") is None
    out.fill_(torch.nan)
    assert not band.isnan().all()


@pytest.mark.parametrize("leading", [(), (0,), (2, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_leading_dimensions_are_kept(dtype: torch.dtype, leading: tuple[int, ...], device: torch.device) -> None:
    _, gate_weight, up_weight, gate_bias, up_bias = operands(1, 19, 57, dtype, device)
    x = torch.randn(*leading, 19, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    args = x, gate_weight, up_weight, gate_bias, up_bias
    assert check(gated_linear(*args, activation="relu"), args, "relu") is None


def test_offsets_pass_int32(far_apart: Callable[[Tensor], Tensor], device: torch.device) -> None:
    args = operands(3, 19, 3, torch.float16, device)
    out = far_apart(torch.full((3, 3), torch.nan))
    op.launch(op.OP, out, far_apart(args[0]), far_apart(args[1]), far_apart(args[2]), args[3], args[4], "silu", SMALL)
    assert check(out, args, "silu") is None


def test_weights_may_be_halves_of_one_tensor_and_rows_strided(device: torch.device) -> None:
    x, gate_weight, up_weight, gate_bias, up_bias = operands(8, 57, 19, torch.float32, device)
    both = torch.cat([gate_weight, up_weight])
    for gate, up in (both.chunk(2), (both[::2], both[1::2])):
        args = (x[::3], gate, up, gate_bias, up_bias)
        assert check(gated_linear(*args, activation="silu"), args, "silu") is None


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_infinity_pass_through_as_in_eager(activation: str, device: torch.device) -> None:
    args = operands(5, 32, 48, torch.float32, device)
    x = args[0]
    x[1, 3], x[2, 4], x[4, 0] = torch.nan, torch.inf, -torch.inf
    eager, result = gated_linear_torch(*args, activation=activation), gated_linear(*args, activation=activation)
    if activation == "gelu":  # eager's vectorized erf makes gelu(inf) NaN, where infinity is right
        gate = torch.nn.functional.linear(x, args[1], args[3])
        up = torch.nn.functional.linear(x, args[2], args[4])
        eager = torch.where(gate == torch.inf, gate * up, eager)
    torch.testing.assert_close(result, eager, equal_nan=True)


@pytest.mark.parametrize(("meant", "wrong"), [("gelu", "gelu_tanh"), ("gelu_tanh", "gelu")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_erf_and_tanh_gelu_are_told_apart(dtype: torch.dtype, meant: str, wrong: str, device: torch.device) -> None:
    x, gate_weight, up_weight, gate_bias, up_bias = operands(32, 48, 32, dtype, device)
    assert gate_bias is not None
    args = x, gate_weight / 16, up_weight, torch.full_like(gate_bias, -3), up_bias  # at -3 they are 10% apart
    assert check(launch(op, args, meant), args, meant) is None
    assert check(launch(op, args, wrong), args, meant) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return activate(gate, ACTIVATION) * up", "return activate(up, ACTIVATION) * gate"),
        ("return activate(gate, ACTIVATION) * up", "return activate(gate, ACTIVATION)"),
        ("\n    for step in range(tl.cdiv(K, BLOCK_K))", "\n    for step in range(K // BLOCK_K)"),
        ("\n    for step in range(tl.cdiv(K, BLOCK_K))", "\n    for step in range(1, tl.cdiv(K, BLOCK_K))"),
        ("tl.load(up_ptrs, mask=weight_mask, other=0.0)", "tl.load(gate_ptrs, mask=weight_mask, other=0.0)"),
        ("\n    if gate_bias_ptr is not None:", "\n    if False:"),
        ("\n    if up_bias_ptr is not None:", "\n    if False:"),
        ("columns[None, :] * up_weight_stride_n", "columns[None, :] * x_stride_m"),
        ("\n    rows = tile_m.to(tl.int64) * BLOCK_M", "\n    rows = tile_m.to(tl.int64) * 0"),
    ],
)
def test_mutations_fail_the_rule(old: str, new: str, mutant: Mutant, device: torch.device) -> None:
    x, gate_weight, up_weight, gate_bias, up_bias = operands(
        37, 57, 40, torch.bfloat16, device
    )  # where the rule is loosest
    args = x, gate_weight, torch.cat([up_weight, up_weight], dim=1)[:, :57], gate_bias, up_bias
    assert check(launch(op, args, "gelu"), args, "gelu") is None
    changed = launch(mutant(op, old, new), args, "gelu")
    assert check(changed, args, "gelu") is not None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("program % in_group // height", "program % in_group // (height + 1)"),
        ("first + program % in_group % height", "first"),
        ("program // in_group * GROUP", "program // in_group"),
    ],
)
def test_a_wrong_order_of_tiles_fails_the_rule(old: str, new: str, mutant: Mutant, device: torch.device) -> None:
    args = operands(150, 16, 40, torch.float32, device)  # ten rows of tiles: one group of eight and one of two
    changed = mutant(op, "from kernels.tiles import", f"from {mutant(tiles, old, new).__name__} import")
    assert check(launch(op, args, "relu"), args, "relu") is None
    assert check(launch(changed, args, "relu"), args, "relu") is not None


def test_is_a_well_formed_op(device: torch.device) -> None:
    for biases in ((True, True), (False, False)):
        args = operands(3, 8, 5, torch.float32, device, biases)
        torch.library.opcheck(torch.ops.mlp.gated_linear.default, (*args, "gelu_tanh"))


def test_meta_tensors_give_shapes_alone() -> None:
    x, weight = torch.empty(2, 3, 8, device="meta"), torch.empty(5, 8, device="meta")
    result = gated_linear(x, weight, weight, activation="relu")
    assert (result.shape, result.device.type) == ((2, 3, 5), "meta")


ONES, WEIGHT, BIAS = torch.ones(4, 6), torch.ones(5, 6), torch.ones(5)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((ONES.double(), WEIGHT, WEIGHT), TypeError, r"x must be float32, float16 or bfloat16, got torch\.float64"),
        ((ONES, WEIGHT.half(), WEIGHT), TypeError, r"gate_weight must be torch\.float32 as x is, got torch\.float16"),
        (
            (ONES, WEIGHT, WEIGHT.bfloat16()),
            TypeError,
            r"up_weight must be torch\.float32 as x is, got torch\.bfloat16",
        ),
        ((ONES, WEIGHT, WEIGHT, BIAS.half()), TypeError, r"gate_bias must be torch\.float32 as x is"),
        ((ONES[:, :0], WEIGHT[:, :0], WEIGHT[:, :0]), ValueError, r"width above zero, got \(4, 0\)"),
        (
            (ONES, WEIGHT[:0], WEIGHT[:0]),
            ValueError,
            r"gate_weight must be \(out, in\) with out above zero, got \(0, 6\)",
        ),
        ((ONES, BIAS, BIAS), ValueError, r"gate_weight must be \(out, in\) with out above zero, got \(5,\)"),
        ((ONES, WEIGHT[:, :5], WEIGHT), ValueError, r"gate_weight must be \(5, 6\), got \(5, 5\)"),
        ((ONES, WEIGHT, WEIGHT[:4]), ValueError, r"up_weight must be \(5, 6\), got \(4, 6\)"),
        ((ONES, WEIGHT, WEIGHT, None, BIAS[:4]), ValueError, r"up_bias must be \(5,\), got \(4,\)"),
        ((torch.ones(6, 4).t(), WEIGHT, WEIGHT), ValueError, "x's last dimension must be contiguous, got stride 4"),
        ((ONES, torch.ones(6, 5).t(), WEIGHT), ValueError, "gate_weight's last dimension must be contiguous"),
        ((ONES, WEIGHT, WEIGHT, torch.ones(10)[::2]), ValueError, "gate_bias's last dimension must be contiguous"),
        ((ONES, WEIGHT.to("meta"), WEIGHT), ValueError, "gate_weight must be on cpu as x is, got meta"),
    ],
)
def test_rejects(args: Operands, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^gated_linear: .*{message}"):
        gated_linear(*args, activation="relu")


def test_rejects_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"^gated_linear: activation must be one of .*, got 'swish'"):
        gated_linear(ONES, WEIGHT, WEIGHT, activation="swish")


TMA = Tile(16, 16, 16, 4, 3, "tma")


@pytest.mark.slow
@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_programs_fed_by_the_copy_engine_cover_every_tile(
    dtype: torch.dtype, multiprocessors: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "multiprocessor_count", lambda _: multiprocessors)
    for biases in ((True, True), (False, False)):
        args = operands(37, 56, 40, dtype, device, biases)
        assert check(launch(op, args, "silu", TMA), args, "silu") is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x_tiles.load([tile_m * BLOCK_M, step * BLOCK_K])", "x_tiles.load([tile_m * BLOCK_M, 0])"),
        ("up_tiles.load([tile_n * BLOCK_N", "gate_tiles.load([tile_n * BLOCK_N"),
        ("tiles, tl.num_programs(0))", "tiles, tl.num_programs(0) + 1)"),
        ("[N, K], [up_weight_stride_n, 1]", "[N - 8, K], [up_weight_stride_n, 1]"),
    ],
)
def test_mutations_of_the_copy_engines_kernel_fail_the_rule(
    old: str, new: str, mutant: Mutant, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = mutant(op, old, new)
    for module in (op, changed):
        monkeypatch.setattr(module, "multiprocessor_count", lambda _: 3)
    args = operands(37, 56, 40, torch.float16, device)
    assert check(launch(op, args, "gelu", TMA), args, "gelu") is None
    assert check(launch(changed, args, "gelu", TMA), args, "gelu") is not None


def test_widths_the_copy_engine_cannot_read_take_the_pointers(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Tile] = []

    def record(*args: Tensor | Tile) -> None:
        assert isinstance(args[-1], Tile)
        taken.append(args[-1])

    monkeypatch.setattr(tiles, "listed_tile", lambda *_: TMA)
    monkeypatch.setattr(op, "launch", record)
    for width in (56, 57):  # 112 bytes a row, and 114
        gated_linear(*operands(5, width, 8, torch.float16, device), activation="silu")
    _, gate_weight, up_weight, _, _ = operands(5, 56, 8, torch.float16, device)
    wider = torch.zeros(5, 64, dtype=torch.float16, device=device)
    gated_linear(wider[:, 1:57], gate_weight, up_weight, activation="silu")  # rows start off 16 bytes
    default = tiles.gated_linear_tile(torch.float16, 5)
    assert taken == [TMA, default, default]
