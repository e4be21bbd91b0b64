"""Measures candidate tiles of the matrix kernels on the GPU at hand and writes the fastest into its table.

For rms_gated_linear it also measures what that replaces: rms_norm, and gated_linear with the tile that the table lists.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels import gated_linear, linear
from kernels.dtypes import DTYPES
from kernels.norm import rms_norm
from kernels.numerics import disagreement
from kernels.operands import multiprocessor_count
from kernels.output import four_digits
from kernels.progress import Progress
from kernels.rms_gated_linear import rms_gated_linear_torch
from kernels.tiles import FEEDS, SIZES, Tile, default_tile, is_measured, split_k
from kernels.timing import Timing, interleaved

ACTIVATION, EPS = "gelu_tanh", 1e-6
SEPARATE = "rms_norm, gated_linear"


class Problem(NamedTuple):
    """One shape to find a tile for; the entry is for `least_rows` to `most_rows`, measured at `rows`."""

    op: str
    dtype: str
    in_features: int
    out_features: int
    rows: int
    least_rows: int
    most_rows: int | None


def problems(
    ops: Sequence[str], dtypes: Sequence[str], widths: Sequence[tuple[int, int]], rows: Sequence[int]
) -> list[Problem]:
    """List every op, dtype and (in, out) at every row count, which stands for those from the last one up.

    The largest row count stands for all above it too, so that no row count is left without an entry.
    """
    counts = sorted(set(rows))
    least = [1, *(count + 1 for count in counts[:-1])]
    most = [*counts[:-1], None]
    return [
        Problem(op, dtype, *width, count, low, high)
        for op, dtype, width in itertools.product(ops, dtypes, widths)
        for count, low, high in zip(counts, least, most, strict=True)
    ]


def candidates(problem: Problem, arch: str, multiprocessors: int) -> Iterator[Tile]:  # noqa: ARG001
    """List tiles worth measuring: no taller than the rows need, and with too few accumulators to spill."""
    tallest = max(16, min(128, triton.next_power_of_2(problem.rows)))
    accumulators = 1 if problem.op == "linear" else 2
    heights = [height for height in (16, 32, 64, 128) if tallest // 2 <= height <= tallest]
    feeds = FEEDS if arch in ("sm_90", "sm_100") else FEEDS[:1]
    for sizes in itertools.product(heights, (32, 64, 128, 256), (32, 64, 128), (4, 8), (3, 4), feeds):
        tile = Tile(*sizes)
        a_thread = accumulators * tile.block_m * tile.block_n // (32 * tile.num_warps)
        is_large_enough = tile.feed == "pointers" or tile.block_m >= 64
        if a_thread <= 128 and tile.block_n * accumulators <= 256 and is_large_enough:
            yield tile


def few_candidates(problem: Problem, arch: str, multiprocessors: int) -> Iterator[Tile]:
    """List the computed default for so many multiprocessors, and the `candidates` that differ from it in one field.

    These are about a tenth of the candidates.
    """
    dtype = DTYPES[problem.dtype]
    default = default_tile(problem.op, dtype, problem.rows, problem.out_features, multiprocessors)
    yield default
    for tile in candidates(problem, arch, multiprocessors):
        if sum(mine != its for mine, its in zip(tile, default, strict=True)) == 1:
            yield tile


def tune(
    wanted: Sequence[Problem],
    arch: str,
    device: torch.device,
    repetitions: int = 10,
    tiles_for: Callable[[Problem, str, int], Iterator[Tile]] = candidates,
    deadline: float = math.inf,
) -> list[dict[str, Any]]:
    """Measure every candidate of every problem and return the fastest as table entries.

    A candidate that does not compile, does not fit the chip or gives wrong results is left out. To compare a folded
    norm with a separate one, the table must hold measured tiles of gated_linear by then. No problem is begun after
    `deadline`, by the clock of `time.monotonic`; the entries are then of the first problems only.

    Raises:
        RuntimeError: no candidate of a problem is left, or a folded norm has nothing measured to be compared with.
    """
    if time.monotonic() > deadline:
        return []
    for problem in wanted:
        _refuse_what_has_no_rival(problem, arch)
    entries = []
    with Progress("tune", len(wanted)) as progress, torch.no_grad():
        for problem in wanted:
            if time.monotonic() > deadline:
                break
            operands, eager, exact = _operands(problem, device)
            calls: dict[str, Callable[[], object]] = {}
            tiles: dict[str, Tile] = {}
            for tile in tiles_for(problem, arch, multiprocessor_count(operands[0])):
                try:
                    result = _run(problem, operands, tile)
                except Exception:  # noqa: S112  # the compiler throws many kinds, and each means the same here
                    continue
                if disagreement(result, eager, exact) is None:
                    calls[str(tile)], tiles[str(tile)] = partial(_run, problem, operands, tile), tile
            if not calls:
                raise RuntimeError(f"tune: no candidate works for {problem}")
            if problem.op == "rms_gated_linear":
                weight = torch.ones(problem.in_features, dtype=operands[0].dtype, device=device)
                calls[SEPARATE] = partial(_run_separate, operands, weight)
            timings = interleaved(calls, device, repetitions)
            best = min(tiles, key=lambda name: timings[name].median_s)
            entries.append(_entry(problem, tiles[best], timings[best], timings.get(SEPARATE), device))
            progress.step(f"{problem.op} {problem.dtype} {problem.rows}x{problem.in_features}x{problem.out_features}")
    return entries


def _refuse_what_has_no_rival(problem: Problem, arch: str) -> None:
    if problem.op != "rms_gated_linear":
        return
    shape = problem.rows, problem.in_features, problem.out_features
    if not is_measured("gated_linear", arch, DTYPES[problem.dtype], *shape):
        raise RuntimeError(
            f"tune: expected a measured tile of gated_linear to compare rms_gated_linear with, got none for "
            f"{problem.dtype}, {'x'.join(map(str, shape))}, on {arch}: tune it first, or with it, --ops "
            "gated_linear,rms_gated_linear"
        )


def _operands(problem: Problem, device: torch.device) -> tuple[list[Tensor], Tensor, Tensor]:
    """Make the operands, and eager's and the exact result."""
    generator = torch.Generator().manual_seed(0)
    weights = 1 if problem.op == "linear" else 2
    shapes = [(problem.rows, problem.in_features), *[(problem.out_features, problem.in_features)] * weights]
    scales = [1.0, *[problem.in_features**-0.5] * weights]
    operands = [
        (torch.randn(shape, generator=generator) * scale).to(device, DTYPES[problem.dtype])
        for shape, scale in zip(shapes, scales, strict=True)
    ]
    reference: Callable[..., Tensor] = linear.linear_torch
    if problem.op == "gated_linear":
        reference = partial(gated_linear.gated_linear_torch, activation=ACTIVATION)
    elif problem.op == "rms_gated_linear":
        reference = partial(rms_gated_linear_torch, activation=ACTIVATION, eps=EPS)
    exact: Tensor = reference(*(each.double() for each in operands))
    return operands, reference(*operands), exact


