"""The report's charts: what each shows, its caption, and its description for those who cannot see it."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtests.evidence import STAGES, Evidence, Run
from loadtests.measuring.generator_watch import CPU_LIMIT
from loadtests.report.drawing import (
    DOTS,
    Bar,
    Chart,
    Scheme,
    bars,
    bars_height_in,
    legend,
    limit,
    line_style,
    lines,
    logarithmic,
)
from loadtests.report.points import (
    OfferedLoad,
    Point,
    fault,
    has_percentile,
    held,
    mean_batch_rows,
    number,
    p50_ms,
    p99_ms,
    points,
    repeated,
    request_of,
)
from loadtests.report.summary import knees_of

SHOWN_LOADS = 6  # of each backend
PERCENTILES = (0.5, 0.9, 0.99, 0.999, 0.9999)


@dataclass(frozen=True, slots=True)
class Use:
    """A chart of what was in use while the load ran."""

    name: str
    title: str
    label: str
    unit: str
    caption: str
    figure_of: Callable[[Run], float | None]
    limit: float | None = None


USES = (
    Use(
        "server-cpu",
        "CPU use of the server",
        "cores in use",
        "cores",
        "All processes of the server together.",
        lambda run: run.server_cpu,
    ),
    Use(
        "server-gpu",
        "GPU use of the server",
        "share of the time, %",
        "% of the time",
        "The share of the time in which the busiest GPU of the server's host ran something.",
        lambda run: None if run.server_gpu is None else 100 * run.server_gpu,
    ),
    Use(
        "generator-cpu",
        "CPU use of the load generator",
        "share of one core, %",
        "% of a core",
        "The busiest process of the generator. Above the line it may be the bottleneck, and the run does not count.",
        lambda run: 100 * run.generator_cpu,
        100 * CPU_LIMIT,
    ),
)


NAMES = (  # of all that a report may have
    *(f"latency-{name}" for name in ("p99", "p50")),
    *("goodput", "throughput", "distribution", "batches", "batch-sizes", "errors"),
    *(f"stages-{loop}" for loop in ("open", "closed")),
    *(use.name for use in USES),
)


def charts(evidence: Evidence) -> list[Chart]:
    """Return every chart that the document has figures for."""
    made = [
        *_latencies(evidence),
        _goodput(evidence),
        _throughput(evidence),
        _distribution(evidence),
        _batches(evidence),
        *(_stages(evidence, loop) for loop in ("open", "closed")),
        _batch_distribution(evidence),
        _errors(evidence),
        *_use(evidence),
    ]
    return [chart for chart in made if chart is not None]


def overview(evidence: Evidence) -> Chart | None:
    """Return p99 and p50 against the rate, side by side; None where nothing was answered in an open loop."""
    found = _latencies(evidence)
    if len(found) < 2:
        return None

    def draw(figure: Figure, scheme: Scheme) -> None:
        left, right = figure.subplots(1, 2)
        _latency(left, evidence, scheme, p99_ms, "p99 latency, ms")
        _latency(right, evidence, scheme, p50_ms, "median latency, ms")
        legend(figure, left, columns=3)

    title = f"Latency under load: {evidence.model}, {request_of(evidence)}, {evidence.wire}"
    return Chart("compare", title, found[0].caption, found[0].alt, 4.4, draw, width_in=10.0)


def _latencies(evidence: Evidence) -> list[Chart]:
    found = points(evidence, "open")
    if not any(run.latency_ms for point in found for run in point.runs):
        return []
    knees = knees_of(evidence)
    caption = (
        "Medians over the rounds, with extremes, from the intended start. A star, or the line below it, "
        "is the knee, the highest rate that keeps p99 within the objective. Hollow: over 1% of the requests were not "
        "answered. Small: tried in the search for the knee, and not in every round."
    )
    few = sum(run.latency_ms is not None and not has_percentile(run, 0.99) for point in found for run in point.counted)
    if few:
        caption += (
            f" {few} run{'' if few == 1 else 's'} answered fewer than 100 requests: such a p99 is nearly the longest."
        )
    told = "; ".join(
        f"{name} has its knee at {number(knee.rate_per_s or 0)} requests a second" for name, knee in knees.items()
    )
    result = []
    for name, word, figure_of in (("p99", "99th percentile", p99_ms), ("p50", "Median", p50_ms)):

        def draw(
            figure: Figure, scheme: Scheme, of: Callable[[Run], float | None] = figure_of, word: str = name
        ) -> None:
            axes = figure.subplots()
            _latency(axes, evidence, scheme, of, f"{'median' if word == 'p50' else word} latency, ms")
            legend(figure, axes, columns=2)

        ends = _ends(found, figure_of, "ms")
        alt = f"Lines of {word.lower()} latency against offered rate. {ends}. {told or 'No knee was found'}."
        result.append(Chart(f"latency-{name}", f"{word} of latency against offered rate", caption, alt, 3.8, draw))
    return result


def _latency(
    axes: Axes, evidence: Evidence, scheme: Scheme, figure_of: Callable[[Run], float | None], label: str
) -> None:
    knees = knees_of(evidence)
    labels = {name: f"{name}, knee {number(knee.rate_per_s or 0)}/s" for name, knee in knees.items()}
    lines(axes, evidence, scheme, "open", figure_of, labels)
    limit(axes, scheme, evidence.objective_ms, f"objective for p99, {evidence.objective_ms:g} ms")
    logarithmic(axes.yaxis)
    bottom = axes.get_ylim()[0]
    for place, name in enumerate(evidence.backends):
        if name in knees:
            rate, style = knees[name].rate_per_s or 0, line_style(scheme, place)
            axes.plot([rate, rate], [bottom, evidence.objective_ms], **style | {"marker": ""}, linewidth=0.9)
            if figure_of is not p99_ms:
                continue
            star = {"marker": "*", "markersize": 11, "markeredgecolor": scheme.ink, "markeredgewidth": 0.6}
            axes.plot(rate, evidence.objective_ms, **style | star, zorder=5)
    axes.set_ylim(bottom=bottom)
    axes.set_ylabel(label)


def _goodput(evidence: Evidence) -> Chart | None:
    found = points(evidence, "open")
    if not found:
        return None

    def draw(figure: Figure, scheme: Scheme) -> None:
        axes = figure.subplots()
        rates = np.linspace(0, max(point.load.amount for point in found), 200)[1:]
        axes.plot(rates, rates, color=scheme.ink, linewidth=1, linestyle=DOTS, label="all of them")
        lines(axes, evidence, scheme, "open", lambda run: run.goodput_per_s)
        axes.set_ylim(0, rates[-1] * 1.05)
        axes.set_ylabel("answered in time, requests/s")
        legend(figure, axes, columns=2)

    caption = (
        f"What was answered with 200 within {evidence.objective_ms:g} ms, beyond the knee too; medians and extremes."
    )
    alt = f"Lines of goodput against offered rate. {_ends(found, lambda run: run.goodput_per_s, 'requests a second')}."
    return Chart("goodput", "Goodput against offered rate", caption, alt, 3.5, draw)


def _throughput(evidence: Evidence) -> Chart | None:
    found = points(evidence, "closed")
    if not found:
        return None

    def draw(figure: Figure, scheme: Scheme) -> None:
        axes = figure.subplots()
        lines(axes, evidence, scheme, "closed", lambda run: run.answered_per_s)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("answered, requests/s")
        legend(figure, axes, columns=3)

    caption = (
        "Closed loop: each user waits for a reply before it sends again, so a slow server is asked for less, and "
        "stalls hardly show. Read the latencies of the open loop."
    )
    alt = f"Lines of throughput against users. {_ends(found, lambda run: run.answered_per_s, 'requests a second')}."
    return Chart("throughput", "Throughput of a closed loop by users", caption, alt, 3.5, draw)


def _distribution(evidence: Evidence) -> Chart | None:
    chosen = held(evidence)
    curves = {name: curve for name, point in chosen.items() if (curve := _percentiles(point))}
    if not curves:
        return None

    def draw(figure: Figure, scheme: Scheme) -> None:
        axes = figure.subplots()
        for place, name in enumerate(evidence.backends):
            if name in curves:
                nines, latency_ms = zip(*curves[name], strict=True)
                label = f"{name}, {chosen[name].load}"
                axes.plot(
                    nines, latency_ms, label=label, markevery=max(1, len(nines) // 8), **line_style(scheme, place)
                )
        limit(axes, scheme, evidence.objective_ms, "objective for p99")
        axes.set_xlim(left=0)
        axes.set_xticks([-math.log10(1 - part) for part in PERCENTILES], [f"{100 * part:g}%" for part in PERCENTILES])
        axes.set_xlabel("share of requests answered within it")
        axes.set_ylabel("latency, ms")
        axes.grid(visible=True)
        logarithmic(axes.yaxis)
        legend(figure, axes, columns=2)

    alt = "Percentile curves. " + "; ".join(
        f"{name} at {chosen[name].load}: "
        + ", ".join(f"{100 * part:g}% within {number(_within(curve, part))} ms" for part in (0.5, 0.99))
        for name, curve in curves.items()
    )
    where = _where(evidence, chosen)
    caption = f"All rounds together, {where}. Each step to the right leaves a tenth as many requests above."
    return Chart("distribution", "Distribution of latency", caption, f"{alt}.", 3.9, draw)


def _stages(evidence: Evidence, loop: str) -> Chart | None:
    found = [point for point in points(evidence, loop) if any(run.stages_ms for run in point.counted)]
    if not found:
        return None
    shown = _some_loads(found, evidence.backends)
    groups: dict[str, list[Bar]] = {}
    told = []
    for point in shown:
        times_ms = {stage: _stage_ms(point, stage) for stage in STAGES}
        total = sum(times_ms.values())
        shares = {stage: 100 * time / total if total else 0.0 for stage, time in times_ms.items()}
        groups.setdefault(point.backend, []).append(Bar(str(point.load), shares, f"{number(total)} ms"))
        longest = max(shares, key=lambda stage: shares[stage])
        told.append(f"{point.backend} at {point.load} {number(total)} ms, {shares[longest]:.0f}% of it {longest}")
    kind = "an open loop" if loop == "open" else "a closed loop"
    caption = (
        "Shares of the mean latency, all rounds together, which stands beside the bar. Queue: waiting for its turn; "
        "batch: being put together; compute; encode: reading and writing bodies; wire: the rest, a late generator "
        "included." + _left_out(shown, found)
    )
    draw = bars(groups, STAGES, "share of the mean latency, %")
    alt = f"Stacked bars of where the time goes. {'; '.join(told)}."
    return Chart(f"stages-{loop}", f"Where the time goes in {kind}", caption, alt, bars_height_in(groups), draw)


def _stage_ms(point: Point, stage: str) -> float:
    """Return a stage's mean over all requests of the rounds: medians of its parts would not sum to the latency."""
    runs = [(float(getattr(run.stages_ms, stage)), run.answered) for run in point.counted if run.stages_ms is not None]
    answered = sum(count for _, count in runs)
    return sum(mean_ms * count for mean_ms, count in runs) / answered if answered else 0.0


