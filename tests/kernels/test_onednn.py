import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import onednn
from kernels.numerics import disagreement
from kernels.onednn import PackedLinear, unavailable
from kernels.onednn import plain_rows as measured_plain_rows

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


@pytest.fixture(autouse=True, params=["plain", "packed"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test both ways, whatever the sizes."""
    rows = 10**9 if request.param == "plain" else 0
    monkeypatch.setattr(onednn, "plain_rows", lambda *_: rows)


RESULTS = Path(__file__).parents[2] / "docs" / "results" / "onednn.json"
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if unavailable(dtype) is None]
SHAPES = [(1, 19, 57), (2, 64, 1), (5, 1, 33), (33, 57, 19), (129, 96, 160)]  # rows, in, out
EAGER: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda z: z,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(rows: int, width: int, out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make x, weight, bias and other."""
    weight = (normal(out, width, seed=1) / width**0.5).to(dtype)
    return (
        normal(rows, width, dtype=dtype),
        weight,
        normal(out, dtype=dtype, seed=2),
        normal(rows, out, dtype=dtype, seed=3),
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the linear layer in the operands' dtype and in float64."""
    return F.linear(x, weight, bias), F.linear(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    unavailable.cache_clear()
    yield
    unavailable.cache_clear()


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("activation", EAGER)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_is_as_exact_as_eager(
    dtype: torch.dtype, shape: tuple[int, int, int], activation: str | None, has_bias: bool
) -> None:
    x, weight, bias, _ = operands(*shape, dtype)
    eager, exact = linear(x, weight, bias if has_bias else None)
    fused = PackedLinear(weight, bias if has_bias else None)(x, activation)
    assert disagreement(fused, EAGER[activation](eager), EAGER[activation](exact)) is None


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_product_and_sum_are_as_exact_as_eager(dtype: torch.dtype, shape: tuple[int, int, int], has_bias: bool) -> None:
    x, weight, bias, other = operands(*shape, dtype)
    eager, exact = linear(x, weight, bias if has_bias else None)
    packed = PackedLinear(weight, bias if has_bias else None)
    assert disagreement(packed.mul(x, other), eager * other, exact * other.double()) is None
    assert disagreement(packed.add(x, other), eager + other, exact + other.double()) is None


@pytest.mark.parametrize(("fused", "meant"), [("gelu", "gelu_tanh"), ("gelu_tanh", "gelu")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_erf_and_tanh_gelu_are_told_apart(dtype: torch.dtype, fused: str, meant: str) -> None:
    # Near -3 the two are 10% apart, so even bfloat16 shows which one ran.
    x, weight, bias, _ = operands(64, 48, 32, dtype)
    weight, bias = weight / 16, torch.full_like(bias, -3)
    eager, exact = linear(x, weight, bias)
    packed = PackedLinear(weight, bias)
    assert disagreement(packed(x, meant), EAGER[meant](eager), EAGER[meant](exact)) is None
    assert disagreement(packed(x, fused), EAGER[meant](eager), EAGER[meant](exact)) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_are_never_written_to(dtype: torch.dtype) -> None:
    x, weight, bias, other = operands(7, 32, 32, dtype)
    before = [tensor.clone() for tensor in (x, weight, bias, other)]
    packed = PackedLinear(weight, bias)
    for result in (packed(x), packed(x, "relu"), packed.mul(x, other), packed.add(x, other), packed.add(x, x)):
        result.fill_(torch.nan)
    assert all(torch.equal(now, then) for now, then in zip((x, weight, bias, other), before, strict=True))
    assert torch.equal(packed.add(x, x), PackedLinear(weight, bias).add(x, x.clone()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_may_be_strided(dtype: torch.dtype) -> None:
    x, weight, bias, other = operands(6, 19, 57, dtype)
    packed = PackedLinear(weight, bias)
    wide = F.pad(x, (7, 9), value=torch.nan)[:, 7:26]
    for view in (x.t().contiguous().t(), wide, x.repeat_interleave(2, 0)[::2]):
        assert not view.is_contiguous()
        assert (
            disagreement(packed(view, "gelu"), F.gelu(linear(x, weight, bias)[0]), F.gelu(linear(x, weight, bias)[1]))
            is None
        )
    eager, exact = linear(x, weight, bias)
    wide = F.pad(other, (3, 60), value=torch.nan)[:, 3:60]
    for view in (other.t().contiguous().t(), wide, other[:1].expand(6, -1)):
        assert not view.is_contiguous()
        assert disagreement(packed.mul(x, view), eager * view, exact * view.double()) is None
        assert disagreement(packed.add(x, view), eager + view, exact + view.double()) is None


def test_weight_and_bias_may_be_strided() -> None:
    x, weight, bias, _ = operands(4, 19, 57, torch.float32)
    packed = PackedLinear(weight.t().contiguous().t(), bias.repeat_interleave(2)[::2])
    assert disagreement(packed(x), *linear(x, weight, bias)) is None


@pytest.mark.parametrize("leading", [(), (0,), (0, 3), (2, 3), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_leading_dimensions_are_kept(dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    _, weight, bias, _ = operands(1, 19, 57, dtype)
    x, other = normal(*leading, 19, dtype=dtype), normal(*leading, 57, dtype=dtype)
    packed = PackedLinear(weight, bias)
    eager, exact = linear(x, weight, bias)
    assert disagreement(packed(x, "silu"), F.silu(eager), F.silu(exact)) is None
    assert disagreement(packed.mul(x, other), eager * other, exact * other.double()) is None
    assert disagreement(packed.add(x, other), eager + other, exact + other.double()) is None


@pytest.mark.parametrize("activation", EAGER)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_pass_through_as_in_eager(dtype: torch.dtype, activation: str | None) -> None:
    x, weight, bias, other = operands(5, 32, 48, dtype)
    x[1, 3], x[2, 4], x[4, 0] = torch.nan, torch.inf, -torch.inf
    other[0, 0], other[3, 1] = torch.nan, torch.inf
    packed, eager = PackedLinear(weight, bias), F.linear(x, weight, bias)
    for fused, expected in (
        (packed(x, activation), EAGER[activation](eager)),
        (packed.mul(x, other), eager * other),
        (packed.add(x, other), eager + other),
    ):
        torch.testing.assert_close(fused, expected, rtol=0.02, atol=0.02, equal_nan=True)


def test_the_weight_is_a_copy() -> None:
    x, weight, bias, _ = operands(3, 19, 57, torch.float32)
    packed = PackedLinear(weight, bias)
    before = packed(x)
    weight.zero_()
    bias.zero_()
    assert torch.equal(packed(x), before)


def test_attributes_describe_the_layer() -> None:
    packed = PackedLinear(normal(57, 19))
    assert (packed.in_features, packed.out_features, packed.dtype) == (19, 57, torch.float32)
    assert repr(packed) == "PackedLinear(in_features=19, out_features=57, bias=False, torch.float32)"


def test_a_gradient_is_refused_not_dropped() -> None:
    x, weight, bias, other = operands(3, 19, 57, torch.float32)
    packed = PackedLinear(weight.requires_grad_(), bias.requires_grad_())
    assert not packed(x).requires_grad
    with pytest.raises(RuntimeError, match="x asks for a gradient"):
        packed(x.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="residual asks for a gradient"):
        packed.add(x, other.requires_grad_())
    with torch.no_grad():
        packed.add(x, other)


@pytest.mark.parametrize(
    ("weight", "bias", "error", "message"),
    [
        (
            normal(4, 3, dtype=torch.float64),
            None,
            TypeError,
            r"must be float32, bfloat16 or float16, got torch\.float64",
        ),
        (normal(4), None, ValueError, r"weight must be \(out, in\), neither zero, got \(4,\)"),
        (normal(4, 0), None, ValueError, r"neither zero, got \(4, 0\)"),
        (normal(0, 3), None, ValueError, r"neither zero, got \(0, 3\)"),
        (normal(4, 3).to("meta"), None, ValueError, "weight must be on the CPU, got meta"),
        (normal(4, 3), normal(3), ValueError, r"bias must be \(4,\), got \(3,\)"),
        (normal(4, 3), normal(4, dtype=torch.float64), TypeError, r"bias must be torch\.float32 as the weight is"),
    ],
)
def test_making_rejects(weight: Tensor, bias: Tensor | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PackedLinear(weight, bias)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda packed: packed(normal(2, 4)), ValueError, r"x must be \(\.\.\., 3\), got \(2, 4\)"),
        (lambda packed: packed(torch.tensor(1.0)), ValueError, r"x must be \(\.\.\., 3\), got \(\)"),
        (lambda packed: packed(normal(2, 3).bfloat16()), TypeError, r"x must be torch\.float32 as the weight is"),
        (lambda packed: packed(normal(2, 3).to("meta")), ValueError, "x must be on the CPU, got meta"),
        (lambda packed: packed(normal(2, 3), "tanh"), ValueError, "one of gelu, gelu_tanh, silu, relu, got 'tanh'"),
        (lambda packed: packed.mul(normal(2, 3), normal(2, 3)), ValueError, r"other must be \(2, 4\), got \(2, 3\)"),
        (lambda packed: packed.add(normal(2, 3), normal(4)), ValueError, r"residual must be \(2, 4\), got \(4,\)"),
        (lambda packed: packed.add(normal(2, 3), normal(2, 4).half()), TypeError, r"must be torch\.float32"),
    ],
)
def test_calling_rejects(call: Callable[[PackedLinear], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(PackedLinear(normal(4, 3)))


def test_a_cpu_that_cannot_multiply_float16_is_told(monkeypatch: pytest.MonkeyPatch, fresh_probe: None) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("fp16 path needs avx512_fp16\nmore")

    monkeypatch.setattr(onednn, "fused_linear", refuse)
    assert unavailable(torch.float16) is not None
    with pytest.raises(
        RuntimeError, match=r"PackedLinear: oneDNN post-ops do not run in torch\.float16 on this CPU: .*fp16"
    ):
        PackedLinear(normal(4, 3).half())


@pytest.mark.parametrize("name", ["_reorder_linear_weight", "_linear_pointwise"])
def test_a_build_without_the_operators_is_unavailable(
    name: str, monkeypatch: pytest.MonkeyPatch, fresh_probe: None
) -> None:
    present = {"_reorder_linear_weight", "_linear_pointwise"} - {name}
    operators = type("Operators", (), {each: getattr(torch.ops.mkldnn, each) for each in present})
    monkeypatch.setattr(torch.ops, "mkldnn", operators)
    assert unavailable() == f"torch {torch.__version__} has no operator mkldnn::{name}"


def test_a_build_without_onednn_is_unavailable(monkeypatch: pytest.MonkeyPatch, fresh_probe: None) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "built without oneDNN" in str(unavailable())


@pytest.mark.parametrize(
    ("post_op", "named"),
    [(("gelu", "tanh"), "gelu tanh"), (("gelu", "none"), "gelu"), (("swish", ""), "swish")],
)
def test_a_wrong_activation_is_found_by_the_probe(
    post_op: tuple[str, str], named: str, monkeypatch: pytest.MonkeyPatch, fresh_probe: None
) -> None:
    linear = onednn.fused_linear
    swapped = {("gelu", "tanh"): ("gelu", "none"), ("gelu", "none"): ("gelu", "tanh"), ("swish", ""): ("none", "")}

    def wrong(x: Tensor, packed: Tensor, bias: Tensor | None, attribute: str, algorithm: str) -> Tensor:
        pair = (attribute, algorithm)
        return linear(x, packed, bias, *(swapped[pair] if pair == post_op else pair))

    monkeypatch.setattr(onednn, "fused_linear", wrong)
    assert f"the oneDNN post-op {named} of torch" in str(unavailable())


def test_an_overwritten_operand_is_found_by_the_probe(monkeypatch: pytest.MonkeyPatch, fresh_probe: None) -> None:
    binary = onednn.fused_linear_binary

    def in_place(x: Tensor, other: Tensor, packed: Tensor, bias: Tensor | None, attribute: str) -> Tensor:
        result = binary(x, other, packed, bias, attribute)
        if attribute == "add":
            other.copy_(result)
        return result

    monkeypatch.setattr(onednn, "fused_linear_binary", in_place)
    assert "overwrites its operand" in str(unavailable())


def test_other_dtypes_are_unavailable() -> None:
    assert unavailable(torch.float64) == "oneDNN post-ops take float32, bfloat16 or float16, not torch.float64"


@pytest.mark.parametrize(
    ("dtype", "weight", "rows", "activated_rows"),
    [
        (torch.float32, (64, 64), 244, 61),
        (torch.float32, (64, 192), 81, 20),
        (torch.float32, (128, 512), 15, 3),
        (torch.float32, (256, 768), 1, 1),
        (torch.float32, (256, 1024), 0, 0),
        (torch.float32, (768, 3072), 0, 0),
        (torch.bfloat16, (64, 64), 1, 1),
        (torch.bfloat16, (768, 3072), 0, 0),
    ],
    ids=str,
)
def test_only_products_too_small_to_repay_onednns_call_are_plain(
    dtype: torch.dtype, weight: tuple[int, int], rows: int, activated_rows: int
) -> None:
    assert measured_plain_rows(dtype, *weight, has_activation=False) == rows
    assert measured_plain_rows(dtype, *weight, has_activation=True) == activated_rows


def test_the_measured_choice_loses_little_to_the_other_one_anywhere() -> None:
    medians: dict[tuple[str, str, tuple[int, int, int]], dict[str, float]] = defaultdict(dict)
    for each in json.loads(RESULTS.read_text())["rows"]:
        if each["op"] != "rms_norm" and not each["cold"]:
            medians[each["dtype"], each["op"], tuple(each["shape"])][each["way"]] = each["median_us"]
    assert len(medians) > 100
    for (dtype, op, (rows, width_in, width_out)), ways in medians.items():
        is_plain = rows <= measured_plain_rows(getattr(torch, dtype), width_in, width_out, "gelu" in op)
        plain, packed = ways["plain"], ways[f"packed for {onednn.PACKING_ROWS}"]
        assert (plain if is_plain else packed) <= 1.06 * min(plain, packed), (dtype, op, rows, width_in, width_out)
