"""The report is one page that needs nothing beside it, and shows every run of the document."""

import html
import os
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from loadtests.evidence import Evidence, Knee
from loadtests.report.charts import NAMES, charts
from loadtests.report.page import conditions, held, write_report
from loadtests.report.page import html as page_of
from loadtests.report.summary import summary
from tests.loadtests import fork_server, made_evidence

DOCUMENTS = {
    each.__name__: each
    for each in (
        made_evidence.compared,
        made_evidence.empty,
        made_evidence.invalid,
        made_evidence.ended_early,
        made_evidence.hostile,
    )
}


class Reader(HTMLParser):
    """Collects the elements and the cells of each row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "link", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def without_charts(evidence: Evidence) -> str:
    return page_of(evidence, [])


def test_a_report_leaves_none_of_an_earlier_one_beside_it_and_all_else_alone(tmp_path: Path) -> None:
    assert {chart.name for chart in charts(made_evidence.compared())} < set(NAMES)
    for name in ("report.html", *(f"{name}.png" for name in NAMES), "mine.png"):
        (tmp_path / name).write_text("earlier")
    written = write_report(made_evidence.empty(), tmp_path)
    assert set(tmp_path.iterdir()) == {*written, tmp_path / "mine.png"}
    assert "earlier" not in (tmp_path / "report.html").read_text()[:20]


@pytest.mark.slow
@pytest.mark.parametrize(
    "evidence",
    [made_evidence.compared({"eager": 450.0, "fused": 950.0}, rounds=1), made_evidence.empty()],
    ids=["compared", "empty"],
)
def test_the_page_asks_for_nothing_that_it_does_not_hold(evidence: Evidence, tmp_path: Path) -> None:
    page, *pictures = write_report(evidence, tmp_path)
    reader = Reader(page.read_text())
    addresses = [
        value
        for _, attributes in reader.elements
        for key, value in attributes.items()
        if key in ("src", "srcset", "href", "data", "action", "poster") and value is not None
    ]
    assert [address[:60] for address in addresses if not address.startswith(("data:", "#"))] == []
    assert {tag for tag, _ in reader.elements} & {"script", "iframe", "object", "embed", "base"} == set()
    assert re.findall(r"url\(|@import", page.read_text()) == []
    assert "default-src 'none'" in page.read_text()
    assert sorted(tmp_path.iterdir()) == sorted([page, *pictures])
    assert [path.stem for path in pictures] == [chart.name for chart in charts(evidence)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_page_has_the_three_sentences_and_what_ended_it_at_its_top(name: str) -> None:
    evidence = DOCUMENTS[name]()
    text = without_charts(evidence)
    for sentence in summary(evidence):
        assert f"<p>{html.escape(sentence).replace('&#x27;', '&#39;').replace('&quot;', '&#34;')}</p>" in text
    assert ('id="ended-early"' in text) == (evidence.ended_early is not None)
    if evidence.ended_early is not None:
        assert text.index('id="ended-early"') < text.index('class="summary"')


def test_every_run_has_a_row_and_says_whether_it_counts() -> None:
    evidence = made_evidence.compared()
    evidence.runs[5] = replace(evidence.runs[5], invalid="the generator was late")
    evidence.runs[7] = replace(evidence.runs[7], wrong=1, other_cpu=0.25)
    text = without_charts(evidence)
    rows = [row for row in Reader(text).rows if len(row) > 20]
    heading, *runs = rows
    assert len(runs) == len(evidence.runs)
    counts = heading.index("counts")
    assert [row[counts] for row in (runs[0], runs[5], runs[7])] == [
        "yes",
        "no: the generator was late",
        "no: 1 of 8 checked replies were wrong",
    ]
    assert [row[heading.index("sent")] for row in runs] == [str(run.sent) for run in evidence.runs]
    assert [row[heading.index("others' CPU, cores")] for row in (runs[0], runs[7])] == ["-", "0.250"]
    assert text.count('<tr class="rejected">') == 2
    assert "2 of 108 runs do not count" in text


def test_no_cell_shows_what_python_makes_of_several_lines() -> None:
    evidence = made_evidence.compared()
    evidence.runs.append(replace(evidence.runs[-1], is_search=True))
    text = without_charts(evidence)
    assert "tried in the search</small>" in text
    assert "(&#39;" not in text


def test_a_run_that_does_not_count_is_in_no_median() -> None:
    evidence = made_evidence.compared()
    before = Reader(without_charts(evidence)).rows
    latency = evidence.runs[0].latency_ms
    assert latency is not None
    extra = replace(evidence.runs[0], round=3, invalid="late", latency_ms=replace(latency, p99=7777.0))
    after = Reader(without_charts(replace(evidence, runs=[*evidence.runs, extra]))).rows

    def of_first_load(rows: list[list[str]]) -> list[str]:
        return next(row for row in rows if row[:2] == ["1 user", "eager"])

    assert of_first_load(before)[2:3] == ["3 of 3"]
    assert of_first_load(after)[2:3] == ["3 of 4"]
    assert of_first_load(before)[3:] == of_first_load(after)[3:]


def test_a_percentile_of_too_few_requests_is_none() -> None:
    evidence = made_evidence.compared()
    counts = (90, 100, 999, 1000)
    evidence.runs = [replace(run, answered=count) for run, count in zip(evidence.runs[:4], counts, strict=True)]
    heading, *runs = [row for row in Reader(without_charts(evidence)).rows if len(row) > 20]
    shown = [[row[heading.index(name)] != "-" for name in ("p90, ms", "p99, ms", "p99.9, ms")] for row in runs]
    assert shown == [[True, False, False], [True, True, False], [True, True, False], [True, True, True]]


def test_no_median_is_taken_of_the_rounds_alone_that_have_a_percentile() -> None:
    evidence = made_evidence.compared()
    evidence.runs[0] = replace(evidence.runs[0], answered=99)
    rows = [row for row in Reader(without_charts(evidence)).rows if row[:2] == ["1 user", "eager"]]
    (shown,) = [row for row in rows if row[2] == "3 of 3"]
    assert [cell == "-" for cell in shown[-5:]] == [False, False, True, True, False]


def test_the_most_goodput_is_none_of_the_single_runs_of_the_search() -> None:
    evidence = made_evidence.compared()
    best = replace(evidence.runs[-1], is_search=True, seconds=0.001)

    def most() -> list[list[str]]:
        return [row for row in Reader(without_charts(evidence)).rows if row[:2] == ["fused", "onednn"]]

    before = most()
    evidence.runs.append(best)
    assert most() == before


def test_rows_that_lose_are_there_with_their_quartiles_and_extremes() -> None:
    rows = Reader(without_charts(made_evidence.compared({"eager": 900.0, "fused": 450.0}))).rows
    (fused,) = [row for row in rows if row[:2] == ["fused", "onednn"]]
    assert re.fullmatch(r"0\.(49|50|51)0\.\d\d to 0\.\d\d over 3 rounds", fused[4])
    (loaded,) = [row for row in rows if row[:2] == ["16 users", "fused"]]
    assert re.fullmatch(r"\d{3}(\d{3} to \d{3}){2}", loaded[4])


def test_the_conditions_are_all_there() -> None:
    evidence = made_evidence.compared()
    shown = dict(conditions(evidence))
    assert shown["repetitions"] == "3 rounds, interleaved"
    assert shown["interval of each run"] == "5.00 s, the warm-up left out"
    assert shown["command"] == "python -m loadtests compare --backends eager,compiled,fused"
    assert {name: shown[name] for name in evidence.conditions} == {k: str(v) for k, v in evidence.conditions.items()}
    rows = Reader(without_charts(evidence)).rows
    assert [[name, value] for name, value in shown.items() if [name, value] not in rows] == []


def test_texts_of_the_document_are_no_markup() -> None:
    text = page_of(made_evidence.hostile(), charts(made_evidence.hostile())[:1])
    tags = {tag for tag, _ in Reader(text).elements}
    assert "script" not in tags
    assert [attributes for tag, attributes in Reader(text).elements if "onerror" in attributes] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_page_is_well_formed(name: str) -> None:
    reader = Reader(without_charts(DOCUMENTS[name]()))
    assert reader.open == []
    headings = [attributes for tag, attributes in reader.elements if tag == "th"]
    assert all(attributes.get("scope") in ("col", "row") for attributes in headings)
    names = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(names) == len(set(names))
    pointed = {str(a[key]) for _, a in reader.elements for key in ("aria-labelledby", "aria-describedby") if key in a}
    assert pointed <= set(names)
    assert {str(a["href"])[1:] for _, a in reader.elements if str(a.get("href")).startswith("#")} <= set(names)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run_loadtests("report", *arguments)


@pytest.mark.slow
def test_the_command_writes_beside_the_document_or_where_it_is_told(tmp_path: Path) -> None:
    evidence = made_evidence.compared(rounds=1)
    document = made_evidence.written(replace(evidence, runs=evidence.runs[-1:]), tmp_path)
    done = run(str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'report.html'}\n"), done.stderr
    done = run(str(document), "--out", str(tmp_path / "a/b"))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'a/b/report.html'}\n"), done.stderr
    assert (tmp_path / "a/b/report.html").read_bytes() == (tmp_path / "report.html").read_bytes()
    assert (tmp_path / "a/b/latency-p99.png").is_file()


def test_the_command_says_what_it_cannot_read(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.returncode == 2
    assert f"error: {tmp_path / 'compare.json'}: no such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_refuses_runs_of_a_backend_that_is_not_named(tmp_path: Path) -> None:
    evidence = made_evidence.compared(rounds=1)
    made_evidence.written(replace(evidence, backends={"eager": "torch"}), tmp_path)
    done = run(str(tmp_path))
    assert done.returncode == 2
    assert "expected runs of the backends ['eager'], got one of ['compiled', 'fused']" in done.stderr


def test_the_command_says_where_it_cannot_write(tmp_path: Path) -> None:
    document = made_evidence.written(made_evidence.empty(), tmp_path)
    (tmp_path / "file").touch()
    done = run(str(document), "--out", str(tmp_path / "file"))
    assert done.returncode == 2
    assert re.fullmatch(rf"error: .*{re.escape(os.fspath(tmp_path / 'file'))}.*\n", done.stderr)


def test_what_is_held_at_least_is_a_figure_only_where_a_run_counts() -> None:
    ended = Knee("eager", None, None, [], "it was late", 70.0)
    assert held(ended, has_figure=True) == ("at least 70.0", "it was late")
    assert held(ended, has_figure=False) == ("-", "it was late")
    one = replace(ended, rounds_per_s=[1008.0])
    assert held(one, has_figure=True) == ("at least 70.0", "1008 where the search came to its end", "it was late")
