"""Every figure that was asked for has a chart, which reads without colour and without eyes."""

import io
import itertools
import re
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from loadtests.evidence import Evidence, Stages
from loadtests.report import drawing
from loadtests.report.charts import charts, overview
from loadtests.report.drawing import DARK, LIGHT, Chart, Scheme, image
from loadtests.report.points import number
from tests.loadtests import made_evidence

NAMES = [
    "latency-p99",
    "latency-p50",
    "goodput",
    "throughput",
    "distribution",
    "batches",
    "stages-open",
    "stages-closed",
    "batch-sizes",
    "errors",
    "server-cpu",
    "generator-cpu",
]


def drawn(chart: Chart, scheme: Scheme = LIGHT) -> Figure:
    figure = Figure()
    chart.draw(figure, scheme)
    return figure


def chart_of(evidence: Evidence, name: str) -> Chart:
    (found,) = [chart for chart in charts(evidence) if chart.name == name]
    return found


def points_of(line: Line2D) -> list[tuple[float, float]]:
    return list(zip(np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float), strict=True))


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_there_is_a_chart_for_everything_that_was_measured() -> None:
    assert [chart.name for chart in charts(made_evidence.compared())] == NAMES


def test_gpu_use_is_drawn_where_it_was_read() -> None:
    evidence = made_evidence.compared()
    evidence.runs = [replace(run, server_gpu=0.5) for run in evidence.runs]
    assert [chart.name for chart in charts(evidence)] == [*NAMES[:-1], "server-gpu", NAMES[-1]]


def test_nothing_is_drawn_of_nothing() -> None:
    assert charts(made_evidence.empty()) == []
    assert overview(made_evidence.empty()) is None


@pytest.mark.parametrize(
    "evidence", [made_evidence.invalid(), made_evidence.ended_early(), made_evidence.hostile()], ids=str.__class__
)
def test_odd_documents_can_be_drawn(evidence: Evidence) -> None:
    for chart in charts(evidence):
        drawn(chart)


def test_each_backend_is_told_apart_without_colour() -> None:
    for chart in charts(made_evidence.compared()):
        axes = drawn(chart).axes[0]
        styles = [
            (line.get_linestyle(), line.get_marker())
            for line in axes.get_lines()
            if line.get_marker() in drawing.MARKERS and line.get_linestyle() != "None"
        ]
        assert len(styles) == len(set(styles)), chart.name
    hatches = {drawing._part_style(LIGHT, part, place)["hatch"] for place, part in enumerate("abcdef")}
    assert len(hatches) == 6


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=lambda scheme: scheme.name)
def test_lines_and_bars_stand_out_from_the_paper(scheme: Scheme) -> None:
    # 3 to 1 is what WCAG 2.2, 1.4.11, asks of graphics; bars have an edge and a hatching of ink besides.
    assert [colour for colour in scheme.series[:3] if contrast(colour, scheme.paper) < 3] == []
    assert contrast(scheme.ink, scheme.paper) > 7


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_each_knee_is_marked_on_the_objective_and_told_in_legend_and_words() -> None:
    evidence = made_evidence.compared()
    chart = chart_of(evidence, "latency-p99")
    figure = drawn(chart)
    stars = [line for line in figure.axes[0].get_lines() if line.get_marker() == "*"]
    assert [points_of(star) for star in stars] == [
        [(knee.rate_per_s, evidence.objective_ms)] for knee in evidence.knees
    ]
    for knee in evidence.knees:
        rate = number(knee.rate_per_s or 0)
        assert f"{knee.backend}, knee {rate}/s" in legend_of(figure)
        assert f"{knee.backend} has its knee at {rate} requests a second" in chart.alt
    assert "objective for p99, 50 ms" in legend_of(figure)