def _run(problem: Problem, operands: Sequence[Tensor], tile: Tile) -> Tensor:
    x = operands[0]
    out = x.new_empty((problem.rows, problem.out_features))
    if problem.op != "linear":
        eps = EPS if problem.op == "rms_gated_linear" else None
        gated_linear.launch(problem.op, out, x, operands[1], operands[2], None, None, ACTIVATION, tile, eps)
    else:
        shape = problem.rows, problem.in_features, problem.out_features
        split = split_k(tile, *shape, multiprocessor_count(x))
        linear.launch(out, x, operands[1], None, None, None, tile, split)
    return out


def _run_separate(operands: Sequence[Tensor], norm_weight: Tensor) -> Tensor:
    x, gate_weight, up_weight = operands
    return gated_linear.gated_linear(rms_norm(x, norm_weight, eps=EPS), gate_weight, up_weight, activation=ACTIVATION)


def _entry(
    problem: Problem, tile: Tile, timing: Timing, separate: Timing | None, device: torch.device
) -> dict[str, Any]:
    """Make a table's entry; a norm is folded if that is faster by more than the spread of the repetitions.

    After a tie it is not, since folding holds gate and up a second time.
    """
    sizes = {name: getattr(tile, name) for name in (*SIZES, "feed")}
    values = {name: value for name, value in problem._asdict().items() if name != "rows"}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    folding, compared = {}, {}
    if separate is not None:
        folding = {"is_folded": timing.high_s < separate.low_s}
        compared = {
            "separate_microseconds": _microseconds(separate.median_s),
            "separate_spread_microseconds": [_microseconds(separate.low_s), _microseconds(separate.high_s)],
        }
    return values | {
        "tile": sizes,
        "source": "measured",
        **folding,
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "microseconds": _microseconds(timing.median_s),
        "spread_microseconds": [_microseconds(timing.low_s), _microseconds(timing.high_s)],
        **compared,
        "rows_measured": problem.rows,
    }


def _microseconds(seconds: float) -> float:
    return four_digits(seconds * 1e6)


def merged(new: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put `new` entries before those of `old`, without what they replace: the same op, dtype and widths.

    Where `new` ends before the last row count, nothing is replaced: the first entry that fits wins anyway.
    """

    def key(entry: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(entry[name] for name in ("op", "dtype", "in_features", "out_features"))

    replaced = {key(entry) for entry in new if entry["most_rows"] is None}
    return [*new, *(entry for entry in old if key(entry) not in replaced)]


def write_entries(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Write entries, one per line, into the table at `path`, which need not exist."""
    old = json.loads(path.read_text()) if path.exists() else []
    path.write_text("[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in merged(entries, old)) + "\n]\n")
