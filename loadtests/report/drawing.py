"""How the report's charts are drawn, with matplotlib: lines against the load, and stacked bars.

Backends differ by colour, marker and line style, parts of bars by colour and hatching, so that a chart reads in black
and white too. The colours are those that most colour-blind people tell apart.

Source: Okabe and Ito, Color Universal Design, https://jfly.uni-koeln.de/color/.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from loadtests.evidence import Evidence, Run
from loadtests.report.points import FAILED_SHARE, points, repeated

PNG_DPI = 160
WIDTH_IN = 5.0
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
REJECTED_MARKERS = ("x", "+", "1", "2", "3", "4", "|")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
DOTS: Any = (0, (1, 2))
HATCHES = ("////", "\\\\\\\\", "xxxx", "----", "||||", "++++")
PLAIN_PART = "compute"  # the part that is looked for first has no hatching
SMALL = 2.5
GROUP_GAP = 0.35  # in bars
WIDE = 40  # times the lowest rate: above it, rates stand on a logarithmic axis
MANY_DECADES = 1e4  # highest over lowest: above it, an axis has room for powers of 10 alone


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a chart is painted with."""

    name: str
    ink: str
    faint: str
    paper: str
    series: tuple[str, ...]
    parts: tuple[str, ...]


LIGHT = Scheme(
    "light",
    "#1b1f24",
    "#d5d9de",
    "#ffffff",
    ("#d55e00", "#009e73", "#0072b2", "#cc79a7", "#000000", "#e69f00", "#56b4e9"),
    ("#e69f00", "#f0e442", "#0072b2", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"),
)


DARK = Scheme(
    "dark",
    "#e8eaed",
    "#3a4149",
    "#14171c",
    ("#e69f00", "#009e73", "#56b4e9", "#cc79a7", "#ffffff", "#d55e00", "#f0e442"),
    ("#e69f00", "#f0e442", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#0072b2"),
)


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture; `name` is its file's, `alt` describes it for those who cannot see it."""

    name: str
    title: str
    caption: str
    alt: str
    height_in: float
    draw: Callable[[Figure, Scheme], None]
    width_in: float = WIDTH_IN


@dataclass(frozen=True, slots=True)
class Bar:
    """One stacked bar: the length of each part, and the text after it."""

    label: str
    parts: dict[str, float]
    note: str


def style(chart: Chart, scheme: Scheme) -> dict[Any, Any]:
    """Return matplotlib's settings for a chart."""
    return {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": scheme.ink,
        "axes.labelcolor": scheme.ink,
        "axes.titlecolor": scheme.ink,
        "axes.facecolor": scheme.paper,
        "axes.axisbelow": True,
        "figure.facecolor": scheme.paper,
        "text.color": scheme.ink,
        "text.parse_math": False,
        "xtick.color": scheme.ink,
        "ytick.color": scheme.ink,
        "grid.color": scheme.faint,
        "grid.linewidth": 0.6,
        "hatch.linewidth": 0.5,
        "legend.frameon": False,
        "legend.handlelength": 2.8,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
        "svg.hashsalt": chart.name,
        "svg.fonttype": "path",
    }


def image(chart: Chart, scheme: Scheme, kind: str, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a chart as `svg`, or as `png` with its title; the same document gives the same bytes."""
    stream = io.BytesIO()
    with mpl.rc_context(style(chart, scheme)):
        figure = Figure(figsize=(chart.width_in, chart.height_in), layout="constrained")
        chart.draw(figure, scheme)
        if kind == "png":
            figure.suptitle(chart.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
            figure.savefig(stream, format="png", dpi=PNG_DPI, metadata=dict(metadata or {}))
        else:
            figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def lines(
    axes: Axes,
    evidence: Evidence,
    scheme: Scheme,
    loop: str,
    figure_of: Callable[[Run], float | None],
    labels: Mapping[str, str] | None = None,
) -> None:
    """Draw a line a backend against the load, and a cross for each run that does not count.

    A line joins the medians of the loads that were repeated, with their extremes; a marker is hollow where over
    `FAILED_SHARE` of the requests were not answered, and small where the load was not repeated. `labels` replaces names
    in the legend.
    """
    found = points(evidence, loop)
    for place, name in enumerate(evidence.backends):
        mine = [point for point in found if point.backend == name]
        often = repeated(mine)
        spreads = [(point, spread) for point in often if (spread := point.spread(figure_of))]
        look = line_style(scheme, place)
        at = [point.load.amount for point, _ in spreads]
        middle = [spread.median for _, spread in spreads]
        below = [spread.median - spread.low for _, spread in spreads]
        above = [spread.high - spread.median for _, spread in spreads]
        label = (labels or {}).get(name, name)
        if spreads:
            axes.errorbar(at, middle, yerr=(below, above), label=label, capsize=2, elinewidth=0.8, **look)
        others = [
            (point.load.amount, spread.median)
            for point in mine
            if point not in often and (spread := point.spread(figure_of))
        ]
        hollow = [(point.load.amount, spread.median) for point, spread in spreads if point.failed_share > FAILED_SHARE]
        dots = {"linestyle": "", "color": look["color"]}
        axes.plot(*_columns(hollow), **dots, marker=look["marker"], markerfacecolor=scheme.paper, zorder=4)
        axes.plot(*_columns(others), **dots, marker=look["marker"], markersize=SMALL, markeredgewidth=0)
        crosses = [
            (point.load.amount, value)
            for point in mine
            for run in point.rejected
            if (value := figure_of(run)) is not None
        ]
        if crosses:
            marker = REJECTED_MARKERS[place % len(REJECTED_MARKERS)]
            axes.plot(*_columns(crosses), **dots, marker=marker, markeredgewidth=1.4, label=f"{name}, does not count")
    axes.grid(visible=True)
    amounts = sorted({point.load.amount for point in found})
    if loop == "closed":
        axes.set_xscale("log", base=2)
        axes.set_xticks(amounts, [f"{amount:g}" for amount in amounts])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("users, each waiting for its reply")
    else:
        if amounts and amounts[-1] > WIDE * amounts[0] > 0:
            logarithmic(axes.xaxis)
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel("offered rate, requests/s")


def bars(groups: Mapping[str, Sequence[Bar]], parts: Sequence[str], label: str) -> Callable[[Figure, Scheme], None]:
    """Return what draws stacked bars, those of a group under its heading, with the parts named below."""

    def draw(figure: Figure, scheme: Scheme) -> None:
        axes = figure.subplots()
        styles = {part: _part_style(scheme, part, place) for place, part in enumerate(parts)}
        heights: list[float] = []
        names: list[str] = []
        headings: list[int] = []
        longest = max((sum(bar.parts.values()) for group in groups.values() for bar in group), default=0.0) or 1.0
        at = 0.0
        for heading, group in groups.items():
            headings.append(len(names))
            for name in (heading, *(bar.label for bar in group)):
                names.append(name)
                heights.append(at)
                at += 1
            for height, bar in zip(heights[-len(group) :], group, strict=True):
                left = 0.0
                for part, style in styles.items():
                    axes.barh(height, bar.parts.get(part, 0.0), 0.74, left, **style)
                    left += bar.parts.get(part, 0.0)
                axes.text(left + longest * 0.015, height, bar.note, va="center", fontsize=8)
            at += GROUP_GAP
        axes.set_xlim(0, longest * 1.16)
        axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= longest * 1.001])
        axes.set_yticks(heights, names, fontsize=8)
        for place in headings:
            axes.get_yticklabels()[place].set_fontweight("bold")
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(at - GROUP_GAP - 0.4, -0.6)
        axes.spines["left"].set_visible(False)
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(label)
        patches = [Patch(label=part, **style) for part, style in styles.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=min(len(parts), 5), fontsize=8)

    return draw


def bars_height_in(groups: Mapping[str, Sequence[Bar]]) -> float:
    """Return the height, in inches, of a chart of stacked bars."""
    return 1.2 + 0.19 * sum(1 + GROUP_GAP + len(group) for group in groups.values())


def legend(figure: Figure, axes: Axes, columns: int) -> None:
    """Name the lines below the axes, the backends first."""
    named = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda entry: isinstance(entry[0], Line2D))
    figure.legend(*zip(*named, strict=True), loc="outside lower center", ncols=columns, fontsize=8)


def limit(axes: Axes, scheme: Scheme, value: float, label: str) -> None:
    """Draw a horizontal line that nothing should cross."""
    axes.axhline(value, color=scheme.ink, linewidth=1, linestyle=DOTS, label=label)


def line_style(scheme: Scheme, place: int) -> dict[str, Any]:
    """Return how the backend in that place is drawn."""
    return {
        "color": scheme.series[place % len(scheme.series)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": LINES[place % len(LINES)],
    }


def logarithmic(axis: XAxis | YAxis) -> None:
    """Scale an axis by its logarithm, with plain numbers at it, which matplotlib leaves out where they are few."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < MANY_DECADES * low else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _part_style(scheme: Scheme, part: str, place: int) -> dict[str, Any]:
    hatch = "" if part == PLAIN_PART else HATCHES[place % len(HATCHES)]
    return {
        "facecolor": scheme.parts[place % len(scheme.parts)],
        "hatch": hatch,
        "edgecolor": LIGHT.ink,  # all of these colours are light enough to be hatched with it
        "linewidth": 0.5,
    }
