"""Times the backends against each other, interleaved in one run, and against a roof measured in the same run.

Bytes are the least that a forward pass has to move: each weight once, the rows in and out. FLOPs are those of the
matrix products. A pass cannot take less time than the larger of bytes / copy bandwidth and FLOPs / rate of the fastest
product; that time over the measured one is the percentage of the roof. Weights that stay in a cache between passes can
take it past 100.

Source: Williams, Waterman and Patterson 2009, https://doi.org/10.1145/1498765.1498785 (the roofline).
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.output import four_digits
from kernels.roof import COPY_BYTES, Roof, Work, measured_roof
from models.engine import Engine
from models.errors import BackendError, BackendUnavailableError, InputError, first_line

REPETITIONS = 31

# Rows of the products of a model's own widths that the roof is measured with, if no more are asked for.
ROOF_ROWS = 256


@dataclass(frozen=True, slots=True)
class Measurement:
    """One backend at one row count; times are in microseconds, q1 and q3 are quartiles.

    Attributes:
        ratio: eager's time over this backend's in the same round, the median of all rounds; None without eager.
        gb_s, tflop_s: from the median time.
        compiled_ratio: as `ratio`, of compiled's time over this one's; None without compiled.
        percent_of_roof: see the module.
    """

    rows: int
    backend: str
    implementation: str
    median_us: float
    q1_us: float
    q3_us: float
    ratio: float | None
    ratio_q1: float | None
    ratio_q3: float | None
    gb_s: float
    tflop_s: float
    percent_of_roof: float
    compiled_ratio: float | None = None
    compiled_ratio_q1: float | None = None
    compiled_ratio_q3: float | None = None

    def to_dict(self) -> dict[str, object]:
        """Return what JSON holds, rounded to four significant digits."""
        return {key: four_digits(it) if isinstance(it, float) else it for key, it in asdict(self).items()}


def bench(
    engine: Engine,
    row_counts: Sequence[int],
    roof: Roof,
    repetitions: int = REPETITIONS,
    is_cold: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Measurement]:
    """Time every backend of `engine` at every row count, after warming it up.

    Args:
        engine: with the backends to compare; ready or cold, none unavailable.
        row_counts: how many rows, each positive.
        roof: from `measure_roof`, with the same threads.
        repetitions: rounds; in each, every backend runs once, starting with another one than the round before.
        is_cold: empty the caches before each timed pass; otherwise an untimed pass of the same backend goes before it.
        progress: told the rounds done, all rounds, and what is being timed.

    Returns:
        One measurement for each row count and backend, in the order given.

    Raises:
        InputError: a row count or `repetitions` is not positive.
        BackendUnavailableError: a backend cannot run here.
    """
    if not row_counts or min(row_counts) < 1 or repetitions < 1:
        raise InputError(
            f"rows, repetitions: expected positive integers, got rows {list(row_counts)}, repetitions {repetitions}"
        )
    require_available(engine)
    names = list(engine.backends)
    evict = torch.empty(COPY_BYTES[engine.device.type], dtype=torch.uint8, device=engine.device) if is_cold else None
    results, total = [], len(row_counts) * repetitions
    generator = torch.Generator().manual_seed(0)
    for step, rows in enumerate(row_counts):
        x = torch.randn(rows, engine.config.width_in, generator=generator).to(engine.device, engine.dtype)
        passes = {name: _pass(engine, x, name) for name in names}

        def report(done: int, note: str = counted(rows), before: int = step * repetitions) -> None:
            if progress is not None:
                progress(before + done, total, note)

        seconds = rounds(passes, repetitions, engine.device, evict, report)
        results += [_measurement(engine, rows, name, seconds, roof) for name in names]
    return results


def require_available(engine: Engine) -> None:
    """Raise BackendUnavailableError where one of the engine's backends cannot run."""
    for name, status in engine.backends.items():
        if status.reason is not None:
            able = [other for other, it in engine.backends.items() if it.reason is None]
            raise BackendUnavailableError(name, status.reason, able)


def rounds(
    passes: Mapping[str, Callable[[], object]],
    repetitions: int,
    device: torch.device,
    evict: Tensor | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, list[float]]:
    """Time each pass once per round, in seconds; a round starts with another one than the round before.

    A disturbance of the machine thus hits all passes alike, and each round gives a ratio of its own.

    Args:
        passes: what to time, by name.
        repetitions: rounds.
        device: what is waited for before the clock is read.
        evict: written to before each timed pass; without it, an untimed pass goes before.
        progress: told the rounds done.
    """
    names = list(passes)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for done in range(repetitions):
        start = done % len(names)
        for name in names[start:] + names[:start]:
            if evict is None:
                passes[name]()
            else:
                evict.fill_(done % 2)
            seconds[name].append(_seconds(passes[name], device))
        if progress is not None:
            progress(done + 1)
    return seconds


