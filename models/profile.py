"""Shows what a forward pass is made of: the operators and kernels of each backend, their counts, times and bytes.

An operator is what PyTorch dispatches on the outermost level, a kernel what a GPU runs. Bytes count each operand read
once and the result written once, by the shapes that PyTorch records; compiled code and replayed graphs record none.

Source: https://docs.pytorch.org/docs/stable/profiler.html.
"""

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from models.bench import counted, rounds
from models.engine import Engine
from models.errors import InputError

FORWARDS = 10

# Kernels of Inductor's C++ are no operators; they bear these names where it is told to note them.
_COMPILED_KERNELS = ("graph_", "cpp_fused")
_PRODUCTS = ("linear", "addmm", "::mm", "::matmul")
# As cuBLAS, CUTLASS, rocBLAS and the kernels here name theirs on a GPU.
_PRODUCT_KERNELS = ("gemm", "gemv", "nvjet", "cutlass", "Cijk_", "linear", "_mm")
_NAME_WIDTH = 60
_Sums = dict[tuple[str, str], list[Any]]


@dataclass(frozen=True, slots=True)
class Line:
    """One operator or kernel in one forward pass.

    Attributes:
        level: "operator" or "kernel".
        name: PyTorch's for an operator, the compiler's for a kernel.
        count: how often it runs in a pass; time_us and bytes are of all of these together.
        time_us: microseconds, mean over the passes; for an operator the host's time, including what it calls.
        bytes: None where no shapes are recorded.
    """

    level: str
    name: str
    count: float
    time_us: float
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Profile:
    """What a backend's forward pass is made of, the longest line first within operators and within kernels.

    Attributes:
        backend, implementation, rows: of what.
        lines: its operators and kernels.
        unprofiled_us: the median pass of the same run, in microseconds, without the profiler; None if it was not timed.
    """

    backend: str
    implementation: str
    rows: int
    lines: tuple[Line, ...]
    unprofiled_us: float | None = None

    def count(self, level: str) -> float:
        """Return how many operators or kernels a pass has."""
        return sum(line.count for line in self.lines if line.level == level)

    @property
    def total_us(self) -> float:
        """The time of a profiled pass: its kernels' where a GPU ran, else its operators'."""
        return sum(line.time_us for line in self._shares())

    @property
    def product_share(self) -> float | None:
        """The share of `total_us` spent in matrix products, including what is fused into them; None without a line."""
        total = self.total_us
        return sum(line.time_us for line in self._shares() if _is_product(line)) / total if total > 0 else None

    def _shares(self) -> list[Line]:
        level = "kernel" if self.count("kernel") else "operator"
        return [line for line in self.lines if line.level == level]

    def to_dict(self) -> dict[str, object]:
        """Return what JSON holds."""
        totals = {f"{level}s": self.count(level) for level in ("operator", "kernel")}
        lines = [{**asdict(line), "time_us": round(line.time_us, 2)} for line in self.lines]
        found = {**asdict(self), **totals, "lines": lines}
        del found["unprofiled_us"]
        return found if self.unprofiled_us is None else found | {"unprofiled_us": round(self.unprofiled_us, 2)}


def profile(engine: Engine, rows: int, backend: str, trace: Path | None = None) -> Profile:
    """Profile `FORWARDS` passes of one backend, after timing as many without the profiler.

    Args:
        engine: preferably warmed up.
        rows: how many rows, positive.
        backend: a name among the engine's.
        trace: where to write a trace for https://ui.perfetto.dev.

    Raises:
        InputError: `rows` is not positive.
        UnknownBackendError, BackendUnavailableError: as `Engine.run`.
    """
    x = _input(engine, rows)
    engine.run(x, backend)
    runner = engine.runner(backend)
    with torch.inference_mode():
        seconds = rounds({backend: lambda: runner(x)}, FORWARDS, engine.device)[backend]
    lines = profiled(lambda: runner(x), engine.device, engine.dtype.itemsize, trace)
    return Profile(backend, runner.implementation, rows, lines, statistics.median(seconds) * 1e6)