def _errors(evidence: Evidence) -> Chart | None:
    found = [point for point in points(evidence) if any(run.errors for run in point.runs)]
    if not found:
        return None
    shown = _some_loads(found, evidence.backends)
    codes = list(dict.fromkeys(code for point in shown for run in point.runs for code in run.errors))
    groups: dict[str, list[Bar]] = {}
    told = []
    for point in shown:
        runs = point.runs
        all_due = sum(run.due for run in runs) or 1
        shares = {code: 100 * sum(run.errors.get(code, 0) for run in runs) / all_due for code in codes}
        groups.setdefault(point.backend, []).append(Bar(str(point.load), shares, f"{sum(shares.values()):.1f}%"))
        told.append(f"{point.backend} at {point.load} {sum(shares.values()):.1f}%")
    draw = bars(groups, codes, "share of the requests that were due, %")
    caption = "By the code the server names; loads and backends without an error have no bar. Invalid runs included."
    alt = f"Stacked bars of the share of requests that failed. {'; '.join(told)}."
    return Chart("errors", "Errors by code", caption + _left_out(shown, found), alt, bars_height_in(groups), draw)


def _batch_distribution(evidence: Evidence) -> Chart | None:
    chosen = {name: point for name, point in held(evidence).items() if _batch_curve(point)}
    if not chosen:
        return None

    def draw(figure: Figure, scheme: Scheme) -> None:
        axes = figure.subplots()
        most = 1
        for place, name in enumerate(evidence.backends):
            if name in chosen:
                rows, shares = zip(*_batch_curve(chosen[name]), strict=True)
                most = max(most, *rows)
                label = f"{name}, {chosen[name].load}"
                axes.step((*rows, 1e9), (*shares, 100.0), where="post", label=label, **line_style(scheme, place))
        axes.set_xlim(0.8, most * 1.5)
        axes.set_ylim(0, 103)
        axes.set_xlabel("rows computed at once")
        axes.set_ylabel("share of requests in batches\nof at most so many rows, %")
        axes.grid(visible=True)
        logarithmic(axes.xaxis)
        legend(figure, axes, columns=2)

    told = [
        f"{name} at {point.load} {number(spread.median)} rows in the mean"
        for name, point in chosen.items()
        if (spread := point.spread(mean_batch_rows))
    ]
    where = _where(evidence, chosen)
    caption = f"All rounds together, {where}. A curve further right has larger batches; they form by themselves."
    alt = f"Steps of the share of requests by rows computed at once. {'; '.join(told)}."
    return Chart("batch-sizes", "Batch sizes", caption, alt, 3.5, draw)


