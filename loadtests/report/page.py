"""The report of a comparison under load: one self-contained HTML file, and its charts as PNG files."""

import base64
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from loadtests.conditions import told_commit
from loadtests.evidence import Evidence, Knee, Run
from loadtests.report.charts import NAMES, charts
from loadtests.report.drawing import DARK, LIGHT, Chart, Scheme, image
from loadtests.report.points import OfferedLoad, Point, Spread, fault, has_percentile, load_of, number, points, repeated
from loadtests.report.summary import knee_ratio, knees_of, least_of, summary

TEMPLATE = Path(__file__).with_name("report.html.j2")
MIME = {"svg": "image/svg+xml", "png": "image/png"}
NONE = "-"
PARTS = {"p90": 0.9, "p99": 0.99, "p999": 0.999}
FEW = (
    "A percentile stands where at least one request is beyond it: p99 takes 100 answered ones in each run, p99.9 1000."
)
WORDS = frozenset({"backend", "implementation", "load", "counts", "errors"})  # columns of text; the others hold figures

Cell = str | tuple[str, ...]  # or a figure, and below it what it is spread over


@dataclass(frozen=True, slots=True)
class Table:
    """A table; the first column heads each row, and a row with a reason is one that does not count."""

    name: str
    title: str
    caption: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    reasons: tuple[str | None, ...] = ()
    is_folded: bool = False


def write_report(evidence: Evidence, directory: Path) -> list[Path]:
    """Write `report.html` and a PNG file for each chart, and return their paths, the page first.

    Those of an earlier report in the directory are deleted.

    Raises:
        OSError: the directory cannot be made or written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("report.html", *(f"{name}.png" for name in NAMES)):
        (directory / name).unlink(missing_ok=True)
    drawn = charts(evidence)
    page = directory / "report.html"
    page.write_text(html(evidence, drawn), encoding="utf-8")
    written = [page]
    for chart in drawn:
        path = directory / f"{chart.name}.png"
        path.write_bytes(image(chart, LIGHT, "png"))
        written.append(path)
    return written


def html(evidence: Evidence, drawn: Sequence[Chart]) -> str:
    """Return the page; every text of the document is escaped."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE.name).render(
        evidence=evidence,
        sentences=summary(evidence),
        charts=[(chart, data_url(chart, LIGHT), data_url(chart, DARK)) for chart in drawn],
        tables=[overview(evidence), by_load(evidence), every_run(evidence)],
        conditions=conditions(evidence),
        words=WORDS,
        rejected=[run for run in evidence.runs if fault(run) is not None],
        light=LIGHT,
        dark=DARK,
    )


def data_url(chart: Chart, scheme: Scheme) -> str:
    """Return a chart as an address that holds the picture itself."""
    return f"data:{MIME['svg']};base64,{base64.b64encode(image(chart, scheme, 'svg')).decode()}"


def conditions(evidence: Evidence) -> list[tuple[str, str]]:
    """Return what has to stand beside the figures for them to mean anything."""
    rounds = {run.round for run in evidence.runs}
    seconds = sorted({run.seconds for run in evidence.runs})
    interval = (
        " to ".join(number(each) for each in dict.fromkeys((seconds[0], seconds[-1]))) + " s" if seconds else NONE
    )
    return [
        ("model", evidence.model),
        ("backends", ", ".join(f"{name} ({runs})" for name, runs in evidence.backends.items())),
        ("rows in each request", str(evidence.rows)),
        ("wire", evidence.wire),
        ("objective", f"p99 within {evidence.objective_ms:g} ms"),
        ("repetitions", f"{len(rounds)} {'round' if len(rounds) == 1 else 'rounds, interleaved'}"),
        ("interval of each run", f"{interval}, the warm-up left out"),
        ("seed of arrivals and rows", str(evidence.seed)),
        ("started", evidence.started),
        ("command", shlex.join(evidence.command)),
        *(
            (str(name), told_commit(str(value)) if name == "commit" else str(value))
            for name, value in evidence.conditions.items()
        ),
    ]


def overview(evidence: Evidence) -> Table:
    """Return what each backend holds, also as a multiple of what the first one, the baseline, holds."""
    base = next(iter(evidence.backends))
    found = knees_of(evidence) | least_of(evidence)
    rows = []
    for name, implementation in evidence.backends.items():
        knee = next((knee for knee in evidence.knees if knee.backend == name), None)
        mine = [point for point in points(evidence) if point.backend == name and point.counted]
        open_, closed = ([point for point in mine if point.load.loop == loop] for loop in ("open", "closed"))
        ratio = knee_ratio(evidence, name, base)
        often = repeated(open_)  # the best of many single runs would be luck
        goodput = [spread for point in often if (spread := point.spread(lambda run: run.goodput_per_s))]
        throughput = [spread for point in closed if (spread := point.spread(lambda run: run.answered_per_s))]
        first = Point(name, mine[0].load, tuple(run for point in mine for run in point.counted), ()) if mine else None
        rows.append(
            (
                name,
                implementation,
                held(knee, name in found),
                NONE if knee is None or name not in found or knee.above_per_s is None else number(knee.above_per_s),
                NONE if ratio is None else "1" if name == base else (f"{ratio.value:.2f}", ratio.spread),
                spread_cell(max(goodput, key=lambda spread: spread.median, default=None)),
                spread_cell(max(throughput, key=lambda spread: spread.median, default=None)),
                spread_cell(first.spread(lambda run: run.first_ms) if first else None),
            )
        )
    return Table(
        "overview",
        "What each backend holds",
        "Held: the highest Poisson rate whose p99 stays within the objective, and below it that of each round. "
        "Others: medians over the rounds; below them quartiles, then extremes.",
        (
            "backend",
            "implementation",
            "held, requests/s",
            "not held, requests/s",
            f"times {base}",
            "most goodput, requests/s",
            "most throughput, requests/s",
            "first request, ms",
        ),
        rows,
    )