def test_a_run_that_does_not_count_is_drawn_apart_and_in_no_line() -> None:
    evidence = made_evidence.compared()
    place = next(place for place, run in enumerate(evidence.runs) if (run.backend, run.rate_per_s) == ("fused", 100.0))
    latency = evidence.runs[place].latency_ms
    assert latency is not None
    evidence.runs[place] = replace(evidence.runs[place], invalid="late", latency_ms=replace(latency, p99=7777.0))
    chart = chart_of(evidence, "latency-p99")
    figure = drawn(chart)
    assert "fused, does not count" in legend_of(figure)
    at = [line.get_marker() for line in figure.axes[0].get_lines() if (100.0, 7777.0) in points_of(line)]
    assert at == [drawing.REJECTED_MARKERS[2]]
    assert "runs that do not count stand apart, 1 of them" in chart.alt


def test_stages_add_up_to_the_whole_and_their_mean_stands_beside() -> None:
    evidence = made_evidence.compared(rounds=1)
    figure = drawn(chart_of(evidence, "stages-closed"))
    ends = {round(bar.get_y(), 6): bar.get_x() + bar.get_width() for bar in figure.axes[0].patches}  # type: ignore[attr-defined]
    assert list(ends.values()) == [pytest.approx(100.0)] * 9
    totals = [f"{number(run.latency_ms.mean)} ms" for run in evidence.runs if run.loop == "closed" and run.latency_ms]
    assert sorted(text.get_text() for text in figure.axes[0].texts) == sorted(totals)