def measure_roof(engine: Engine, row_counts: Sequence[int]) -> Roof:
    """Measure the roof of the engine's device in its dtype, products of the model's own widths included.

    Args:
        engine: whose roof.
        row_counts: that are to be timed, each positive.

    Raises:
        BackendError: the device does not multiply the engine's dtype.
    """
    config, rows = engine.config, max(ROOF_ROWS, *row_counts)
    shapes = [(rows, config.dim, config.hidden), (rows, config.hidden, config.dim)]
    try:
        with torch.inference_mode():
            return measured_roof(engine.device, [engine.dtype], shapes)
    except RuntimeError as error:
        raise BackendError(
            f"dtype: expected one that {engine.device} multiplies, got {engine.dtype} ({first_line(error)})"
        ) from None


def counted(rows: int) -> str:
    """Return a number of rows as a person says it."""
    return f"{rows} row{'' if rows == 1 else 's'}"


def moved_bytes(engine: Engine, rows: int) -> int:
    """Return the least bytes that a pass over `rows` rows moves: each weight once, the rows in and out."""
    config = engine.config
    return (config.parameter_count + rows * (config.width_in + config.width_out)) * engine.dtype.itemsize


def table(measurements: Sequence[Measurement]) -> str:
    """Lay the measurements out as text with their quartiles, and say where one is beyond the roof."""
    lines = [
        f"{'rows':>6}  {'backend':9} {'median us':>10}  {'quartiles':>19}  {'eager / it':>10}  {'quartiles':>12}  "
        f"{'GB/s':>7}  {'TFLOP/s':>8}  {'% of roof':>9}"
    ]
    for it in measurements:
        ratio = (
            f"{'':>10}  {'':>12}"
            if it.ratio is None
            else f"{it.ratio:>10.2f}  {f'{it.ratio_q1:.2f} .. {it.ratio_q3:.2f}':>12}"
        )
        lines.append(
            f"{it.rows:>6}  {it.backend:9} {it.median_us:>10.1f}  {f'{it.q1_us:.1f} .. {it.q3_us:.1f}':>19}  {ratio}  "
            f"{it.gb_s:>7.1f}  {it.tflop_s:>8.3f}  {it.percent_of_roof:>9.0f}"
        )
    beyond = [it.percent_of_roof for it in measurements if round(it.percent_of_roof) > 100]
    if beyond:
        lines.append(
            f"{len(beyond)} of {len(measurements)} are beyond 100% of the roof, up to {max(beyond):.0f}%: the copy "
            "measures memory, and a cache is faster; or the machine was busier when the roof was measured"
        )
    return "\n".join(lines)


def geometric_means(measurements: Sequence[Measurement], against: str = "eager") -> dict[str, float]:
    """Return for each backend the geometric mean over row counts of the time of `against` over its own.

    Empty where `against` was not measured.
    """
    base = {it.rows: it.median_us for it in measurements if it.backend == against}
    if not base:
        return {}
    names = dict.fromkeys(it.backend for it in measurements)
    return {
        name: statistics.geometric_mean(base[it.rows] / it.median_us for it in measurements if it.backend == name)
        for name in names
        if name != against
    }


def against_compiled(measurements: Sequence[Measurement]) -> str | None:
    """Say what fused is worth where compiled, which costs no kernel, was measured beside it; else None."""
    parts: list[str] = []
    for it in measurements:
        q1, median, q3 = it.compiled_ratio_q1, it.compiled_ratio, it.compiled_ratio_q3
        if it.backend == "fused" and q1 is not None and median is not None and q3 is not None:
            tie = ", a tie" if q1 <= 1 <= q3 else ""
            parts.append(f"{median:.2f} ({q1:.2f} .. {q3:.2f}{tie}) at {counted(it.rows)}")
    return f"compiled's time over fused's: {'; '.join(parts)}" if parts else None


def _measurement(
    engine: Engine, rows: int, name: str, seconds: Mapping[str, Sequence[float]], roof: Roof
) -> Measurement:
    q1, median, q3 = quartiles(seconds[name])
    ratios, compiled_ratios = (_ratios(seconds, other, name) for other in ("eager", "compiled"))
    n_bytes, flops = moved_bytes(engine, rows), rows * engine.config.flops_per_row
    return Measurement(
        rows=rows,
        backend=name,
        implementation=str(engine.backends[name].implementation),
        median_us=median * 1e6,
        q1_us=q1 * 1e6,
        q3_us=q3 * 1e6,
        ratio=ratios[1],
        ratio_q1=ratios[0],
        ratio_q3=ratios[2],
        gb_s=n_bytes / median / 1e9,
        tflop_s=flops / median / 1e12,
        percent_of_roof=100 * roof.floor_s(Work(n_bytes, flops), engine.dtype) / median,
        compiled_ratio=compiled_ratios[1],
        compiled_ratio_q1=compiled_ratios[0],
        compiled_ratio_q3=compiled_ratios[2],
    )


def _ratios(
    seconds: Mapping[str, Sequence[float]], other: str, name: str
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return the quartiles of the other one's time over this one's in the same round; None without the other one."""
    if other not in seconds:
        return None, None, None
    return quartiles([there / here for there, here in zip(seconds[other], seconds[name], strict=True)])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile; of a single value, that value three times."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3


def _pass(engine: Engine, x: Tensor, name: str) -> Callable[[], Tensor]:
    return partial(engine.run, x, name)


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
