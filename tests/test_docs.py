"""What the documents say holds: figures, settings, error codes, names."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from torch import nn

from docs import render
from loadtests.evidence import Evidence, Knee
from loadtests.report.charts import USES
from loadtests.report.points import number
from loadtests.report.summary import STEP, summary
from models.fusion.patterns import PAIR, PATTERNS
from service.errors import STATUS
from service.settings import Settings
from tests.loadtests import made_evidence
from tests.reader import commands_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BENCHMARKING = (ROOT / "docs/benchmarking.md").read_text()
TUTORIAL = (ROOT / "docs/tutorial.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def block(language: str, containing: str) -> str:
    """The one code block of the README that contains a text."""
    (found,) = [code for code in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in code]
    return str(found)


@pytest.mark.parametrize("document", render.DOCUMENTS, ids=lambda path: path.name)
def test_the_generated_parts_are_up_to_date(document: Path) -> None:
    text = document.read_text()
    assert render.rendered(text) == text


def test_every_generated_part_stands_in_a_document() -> None:
    texts = [document.read_text() for document in render.DOCUMENTS]
    assert [name for text in texts for _, name, _ in render.PART.findall(text)] == list(render.PARTS)


def test_every_plot_shows_the_results_as_they_are() -> None:
    assert [name for name in render.PLOTS if not render.is_drawn(name)] == []


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evidence:
    """A README and results of its own, generated from a made comparison."""
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    monkeypatch.setattr(render, "DOCUMENTS", (tmp_path / "README.md",))
    monkeypatch.setattr(render, "PARTS", {"compare": render.compare})
    monkeypatch.setattr(render, "PLOTS", {"compare": render.compare_plot})
    evidence = made_evidence.compared()
    evidence.write(tmp_path / "compare.json")
    (tmp_path / "README.md").write_text("# Title\n\n<!-- generated: compare -->\n<!-- end -->\n\nMore.\n")
    assert render.main(["--check"]) == 1
    assert render.main([]) == 0
    return evidence


def test_the_comparison_under_load_is_a_plot_the_sentences_and_a_table(comparison: Evidence) -> None:
    text = render.DOCUMENTS[0].read_text()
    assert text.startswith("# Title\n\n<!-- generated: compare -->\n![Lines of 99th percentile latency")
    assert text.endswith("<!-- end -->\n\nMore.\n")
    assert "](docs/results/compare.png)\n" in text
    assert " ".join(summary(comparison)) in text
    for knee in comparison.knees:
        rates = ", ".join(number(rate) for rate in knee.rounds_per_s)
        name = f"{knee.backend} ({comparison.backends[knee.backend]})"
        assert f"| {name} | {number(knee.rate_per_s or 0)} ({rates}) |" in text
    assert f"commit {comparison.conditions['commit']}" in text
    with Image.open(render.RESULTS / "compare.png") as picture:
        assert picture.width == 1600


def test_a_comparison_measured_anew_makes_readme_and_plot_outdated(
    comparison: Evidence, capsys: pytest.CaptureFixture[str]
) -> None:
    assert render.main(["--check"]) == 0
    comparison.knees[0] = Knee("eager", 300.0, 310.0, [300.0], None)
    comparison.write(render.RESULTS / "compare.json")
    assert render.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "error: README.md and" in said
    assert "error: compare.png and" in said
    assert render.main([]) == 0
    assert render.main(["--check"]) == 0
    (render.RESULTS / "compare.png").unlink()
    assert render.main(["--check"]) == 1
    assert "README.md" not in capsys.readouterr().err


def test_a_result_of_uncommitted_changes_is_told(comparison: Evidence, capsys: pytest.CaptureFixture[str]) -> None:
    assert render.main(["--check"]) == 0
    assert capsys.readouterr().err == ""
    comparison.conditions["commit"] = "0123abc+"
    comparison.write(render.RESULTS / "compare.json")
    assert render.main([]) == 0
    assert capsys.readouterr().err == ""
    assert render.main(["--check"]) == 0
    assert "warning: compare.json was measured with uncommitted changes" in capsys.readouterr().err


def test_a_comparison_that_cannot_be_drawn_is_refused(comparison: Evidence) -> None:
    made_evidence.empty().write(render.RESULTS / "compare.json")
    with pytest.raises(ValueError, match=r"compare\.json: expected runs of an open loop"):
        render.main([])


def test_what_is_published_of_batch_invariance_is_every_backend_within_the_bound() -> None:
    compared = json.loads((render.RESULTS / "batch-invariance.json").read_text())["batch_invariance"]
    assert {(each["dtype"], each["backend"]) for each in compared} == {
        (dtype, backend) for dtype in ("float32", "bfloat16") for backend in ("eager", "compiled", "fused")
    }
    assert [each["fault"] for each in compared if each["fault"]] == []


@pytest.mark.parametrize("code", STATUS)
def test_every_error_code_stands_beside_its_status(code: str) -> None:
    (row,) = [line for line in README.splitlines() if line.startswith("|") and f"`{code}`" in line]
    assert str(STATUS[code]) in row.split("|")[1]


def test_the_python_of_the_readme_runs_an_engine() -> None:
    names = {"rows": torch.zeros(3, 64)}
    exec(block("python", "load_engine"), names)  # noqa: S102  the README's own code is what is tested
    assert names["outputs"].shape == (3, 10)


def test_the_python_of_the_readme_fuses_a_model_and_undoes_it() -> None:
    blocks = [nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(2)]
    names: dict[str, Any] = {"model": nn.Sequential(*blocks)}
    exec(block("python", "unfuse"), names)  # noqa: S102
    assert str(names["report"]).startswith("swapped 2, left alone 0")
    assert list(names["model"]) == blocks


def test_the_readme_names_every_route(client: httpx.Client) -> None:
    routes = (line.split("|")[1] for line in README.splitlines() if line.startswith("| `"))
    shown = set(re.findall(r"/[\w{}/.]*", " ".join(routes)))
    assert set(client.get("/openapi.json").json()["paths"]) - shown == set()


def test_the_protocol_page_has_every_route_and_what_each_field_means(client: httpx.Client) -> None:
    page = (ROOT / "docs/protocol.md").read_text()
    paths = client.get("/openapi.json").json()["paths"]
    routes = [f"{method.upper()} {path}" for path, operations in paths.items() for method in operations]
    assert re.findall(r"^## `(.*)`$", page, re.MULTILINE) == routes
    rows = re.findall(r"^\| (?:path|body|reply) \| (.*) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 100
    assert [row for row in rows if not all(cell.strip() for cell in row)] == []


def test_a_field_of_the_protocol_shows_its_bounds_and_whether_it_may_be_left_out() -> None:
    inner = {"type": "object", "properties": {"size": {"type": "integer", "minimum": 0, "description": "bytes"}}}
    document = {"components": {"schemas": {"Inner": inner}}}
    schema = {
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "maxLength": 4},
            "parts": {"anyOf": [{"type": "array", "items": {"$ref": "#/components/schemas/Inner"}}, {"type": "null"}]},
        },
    }
    assert render.fields(schema, document) == [
        ("`name`", "string, length ≤ 4", ""),
        ("*parts*", "list of objects or null", ""),
        ("*parts[].size*", "integer, ≥ 0", "bytes"),
    ]


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_for_developers_names_is_there(page: str) -> None:
    named = set(re.findall(r"`((?:service|models|kernels|loadtests|docs|tests)/[\w./]+)`", (ROOT / page).read_text()))
    assert len(named) > 50
    assert [name for name in sorted(named) if "NAME" not in name and not (ROOT / name).exists()] == []


def test_the_architecture_page_names_every_module_of_the_service() -> None:
    modules = {f"service/{path.name}" for path in (ROOT / "service").glob("*.py")} - {"service/__init__.py"}
    assert [name for name in sorted(modules) if name not in ARCHITECTURE] == []


@pytest.mark.parametrize("name", Settings.model_fields)
def test_no_setting_is_described_by_a_value_first_which_its_heading_would_capitalise(name: str) -> None:
    description = str(Settings.model_fields[name].description)
    assert not re.match(r"\S+:", description)


def test_every_setting_has_a_heading_with_its_variable_and_default() -> None:
    page = (ROOT / "docs/settings.md").read_text()
    headings = re.findall(r"^## `--([\w-]+)`$", page, re.MULTILINE)
    assert [name.replace("-", "_") for name in headings] == list(Settings.model_fields)
    for name in Settings.model_fields:
        assert len(re.findall(rf"^`MLP_{name.upper()}`; default `.+`\.$", page, re.MULTILINE)) == 1


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_every_link_to_a_file_of_ours_finds_it(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_every_item_of_a_list_begins_a_line(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    items = re.findall(r"^ *(\d+\. .*?|[-*] .*?)(?=\n\n|\n *[-*] |\n *\d+\. |\Z)", text, re.DOTALL | re.MULTILINE)
    assert [item for item in items if re.search(r"[.;:)]\s(\d+\.|-) ", item)] == []
    assert re.search(r"^- .*\n(  .*\n)*\n- ", text, re.MULTILINE) is None, "a blank line splits a list"


def test_every_document_is_named_in_the_readme() -> None:
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(re.findall(r"\]\(([^)]+)\)", README))


LEAST = """
import sys
from loadtests.measuring.comparison import Plan
users, seconds, warm_up_s, rounds, backends = sys.argv[1:]
plan = Plan(1, [int(each) for each in users.split(",")], None, True, int(rounds), float(seconds), float(warm_up_s), 1)
print(f"{plan.least_s(len(backends.split(','))) / 60:.1f}")
"""


def test_the_tutorial_tells_how_long_its_load_takes_at_the_least() -> None:
    (line,) = [line for line in commands_of(TUTORIAL) if " loadtests compare " in line]
    options = dict(re.findall(r"--([\w-]+) ([\w.,]+)", line))
    chosen = [options[name] for name in ("users", "seconds", "warm-up-s", "rounds", "backends")]
    done = subprocess.run([sys.executable, "-c", LEAST, *chosen], capture_output=True, text=True, check=True, cwd=ROOT)
    assert f"It takes {done.stdout.strip()} minutes at the least" in " ".join(TUTORIAL.split())


def test_the_benchmarking_page_tells_the_size_of_its_model(tmp_path: Path) -> None:
    make, inspect = (
        shlex.split(line.replace("out/mine", str(tmp_path / "mine"))) for line in commands_of(BENCHMARKING)[:2]
    )
    for command in (make, inspect):
        done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=True, cwd=ROOT)
    assert f"{re.findall('([0-9,]{9,}) parameters', BENCHMARKING)[0]}\n" in done.stdout
    assert f"{re.findall('([0-9,]{9,}) FLOPs a row', BENCHMARKING)[0]}\n" in done.stdout


def test_the_benchmarking_page_has_the_limits_that_the_report_has() -> None:
    text = " ".join(BENCHMARKING.split())
    assert re.findall(r"finer than the (\d+)%", text) == [f"{100 * STEP:g}"]
    assert re.findall(r"Past (\d+)% of a core", text) == [f"{use.limit:g}" for use in USES if use.limit]


def test_a_cosine_is_shown_as_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads((render.RESULTS / "fuse-minilm.json").read_text())
    for each in document["fuse"]:
        each["cosine"] = 1.25
    (tmp_path / "fuse-minilm.json").write_text(json.dumps(document))
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    assert "the smallest cosine between two embeddings is 1.25000." in render.fuse()


def test_an_overload_that_ended_early_is_shown_as_such() -> None:
    document = json.loads((render.RESULTS / "overload.json").read_text())
    assert "Capacity" in render.overload(document)
    del document["overload"]
    assert render.overload(document | {"ended_early": "the server ended"}) == "Not measured: the server ended.\n"


def test_the_readme_lists_the_names_of_every_block_that_fuse_knows() -> None:
    rows = [set(re.findall(r"`(\w+)`", line)) for line in README.splitlines() if line.startswith("| ")]
    known = [set(pattern.needed) for pattern in PATTERNS] + [
        {*PAIR, *(it for each in PAIR.values() for it in each.needed)}
    ]
    assert [names for names in known if names not in rows] == []