def test_stages_of_unlike_rounds_add_up_to_the_mean_of_all_requests() -> None:
    evidence = made_evidence.compared({"fused": 950.0})
    first, second = (run for run in evidence.runs if run.users == 1 and run.round < 2)
    evidence.runs = [
        replace(first, answered=300, stages_ms=Stages(1.0, 0.0, 5.0, 0.0, 0.0)),
        replace(second, answered=100, stages_ms=Stages(5.0, 0.0, 1.0, 0.0, 0.0)),
    ]
    figure = drawn(chart_of(evidence, "stages-closed"))
    assert [text.get_text() for text in figure.axes[0].texts] == ["6.00 ms"]
    widths = [round(bar.get_width(), 1) for bar in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert widths == [33.3, 0.0, 66.7, 0.0, 0.0]


def test_a_p99_of_few_requests_is_told_of_in_the_caption() -> None:
    evidence = made_evidence.compared()
    chart = chart_of(evidence, "latency-p99")
    assert "fewer than 100" not in chart.caption
    place = next(place for place, run in enumerate(evidence.runs) if run.loop == "open")
    evidence.runs[place] = replace(evidence.runs[place], answered=99)
    assert "1 run answered fewer than 100 requests" in chart_of(evidence, "latency-p99").caption


def test_the_distribution_is_that_of_the_histograms() -> None:
    evidence = made_evidence.compared({"eager": 450.0, "fused": 950.0}, rounds=1)
    evidence.runs = [replace(run, histogram=[(1.0, 50), (2.0, 49), (10.0, 1)]) for run in evidence.runs]
    chart = chart_of(evidence, "distribution")
    assert "eager at 400 requests/s: 50% within 1.00 ms, 99% within 2.00 ms" in chart.alt
    (first, *_) = drawn(chart).axes[0].get_lines()
    expected = [(0.30103, 1.0), (2.0, 2.0), (2.30103, 10.0)]  # half a request is taken to be above the last one
    assert np.allclose(points_of(first), expected)


def test_errors_are_shares_of_what_was_sent() -> None:
    evidence = made_evidence.compared({"fused": 950.0, "eager": 450.0}, rounds=1)
    evidence.runs = [replace(run, sent=200, errors={"overloaded": 10, "connection": 30}) for run in evidence.runs[:1]]
    chart = chart_of(evidence, "errors")
    figure = drawn(chart)
    assert [bar.get_width() for bar in figure.axes[0].patches] == [5.0, 15.0]  # type: ignore[attr-defined]
    assert legend_of(figure) == ["overloaded", "connection"]
    assert "fused at 1 user 20.0%" in chart.alt


def test_more_loads_than_have_room_are_thinned_and_the_caption_says_so() -> None:
    chart = chart_of(made_evidence.compared(), "stages-open")
    assert chart.caption.endswith("18 of 27 bars are drawn; the table has all.")
    labels = [label.get_text() for label in drawn(chart).axes[0].get_yticklabels()]
    assert labels[:8:7] == ["eager", "compiled"]
    assert (labels[1], labels[6]) == ("100 requests/s", "1200 requests/s")


def test_what_the_search_tried_once_is_a_small_point_and_in_no_line() -> None:
    figure = drawn(chart_of(made_evidence.searched(), "latency-p99"))
    lines = figure.axes[0].get_lines()
    joined = [line for line in lines if line.get_linestyle() != "None" and line.get_marker() in drawing.MARKERS]
    assert [len(points_of(line)) for line in joined] == [6, 6, 6]
    small = [line for line in lines if line.get_markersize() == drawing.SMALL]
    assert [len(points_of(line)) for line in small] == [20, 21, 21]


def test_pictures_of_one_load_say_whether_it_is_the_same_for_all() -> None:
    assert "at the highest load that all hold" in chart_of(made_evidence.compared(), "distribution").caption
    own = chart_of(made_evidence.searched(), "distribution")
    assert "each backend at the highest load that it holds" in own.caption
    evidence = made_evidence.searched()
    evidence.knees[0] = replace(evidence.knees[0], rate_per_s=None, above_per_s=None, note="late", at_least_per_s=200.0)
    unsure = chart_of(evidence, "distribution").caption
    assert "which is no limit where no knee was found: eager." in unsure
    assert "that it holds" not in unsure
    assert legend_of(drawn(own))[:3] == ["eager, 395 requests/s", "compiled, 791 requests/s", "fused, 850 requests/s"]


@pytest.mark.parametrize("evidence", [made_evidence.compared(), made_evidence.searched()], ids=["compared", "searched"])
def test_no_point_of_the_overview_is_cut_off(evidence: Evidence) -> None:
    chart = overview(evidence)
    assert chart is not None
    for axes in drawn(chart).axes:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        shown = [
            point for line in axes.get_lines() if line.get_transform() == axes.transData for point in points_of(line)
        ]
        assert len(shown) > 18
        assert [(x, y) for x, y in shown if not (left <= x <= right and bottom <= y <= top)] == []


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_same_document_gives_the_same_bytes(kind: str) -> None:
    first, second = (image(charts(made_evidence.compared())[0], LIGHT, kind) for _ in range(2))
    assert first == second


def test_pictures_are_what_their_names_say() -> None:
    chart = chart_of(made_evidence.compared(), "throughput")
    picture = Image.open(io.BytesIO(image(chart, LIGHT, "png", {"Source": "here"})))
    assert picture.width == chart.width_in * drawing.PNG_DPI
    assert picture.text["Source"] == "here"  # type: ignore[attr-defined]
    root = ElementTree.fromstring(image(chart, DARK, "svg"))  # noqa: S314  made above
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_axes_have_names_with_units() -> None:
    for chart in [*charts(made_evidence.compared()), overview(made_evidence.compared())]:
        assert chart is not None
        for axes in drawn(chart).axes:
            assert re.search(r"ms|requests/s|%|rows|users|share", axes.get_xlabel()), chart.name
            assert axes.get_ylabel() or axes.get_yticklabels(), chart.name


@pytest.mark.slow
def test_no_texts_of_a_chart_lie_over_each_other() -> None:
    for chart in charts(made_evidence.compared()):
        with mpl.rc_context(drawing.style(chart, LIGHT)):
            figure = Figure(figsize=(chart.width_in, chart.height_in), layout="constrained")
            chart.draw(figure, LIGHT)
            FigureCanvasAgg(figure).draw()  # type: ignore[no-untyped-call]
            (legend,) = figure.legends
            for axes in figure.axes:
                inside = axes.get_tightbbox()
                assert inside is not None
                assert not legend.get_window_extent().overlaps(inside), chart.name
                for axis in (axes.xaxis, axes.yaxis):
                    low, high = sorted(axis.get_view_interval())
                    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
                    boxes = [tick.label1.get_window_extent().shrunk(0.98, 0.9) for tick in ticks]
                    assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes)), (chart.name, axis)