def profile_in_steps(
    engine: Engine, rows: int, backend: str, trace: Path | None = None
) -> Generator[None, None, Profile]:
    """Profile as `profile` does, one pass per step: between two steps the engine may run something else.

    The trace is of the last pass. The generator returns the profile.

    Raises:
        InputError, UnknownBackendError, BackendUnavailableError: as `profile`, in the first step.
    """
    x = _input(engine, rows)
    for _ in range(FORWARDS):
        engine.run(x, backend)
        yield
    runner = engine.runner(backend)
    sums: _Sums = {}
    for done in range(FORWARDS):
        engine.set_threads(backend, rows)
        session = _recorded(lambda: runner(x), 1, engine.device)
        _add(sums, session, engine.dtype.itemsize)
        if done < FORWARDS - 1:
            yield
    if trace is not None:
        session.export_chrome_trace(str(trace))
    return Profile(backend, runner.implementation, rows, _lines(sums))


@torch.inference_mode()
def profiled(
    run: Callable[[], Tensor], device: torch.device, itemsize: int, trace: Path | None = None
) -> tuple[Line, ...]:
    """Profile `FORWARDS` calls of `run`.

    Args:
        run: one forward pass.
        device: where it runs.
        itemsize: bytes an element of its operands.
        trace: where to write a trace.
    """
    for _ in range(FORWARDS):
        run()
    session = _recorded(run, FORWARDS, device)
    if trace is not None:
        session.export_chrome_trace(str(trace))
    sums: _Sums = {}
    _add(sums, session, itemsize)
    return _lines(sums)


def table(found: Profile) -> str:
    """Lay a profile out as text, with the totals of its lines."""
    kernels = f", {found.count('kernel'):g} kernels" if found.count("kernel") else ""
    lines = [
        f"{found.backend} ({found.implementation}), {counted(found.rows)}: "
        f"{found.count('operator'):g} operators{kernels}",
        f"  {'level':8}  {'count':>6}  {'us':>10}  {'KB':>10}  {'GB/s':>7}  name",
    ]
    for line in found.lines:
        moved = f"{'-':>10}  {'-':>7}"
        if line.bytes is not None and line.time_us > 0:
            moved = f"{line.bytes / 1e3:>10.1f}  {line.bytes / line.time_us / 1e3:>7.1f}"
        lines.append(f"  {line.level:8}  {line.count:>6g}  {line.time_us:>10.1f}  {moved}  {line.name[:_NAME_WIDTH]}")
    return "\n".join(lines + _closing(found))


def _closing(found: Profile) -> list[str]:
    share, total = found.product_share, found.total_us
    if share is None:
        return []
    most = f": without it at most {1 / share:.2f} times as fast, but for faster products" if share > 0 else ""
    lines = [f"  products {share:.0%}, the rest {1 - share:.0%}{most}"]
    timed = found.unprofiled_us
    if timed is None:
        return [*lines, f"  a pass: {total:.1f} us profiled"]
    lines.append(
        f"  a pass: {total:.1f} us profiled (mean of {FORWARDS}), {timed:.1f} us unprofiled (median of {FORWARDS})"
    )
    if max(total, timed) > 2 * min(total, timed):
        why = "profiling slows it" if total > timed else "much of a pass is in no line, between the operators"
        lines.append(
            f"  the two differ {max(total, timed) / min(total, timed):.1f} times: {why}; take shares with care"
        )
    return lines


