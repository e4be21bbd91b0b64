"""Writes the generated parts of the documents: `python -m docs.render`; with `--check`, says whether they are current.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs/peers.md")
RESULTS = ROOT / "docs/results"
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def overhead() -> str:
    """Render docs/results/overhead.json, which `python -m loadtests overhead --json` writes."""
    document: dict[str, Any] = json.loads((RESULTS / "overhead.json").read_text())
    results, conditions = document["overhead"], document["conditions"]
    rows = ["| client | bare uvicorn echo | this server | ratio, median of rounds (extremes) |", "|---|---|---|---|"]
    rows += [
        f"| {each['client']} | {each['echo_us']:.0f} us | {each['server_us']:.0f} us "
        f"| {each['ratio']:.2f} ({each['ratio_min']:.2f} to {each['ratio_max']:.2f}) |"
        for each in results
    ]
    versions = ", ".join(f"{name} {conditions[name]}" for name in ("python", "torch", "litserve", "uvicorn", "uvloop"))
    rows += [
        "",
        f"Medians of {results[0]['requests']} requests to each, backend `{results[0]['backend']}`; "
        f"{conditions['processor']}, {conditions['cores']} cores, shared with the client; {versions}; "
        f"commit {conditions['commit']}.",
    ]
    return "\n".join(rows) + "\n"


def backends() -> str:
    """Render docs/results/bench-cpu-*.json, which `python -m models bench geglu-768 --json` writes."""
    rows = ["| dtype | rows | eager | compiled | fused |", "|---|---|---|---|---|"]
    for dtype in ("float32", "bfloat16"):
        document: dict[str, Any] = json.loads((RESULTS / f"bench-cpu-{dtype}.json").read_text())
        measured = {(each["rows"], each["backend"]): each for each in document["bench"]}
        for count in sorted({count for count, _ in measured}):
            cells = [f"{measured[count, 'eager']['median_us'] / 1e3:.2f} ms"]
            for name in ("compiled", "fused"):
                each = measured[count, name]
                ratio = f"{each['ratio']:.2f} ({each['ratio_q1']:.2f} to {each['ratio_q3']:.2f})"
                cells.append(f"{each['median_us'] / 1e3:.2f} ms, {ratio}")
            rows.append(f"| {dtype} | {count} | {' | '.join(cells)} |")
        means = document["geometric_mean_ratio_to_eager"]
        rows.append(f"| {dtype} | geometric mean | 1 | {means['compiled']:.2f} | {means['fused']:.2f} |")
    conditions = document["conditions"]
    rows += [
        "",
        f"Medians of {conditions['repetitions']} interleaved rounds, and eager's time over this one's, with quartiles; "
        f"{conditions['processor']}, {conditions['cores']} cores, {conditions['threads']} threads; "
        f"torch {conditions['torch']}, python {conditions['python']}, commit {conditions['commit']}.",
    ]
    return "\n".join(rows) + "\n"


def batching() -> str:
    """Render docs/results/batch-difference.json, which `python -m models batching geglu-768 --json` writes."""
    document: dict[str, Any] = json.loads((RESULTS / "batch-difference.json").read_text())
    rows = [
        "| dtype | backend | alone, from float64 | batched, from float64 | batched, from alone | within the bound |",
        "|---|---|---|---|---|---|",
    ]
    compared = document["batching"]
    for dtype, backend in dict.fromkeys((each["dtype"], each["backend"]) for each in compared):
        sizes = [each for each in compared if (each["dtype"], each["backend"]) == (dtype, backend)]
        cells = [
            f"{max(each[key]['absolute'] for each in sizes):.1e} ({max(each[key]['relative'] for each in sizes):.1e})"
            for key in ("alone_from_exact", "batched_from_exact", "batched_from_alone")
        ]
        verdict = "no" if any(each["fault"] for each in sizes) else "yes"
        rows.append(f"| {dtype} | {backend} | {' | '.join(cells)} | {verdict} |")
    conditions = document["conditions"]
    sizes_shown = ", ".join(str(size) for size in dict.fromkeys(each["batch_rows"] for each in compared))
    rows += [
        "",
        "Largest absolute differences, and largest relative to the row's largest output, of "
        f"{compared[0]['rows']} rows in batches of each of {sizes_shown}; model {conditions['model']['name']}; "
        f"{conditions['processor']}, {conditions['threads']} threads; "
        f"torch {conditions['torch']}, python {conditions['python']}, commit {conditions['commit']}.",
    ]
    return "\n".join(rows) + "\n"


def request_path() -> str:
    """Render docs/results/request-path.json, which `python -m service.profile --json` writes."""
    from service.profile import STAGES

    document: dict[str, Any] = json.loads((RESULTS / "request-path.json").read_text())
    wires, conditions = document["wires"], document["conditions"]
    rows = [f"| part | {' | '.join(wires)} |", f"|---|{'---|' * len(wires)}"]
    for stage, what in [*STAGES.items(), ("total", "")]:
        cells = [wire[stage] for wire in wires.values()]
        shown = " | ".join(f"{cell['median']:.1f} ({cell['min']:.1f} to {cell['max']:.1f})" for cell in cells)
        rows.append(f"| {stage}{f': {what}' if what else ''} | {shown} |")
    rows += [
        "",
        f"Microseconds a request of one row, medians of {document['rounds']} rounds and extremes, "
        f"{document['requests_a_turn']} requests a turn, backend `{document['backend']}`; {conditions['processor']}, "
        f"torch {conditions['torch']}, python {conditions['python']}, commit {conditions['commit']}.",
    ]
    return "\n".join(rows) + "\n"


def settings() -> str:
    """Render the settings' own descriptions."""
    from service.settings import Settings

    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = ",".join(default) if isinstance(default, tuple) else "unset" if default is None else str(default)
        rows.append(f"| `--{name.replace('_', '-')}` | `{shown}` | {field.description} |")
    return "\n".join(rows) + "\n"