def _batches(evidence: Evidence) -> Chart | None:
    found = [point for point in points(evidence, "open") if point.spread(mean_batch_rows)]
    if not found:
        return None

    def draw(figure: Figure, scheme: Scheme) -> None:
        axes = figure.subplots()
        lines(axes, evidence, scheme, "open", mean_batch_rows)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("rows computed at once, mean")
        legend(figure, axes, columns=3)

    alt = f"Lines of the mean batch against offered rate. {_ends(found, mean_batch_rows, 'rows')}."
    caption = "As the mean request met it; medians and extremes over the rounds."
    return Chart("batches", "Batch size against offered rate", caption, alt, 3.5, draw)


def _use(evidence: Evidence) -> list[Chart]:
    loop = "open" if any(run.loop == "open" for run in evidence.runs) else "closed"
    made = []
    for use in USES:
        found = points(evidence, loop)
        if not any(use.figure_of(run) is not None for point in found for run in point.runs):
            continue

        def draw(figure: Figure, scheme: Scheme, use: Use = use) -> None:
            axes = figure.subplots()
            lines(axes, evidence, scheme, loop, use.figure_of)
            if use.limit is not None:
                limit(axes, scheme, use.limit, f"limit, {use.limit:g}%")
            axes.set_ylim(bottom=0)
            axes.set_ylabel(use.label)
            legend(figure, axes, columns=4)

        alt = f"Lines of {use.title} against the load. {_ends(found, use.figure_of, use.unit)}."
        made.append(Chart(use.name, use.title, use.caption, alt, 3.4, draw))
    return made