def chart(profiles: Sequence[Profile], path: Path) -> None:
    """Draw a PNG with one bar per backend, divided into the times of its operators (of its kernels on a GPU).

    Raises:
        InputError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    levels = {each.backend: "kernel" if each.count("kernel") else "operator" for each in profiles}
    shown = {each.backend: [line for line in each.lines if line.level == levels[each.backend]] for each in profiles}
    names = dict.fromkeys(line.name for lines in shown.values() for line in lines)
    colours = {name: mpl.colormaps["tab20"](position % 20) for position, name in enumerate(names)}
    figure, axes = plt.subplots(figsize=(10, 1.4 + 0.8 * len(profiles) + 0.11 * len(names)), layout="constrained")
    labelled: set[str] = set()
    longest = max(sum(line.time_us for line in lines) for lines in shown.values())
    for position, lines in enumerate(shown.values()):
        left = 0.0
        for line in lines:
            label = None if line.name in labelled else line.name[:_NAME_WIDTH]
            labelled.add(line.name)
            axes.barh(position, line.time_us, left=left, color=colours[line.name], edgecolor="white", label=label)
            if line.time_us > longest / 40:  # where a number fits
                axes.text(left + line.time_us / 2, position, f"{line.count:g}", ha="center", va="center", fontsize=7)
            left += line.time_us
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlabel("microseconds a forward pass; in each part, how often it runs")
    axes.set_title(counted(profiles[0].rows))
    figure.legend(loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    figure.savefig(path, dpi=120, format="png")
    plt.close(figure)


def require_matplotlib() -> None:
    """Raise InputError where matplotlib, which `chart` draws with, is not installed."""
    try:
        import matplotlib as mpl  # noqa: F401
    except ImportError:
        raise InputError(
            "png: expected matplotlib to draw with, found none; install it with: pip install -r requirements/dev.txt"
        ) from None


def trace_path(path: Path, backend: str, n_backends: int) -> Path:
    """Return where a backend's trace goes: `path`, with the backend's name in it where there are several."""
    return path if n_backends == 1 else path.with_name(f"{path.stem}-{backend}{path.suffix}")


def _input(engine: Engine, rows: int) -> Tensor:
    if rows < 1:
        raise InputError(f"rows: expected a positive integer, got {rows}")
    return torch.randn(rows, engine.config.width_in).to(engine.device, engine.dtype)


@torch.inference_mode()
def _recorded(run: Callable[[], Tensor], passes: int, device: torch.device) -> Any:
    """Return the finished profiling session of so many passes.

    This uses the profiler inside `torch.profiler`, which itself imports all of Inductor at its first start: a second in
    which a server would answer nobody.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    with profiler.profile(use_kineto=True, use_device="cuda" if is_cuda else None, record_shapes=True) as session:
        for _ in range(passes):
            run()
        if is_cuda:
            torch.cuda.synchronize(device)
    return session


def _add(sums: _Sums, session: Any, itemsize: int) -> None:
    """Add a session's events to the count, the microseconds and the bytes by level and name."""
    for event in session.function_events or ():
        if event.device_type.name == "CPU":
            if not _is_operator(event) or _has_operator_above(event):
                continue
            level, time_us, n_bytes = "operator", event.cpu_time_total, _bytes(event, itemsize)
        else:
            level, time_us, n_bytes = "kernel", event.device_time_total, None
        entry = sums.setdefault((level, event.name), [0, 0.0, 0])
        entry[0] += 1
        entry[1] += time_us
        entry[2] = None if n_bytes is None or entry[2] is None else entry[2] + n_bytes


def _lines(sums: _Sums) -> tuple[Line, ...]:
    """Return what `FORWARDS` passes added up to, as of one."""
    lines = [
        Line(level, name, count / FORWARDS, time_us / FORWARDS, None if total is None else total // FORWARDS)
        for (level, name), (count, time_us, total) in sums.items()
    ]
    return tuple(sorted(lines, key=lambda line: (line.level != "operator", -line.time_us)))


def _is_operator(event: Any) -> bool:
    return "::" in event.name or event.name.startswith(_COMPILED_KERNELS)


def _is_product(line: Line) -> bool:
    if line.level == "kernel":
        return any(name in line.name for name in _PRODUCT_KERNELS)
    return not line.name.startswith(_COMPILED_KERNELS) and any(name in line.name for name in _PRODUCTS)


def _has_operator_above(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if _is_operator(parent):
            return True
        parent = parent.cpu_parent
    return False


def _bytes(event: Any, itemsize: int) -> int | None:
    shapes = [shape for shape in event.input_shapes or () if shape and all(isinstance(size, int) for size in shape)]
    if not shapes:
        return None
    result = max(map(math.prod, shapes))
    if any(name in event.name for name in _PRODUCTS) and len(shapes) > 1:
        # (N, K) by (H, K), or by (K, H): whichever of the second's sizes is not K.
        rows, weight = shapes[0], next(shape for shape in shapes[::-1] if shapes[0][-1] in shape and len(shape) == 2)
        result = math.prod(rows[:-1]) * math.prod(weight) // rows[-1]
    return itemsize * (sum(map(math.prod, shapes)) + result)