def by_load(evidence: Evidence) -> Table:
    """Return every backend under every load, over the rounds."""
    found = points(evidence)
    figures: dict[str, Callable[[Run], float | None]] = {
        "answered, requests/s": lambda run: run.answered_per_s,
        "in time, requests/s": lambda run: run.goodput_per_s,
        "p50, ms": latency("p50"),
        "p90, ms": latency("p90"),
        "p99, ms": latency("p99"),
        "p99.9, ms": latency("p999"),
        "longest, ms": latency("max"),
    }
    return Table(
        "loads",
        "Every load, over the rounds",
        "Medians over the rounds that count; below them quartiles, then extremes. Latencies are of the requests "
        f"answered with 200, from the intended start. {FEW}",
        ("load", "backend", "rounds that count", "not answered, %", *figures),
        [
            (
                told_load(point.load, point.is_search),
                point.backend,
                f"{len(point.counted)} of {len(point.counted) + len(point.rejected)}",
                f"{100 * point.failed_share:.1f}" if point.counted else NONE,
                *(
                    NONE if lacks(point, figure_of) else spread_cell(point.spread(figure_of))
                    for figure_of in figures.values()
                ),
            )
            for point in found
        ],
        tuple(None if point.counted else "no round counts" for point in found),
    )


def every_run(evidence: Evidence) -> Table:
    """Return every run as it was, those that do not count with the reason."""
    return Table(
        "runs",
        "Every run",
        "In the order they ran. CPU: cores used by the server and by other programs; share of one core used by the "
        f"generator. {FEW}",
        (
            "run",
            "round",
            "backend",
            "load",
            "counts",
            "seconds",
            "sent",
            "answered",
            "in time",
            "errors",
            "wrong of checked",
            "mean, ms",
            "p50, ms",
            "p90, ms",
            "p99, ms",
            "p99.9, ms",
            "longest, ms",
            "queue, ms",
            "batch, ms",
            "compute, ms",
            "encode, ms",
            "wire, ms",
            "first, ms",
            "late p99, ms",
            "server CPU, cores",
            "server GPU, %",
            "generator CPU, %",
            "others' CPU, cores",
        ),
        [
            (
                str(place),
                str(run.round + 1),
                run.backend,
                told_load(load_of(run), run.is_search),
                f"no: {reason}" if (reason := fault(run)) is not None else "yes",
                number(run.seconds),
                str(run.sent),
                str(run.answered),
                str(run.answered_in_time),
                ", ".join(f"{code} {count}" for code, count in run.errors.items()) or "0",
                f"{run.wrong} of {run.checked}",
                *(figure(latency(name)(run)) for name in ("mean", "p50", "p90", "p99", "p999", "max")),
                *(figure(stage(name)(run)) for name in ("queue", "batch", "compute", "encode", "wire")),
                figure(run.first_ms),
                figure(run.late_p99_ms),
                figure(run.server_cpu),
                figure(None if run.server_gpu is None else 100 * run.server_gpu),
                figure(100 * run.generator_cpu),
                figure(run.other_cpu),
            )
            for place, run in enumerate(evidence.runs, start=1)
        ],
        tuple(fault(run) for run in evidence.runs),
        is_folded=True,
    )


def latency(name: str) -> Callable[[Run], float | None]:
    """Return what reads one figure of a run's latency; a percentile only where enough requests were answered for it."""
    part = PARTS.get(name, 0.0)

    def read(run: Run) -> float | None:
        return None if run.latency_ms is None or not has_percentile(run, part) else float(getattr(run.latency_ms, name))

    return read


def told_load(load: OfferedLoad, is_search: bool) -> Cell:
    """Return a load as a cell, and below it whether the search tried it."""
    return (str(load), "tried in the search") if is_search else str(load)


def lacks(point: Point, figure_of: Callable[[Run], float | None]) -> bool:
    """Whether a run that answered has no such figure: a median of the others would be that of the busier rounds."""
    return any(run.latency_ms is not None and figure_of(run) is None for run in point.counted)


def stage(name: str) -> Callable[[Run], float | None]:
    """Return what reads one stage of a run."""
    return lambda run: None if run.stages_ms is None else float(getattr(run.stages_ms, name))


def held(knee: Knee | None, has_figure: bool) -> Cell:
    """Return the rate of a knee, and below it that of each round, or why there is none."""
    if knee is None:
        return NONE
    if not has_figure:
        return NONE, knee.note or "no run of it counts"
    least = NONE if knee.at_least_per_s is None else f"at least {number(knee.at_least_per_s)}"
    rate = least if knee.rate_per_s is None else number(knee.rate_per_s)
    rounds = ", ".join(number(each) for each in knee.rounds_per_s)
    if rounds and knee.rate_per_s is None:
        rounds = f"{rounds} where the search came to its end"
    return tuple(part for part in (rate, rounds, knee.note or "") if part)


def figure(value: float | None) -> str:
    """Return a figure as text."""
    return NONE if value is None else number(value)


def spread_cell(spread: Spread | None) -> Cell:
    """Return a median, and below it its quartiles and extremes where they differ."""
    if spread is None:
        return NONE
    if spread.low == spread.high:
        return number(spread.median)
    quartiles, extremes = (spread.q1, spread.q3), (spread.low, spread.high)
    return (number(spread.median), *(f"{number(low)} to {number(high)}" for low, high in (quartiles, extremes)))