def _where(evidence: Evidence, chosen: Mapping[str, Point]) -> str:
    if len({point.load for point in chosen.values()}) == 1:
        return "at the highest load that all hold"
    without = [name for name in chosen if name not in knees_of(evidence)]
    if without:
        return (
            "each backend at the highest load that was measured in most rounds and kept the objective, which is no "
            f"limit where no knee was found: {', '.join(without)}"
        )
    return "each backend at the highest load that it holds"


def _percentiles(point: Point) -> list[tuple[float, float]]:
    """Return (nines, milliseconds): a share `q` of the requests took at most so long, as -log10(1 - q)."""
    counts: dict[float, int] = {}
    for run in point.counted:
        for upper_ms, count in run.histogram:
            counts[upper_ms] = counts.get(upper_ms, 0) + count
    total = sum(counts.values())
    curve, below = [], 0
    for upper_ms in sorted(counts):
        below += counts[upper_ms]
        left = max(total - below, 0.5)  # the last one stands at half a request, since none is above it
        curve.append((-math.log10(left / total), upper_ms))
    return curve


def _within(curve: list[tuple[float, float]], part: float) -> float:
    return next((upper_ms for nines, upper_ms in curve if 1 - 10**-nines >= part), curve[-1][1])


def _batch_curve(point: Point) -> list[tuple[int, float]]:
    counts: dict[int, int] = {}
    for run in point.counted:
        for text, count in run.batch_rows.items():
            counts[int(text)] = counts.get(int(text), 0) + count
    total, below = sum(counts.values()), 0
    curve = []
    for rows in sorted(counts):
        below += counts[rows]
        curve.append((rows, 100 * below / total))
    return curve


def _some_loads(found: list[Point], backends: Iterable[str]) -> list[Point]:
    """Return points by backend; of each at most `SHOWN_LOADS`, from its lowest load to its highest."""
    shown = []
    for name in backends:
        mine = [point for point in repeated(found) if point.backend == name]
        count = min(len(mine), SHOWN_LOADS)
        shown += [mine[place * (len(mine) - 1) // max(1, count - 1)] for place in range(count)]
    return shown


def _left_out(shown: list[Point], found: list[Point]) -> str:
    return "" if len(shown) == len(found) else f" {len(shown)} of {len(found)} bars are drawn; the table has all."


def _ends(found: list[Point], figure_of: Callable[[Run], float | None], unit: str) -> str:
    """Say where each backend's line starts and ends."""
    lines: dict[str, list[tuple[OfferedLoad, float]]] = {}
    for point in repeated(found):
        if spread := point.spread(figure_of):
            lines.setdefault(point.backend, []).append((point.load, spread.median))
    told = [
        f"{name} from {number(line[0][1])} {unit} at {line[0][0]} to {number(line[-1][1])} at {line[-1][0]}"
        for name, line in lines.items()
    ]
    rejected = sum(fault(run) is not None for point in found for run in point.runs)
    if rejected:
        told.append(f"runs that do not count stand apart, {rejected} of them")
    return "; ".join(told)