def peers() -> str:
    """Render docs/results/peers.json, which `python -m loadtests peers --json` writes; say so where it is not there."""
    file = RESULTS / "peers.json"
    return peers_tables(json.loads(file.read_text())) if file.exists() else "Not measured yet.\n"


def peers_tables(document: dict[str, Any]) -> str:
    """Render a table for each model and wire: a server a row, a number of connections a column."""
    plan, conditions = document["peers"]["plan"], document["conditions"]
    cells = {(c["model"], c["wire"], c["server"], c["connections"]): c for c in document["peers"]["cells"]}
    starts = {(each["model"], each["wire"], each["server"]): each for each in document["peers"]["starts"]}
    versions: dict[str, str] = conditions["servers"]
    lines, notes = [], []
    for model, wire in itertools.product(plan["models"], plan["wires"]):
        counts = [f"{count} connection{'s' if count > 1 else ''}" for count in plan["connections"]]
        lines += [f"**{model}, {wire}**", "", f"| server | start | memory | {' | '.join(counts)} |"]
        lines += ["|---" * (3 + len(counts)) + "|"]
        for server in plan["servers"]:
            start = starts[model, wire, server]
            row = [versions.get(server, "this server")]
            row += [f"{start['start_s']['median']:.1f} s" if start["start_s"] else "—"]
            row += [f"{start['memory_mib']['median']:.0f} MiB" if start["memory_mib"] else "—"]
            for count in plan["connections"]:
                cell = cells[model, wire, server, count]
                row.append(peers_cell(cell))
                if cell["failure"]:
                    notes.append(f"- {server}, {model}, {wire}, connections {count}: {cell['failure']}")
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
    lines += ["Failed:", "", *notes, ""] if notes else []
    lines.append(
        f"Medians of {plan['rounds']} rounds of {plan['seconds']} s, {plan['rows']} row{'s' * (plan['rows'] > 1)} a "
        f"request, backend `{conditions['backend']}`, {conditions['threads']} threads; {conditions['processor']}, "
        f"{conditions['cores']} cores, shared with wrk {conditions['wrk']}; python {conditions['python']}, "
        f"torch {conditions['torch']}, commit {conditions['commit']}."
    )
    if document["ended_early"]:
        lines += ["", f"Not whole: {document['ended_early']}."]
    return "\n".join(lines) + "\n"


def peers_cell(cell: dict[str, Any]) -> str:
    """Render one server under one load."""
    if cell["requests_per_s"] is None:
        return "failed" if cell["failure"] else "no such wire" if not cell["is_supported"] else "—"
    rate, p50, p99 = (cell[name]["median"] for name in ("requests_per_s", "p50_ms", "p99_ms"))
    shown = f"{rate:,.0f}/s; {p50:.3g}, {p99:.3g} ms"
    if cell["ratio"] is None or cell["server"] == "ours":
        return shown
    ratio = cell["ratio"]
    return f"{shown}; {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


PARTS: dict[str, Callable[[], str]] = {
    "backends": backends,
    "batching": batching,
    "overhead": overhead,
    "request_path": request_path,
    "settings": settings,
    "peers": peers,
}


def rendered(text: str) -> str:
    """Return the text with every generated part made anew."""
    return PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}{part[3]}", text)


def main(arguments: list[str]) -> int:
    """Write the parts, or check them; return the exit status."""
    status = 0
    for document in DOCUMENTS:
        text = document.read_text()
        new = rendered(text)
        if arguments != ["--check"]:
            document.write_text(new)
        elif new != text:
            name = document.relative_to(ROOT)
            print(f"error: {name} and what it is generated from differ; run `make docs`", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
