"""Writes what the documents show of results: `python -m docs.render`; with `--check`, says whether it is current.

`--check` warns of results that no commit has the code of.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. A plot is a PNG file beside the JSON file of the
same name that it shows, and holds the digest of that file.
"""

import hashlib
import itertools
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from loadtests.conditions import told_commit
from loadtests.evidence import Evidence, read
from loadtests.measuring.generator_watch import CPU_LIMIT
from loadtests.measuring.objective import Verdict
from loadtests.report.charts import overview
from loadtests.report.drawing import LIGHT, Chart, image
from loadtests.report.points import Point, held, number, p50_ms, p99_ms, request_of
from loadtests.report.summary import knee_ratio, knees_of, summary

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]
DOCUMENTS = tuple(
    ROOT / name
    for name in ("README.md", "docs/measurements.md", "docs/peers.md", "docs/protocol.md", "docs/settings.md")
)
RESULTS = ROOT / "docs/results"
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
DIGEST = "Digest"  # the field of a PNG file


def result(name: str) -> dict[str, Any]:
    """Read docs/results/NAME.json."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def measured_with(conditions: dict[str, Any]) -> str:
    """Return the versions and the commit that figures were measured with."""
    return f"torch {conditions['torch']}, python {conditions['python']}, commit {told_commit(conditions['commit'])}."


def host(conditions: dict[str, Any], generator: str) -> str:
    """Return what figures were measured on, and how the server and what loaded it divided the cores."""
    cores = f"{conditions['processor']}, {conditions['cores']} cores"
    if "server_cpus" not in conditions:
        return f"{cores}, shared with {generator}"
    return f"{cores}: the server on {conditions['server_cpus']}, {generator} on {conditions['generator_cpus']}"


def overhead() -> str:
    """Render docs/results/overhead.json, which `python -m loadtests overhead --json` writes."""
    document = result("overhead")
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
        f"{host(conditions, 'the client')}; {versions}; "
        f"commit {told_commit(conditions['commit'])}.",
    ]
    return "\n".join(rows) + "\n"


def saturation(document: dict[str, Any]) -> str:
    """Render docs/results/saturation.json, which `python -m loadtests saturation --json` writes."""
    plan, conditions = document["plan"], document["conditions"]
    rows = ["| started with | rows a batch | served | the model alone | ratio (extremes) |", "|---|---|---|---|---|"]
    for each in document["saturation"]:
        served, alone, ratio = each["served_rows_per_s"], each["model_rows_per_s"], each["ratio"]
        if ratio is None:
            rows.append(f"| `{' '.join(each['flags'])}` | not measured | | | |")
            continue
        rows.append(
            f"| `{' '.join(each['flags'])}` | {each['batch_rows']['median']:.0f} | {served['median']:.0f} rows/s "
            f"| {alone['median']:.0f} rows/s | {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) |"
        )
    loads = max(len(each["rounds"]) for each in document["saturation"])
    ended = f" ({document['ended_early']})" if document["ended_early"] else ""
    rows += [
        "",
        f"Model {plan['model']}, {plan['connections']} connections, {plan['rows']} rows a request, "
        f"{conditions['wire']}; medians of {loads} interleaved loads of {plan['seconds']} s{ended}; "
        f"{host(conditions, 'wrk ' + conditions['wrk'])}; {measured_with(conditions)}",
    ]
    return "\n".join(rows) + "\n"


def overload(document: dict[str, Any]) -> str:
    """Render docs/results/overload*.json, the `scenario.json` of `python -m loadtests scenario overload`."""
    if document["ended_early"]:
        return f"Not measured: {document['ended_early']}.\n"
    found, conditions = document["overload"], document["conditions"]
    rows = ["| objective | wanted | got | |", "|---|---|---|---|"]
    for each in (Verdict(**each) for each in document["verdicts"]):
        got = "not measured" if each.got is None else f"{each.got:.3g} {each.unit}"
        wanted = f"{'>=' if each.is_floor else '<='} {each.limit:g} {each.unit}"
        rows.append(f"| {each.what} | {wanted} | {got} | {'met' if each.has_passed else 'missed'} |")
    (backend,) = document["backends"]
    rows += [
        "",
        f"By `{shlex.join(document['command'])}`. Capacity {found['capacity_before_per_s']:.0f} requests/s before and "
        f"{found['capacity_after_per_s']:.0f} after, with a p99 of {found['capacity_p99_ms']:.0f} ms; "
        f"{document['seconds']:g} s at {found['offered_per_s']:.0f} a second, {found['refused']} of them refused. "
        f"Model {document['model']}, backend {backend}, {document['rows']} rows a request, {document['wire']}; "
        f"{host(conditions, 'the load generator')}; {measured_with(conditions)}",
    ]
    return "\n".join(rows) + "\n"


def soak(document: dict[str, Any]) -> str:
    """Render docs/results/soak.json, which `tests/service/chaos/soak.py --json` writes."""
    callers, servers, conditions = document["callers_counted"], document["servers_logged"], document["conditions"]
    rows = ["| status | counted by the callers | by the servers |", "|---|---|---|"]
    rows += [f"| {status} | {callers[status]} | {servers[status]} |" for status in sorted(servers)]
    disturbances, growth = document["disturbances"], max(document["growth_kib"].values())
    rows += [
        "",
        f"{document['seconds']:g} s at {document['requests_per_s']:.0f} requests/s, 70% of capacity; "
        f"{disturbances['kill']} workers killed, {disturbances['reload']} reloads, {disturbances['switch']} switches "
        f"of the default backend. No process grew by more than {growth / 1024:.1f} MiB once it was warm; the slowest "
        f"answer took {document['slowest_s']:.1f} s; faults found: {len(document['problems'])}. "
        f"{host(conditions, 'the callers')}; {measured_with(conditions)}",
    ]
    return "\n".join(rows) + "\n"


def backends() -> str:
    """Render docs/results/bench-cpu-*.json, which `python -m models bench geglu-768 --json` writes."""
    rows = ["| dtype | rows | eager | compiled | fused |", "|---|---|---|---|---|"]
    for dtype in ("float32", "bfloat16"):
        document = result(f"bench-cpu-{dtype}")
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
        f"Medians of {conditions['repetitions']} interleaved rounds; for compiled and fused also "
        "the ratio of eager's time to theirs, with quartiles; "
        f"{conditions['processor']}, {conditions['cores']} cores, {conditions['threads']} threads; "
        f"{measured_with(conditions)}",
    ]
    return "\n".join(rows) + "\n"


def batch_invariance() -> str:
    """Render docs/results/batch-invariance.json, which `python -m models batch-invariance geglu-768 --json` writes."""
    document = result("batch-invariance")
    rows = [
        "| dtype | backend | alone, from float64 | batched, from float64 | batched, from alone | within the bound |",
        "|---|---|---|---|---|---|",
    ]
    compared = document["batch_invariance"]
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
        f"{compared[0]['rows']} rows at two places each in batches of {sizes_shown}; model "
        f"{conditions['model']['name']}; {conditions['processor']}, {conditions['threads']} threads; "
        f"{measured_with(conditions)}",
    ]
    return "\n".join(rows) + "\n"


def compare() -> str:
    """Render docs/results/compare.json, which `python -m loadtests compare` leaves behind."""
    evidence = read(RESULTS / "compare.json")
    base, conditions = next(iter(evidence.backends)), evidence.conditions
    knees, shown = knees_of(evidence), held(evidence)
    rows = [
        f"![{compare_chart(evidence).alt}](docs/results/compare.png)",
        "",
        " ".join(summary(evidence)),
        "",
        f"| backend | holds, requests/s (rounds) | times {base} (extremes) | at | median | p99 |",
        "|---|---|---|---|---|---|",
    ]
    for name, implementation in evidence.backends.items():
        knee, ratio = knees.get(name), knee_ratio(evidence, name, base)
        rates = ", ".join(number(rate) for rate in knee.rounds_per_s) if knee else ""
        cells = [
            f"{name} ({implementation})",
            f"{number(knee.rate_per_s or 0)} ({rates})" if knee else "none",
            "1" if name == base else f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio else "none",
            *(latencies(shown[name]) if name in shown else ("none", "none", "none")),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {conditions[name]}" for name in ("python", "torch", "litserve", "uvicorn"))
    seconds = max((run.seconds for run in evidence.runs), default=0)
    rounds = len({run.round for run in evidence.runs})
    rows += [
        "",
        f"Model {evidence.model}, {request_of(evidence)}, {evidence.wire}; {rounds} interleaved rounds of up "
        f"to {seconds:.1f} s, medians and extremes, latency from the intended start; "
        f"{host(conditions, 'the load generator')}; {versions}; "
        f"commit {told_commit(conditions['commit'])}. "
        f"Measured by `{shlex.join(evidence.command)}`; docs/benchmarking.md explains how to read it.",
    ]
    return "\n".join(rows) + "\n"


def latencies(point: Point) -> tuple[str, str, str]:
    """Return a load, and the median and the p99 under it with their extremes."""
    spreads = [point.spread(figure) for figure in (p50_ms, p99_ms)]
    p50, p99 = (
        f"{number(each.median)} ms ({number(each.low)} to {number(each.high)})" if each else "none" for each in spreads
    )
    rounds = "1 round" if point.rounds == 1 else f"{point.rounds} rounds"
    return f"{point.load}, {rounds}", p50, p99


def compare_chart(evidence: Evidence) -> Chart:
    """Return the chart of docs/results/compare.png.

    Raises:
        ValueError: the document has no run that can be drawn.
    """
    chart = overview(evidence)
    if chart is None:
        raise ValueError("docs/results/compare.json: expected runs of an open loop that were answered, got none")
    return chart


def compare_plot(digest: str) -> bytes:
    """Draw docs/results/compare.json; the file's digest stands in the picture."""
    return image(compare_chart(read(RESULTS / "compare.json")), LIGHT, "png", {DIGEST: digest})


def request_path() -> str:
    """Render docs/results/request-path.json, which `python -m service.profile --json` writes."""
    from service.profile import STAGES

    document = result("request-path")
    wires, conditions = document["wires"], document["conditions"]
    rows = [f"| part | {' | '.join(wires)} |", f"|---|{'---|' * len(wires)}"]
    for stage, what in [*STAGES.items(), ("total", ""), ("turn", "all of it as seen from outside, with the driving")]:
        cells = [wire[stage] for wire in wires.values()]
        shown = " | ".join(f"{cell['median']:.1f} ({cell['min']:.1f} to {cell['max']:.1f})" for cell in cells)
        rows.append(f"| {stage}{f': {what}' if what else ''} | {shown} |")
    rows += [
        "",
        f"Microseconds per request of one row: medians of {document['rounds']} rounds, with extremes, "
        f"{document['requests_a_turn']} requests per turn, backend `{document['backend']}` "
        f"({document['implementation']}); {conditions['processor']}, {measured_with(conditions)}",
    ]
    return "\n".join(rows) + "\n"


def fuse() -> str:
    """Render docs/results/fuse-minilm.json, which `python -m examples.fuse_minilm --json` writes."""
    document = result("fuse-minilm")
    rows = ["| sentences | tokens in each | as it came | fused | ratio (quartiles) |", "|---|---|---|---|---|"]
    rows += [
        f"| {each['sentences']} | {each['tokens']} | {each['plain_ms']:.1f} ms | {each['fused_ms']:.1f} ms "
        f"| {each['ratio']:.2f} ({each['ratio_q1']:.2f} to {each['ratio_q3']:.2f}) |"
        for each in document["fuse"]
    ]
    conditions = document["conditions"]
    unmet = document["unmet"]
    first, again = (
        f"{each['ratio']:.2f} ({each['ratio_q1']:.2f} to {each['ratio_q3']:.2f})"
        for each in (unmet["first"], unmet["again"])
    )
    rows += [
        "",
        f"{unmet['token_counts']} token counts from {unmet['least_tokens']} to {unmet['most_tokens']}, one sentence "
        f"each: a ratio of {first} when they are first met, and of {again} when they come again. At a new "
        f"count the first pass takes {unmet['extra_ms']:.1f} ms longer, and oneDNN keeps {unmet['kept_mib']:.1f} MiB "
        "for the two products of a block.",
        "",
        f"Medians of {conditions['repetitions']} interleaved rounds of the whole model, {conditions['dtype']}; "
        f"{conditions['processor']}, {conditions['cores']} cores, {conditions['threads']} "
        f"thread{'s' if conditions['threads'] > 1 else ''}; {measured_with(conditions)} "
        f"{document['copied_bytes'] / 2**20:.0f} MiB of weights are held a second time; "
        f"the smallest cosine between two embeddings is {min(each['cosine'] for each in document['fuse']):.5f}.",
    ]
    return "\n".join(rows) + "\n"


def settings() -> str:
    """Render the settings' own descriptions."""
    from service.settings import Settings

    rows = ["| flag | default | what it does |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        rows.append(f"| `--{name.replace('_', '-')}` | `{default_of(field)}` | {field.description} |")
    return "\n".join(rows) + "\n"


def setting_headings() -> str:
    """Render the same, a heading for each, so that it can be linked to."""
    from service.settings import ENV_PREFIX, Settings

    parts = [
        f"## `--{name.replace('_', '-')}`\n\n{str(field.description)[0].upper()}{str(field.description)[1:]}.\n\n"
        f"`{ENV_PREFIX}{name.upper()}`; default `{default_of(field)}`.\n"
        for name, field in Settings.model_fields.items()
    ]
    return "\n".join(parts)


def default_of(field: "FieldInfo") -> str:
    """Return a setting's default as it is written on a command line."""
    default = field.default
    return ",".join(default) if isinstance(default, tuple) else "unset" if default is None else str(default)


def if_measured(name: str, render: Callable[[dict[str, Any]], str]) -> Callable[[], str]:
    """Return what renders docs/results/NAME.json, or says that there is none."""
    return lambda: render(result(name)) if (RESULTS / f"{name}.json").exists() else "Not measured yet.\n"


def peers(document: dict[str, Any]) -> str:
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
        f"request, backend `{conditions['backend']}`, {conditions['threads']} threads; "
        f"{host(conditions, 'wrk ' + conditions['wrk'])}; python {conditions['python']}, "
        f"torch {conditions['torch']}, commit {told_commit(conditions['commit'])}."
    )
    if document["ended_early"]:
        lines += ["", f"Not whole: {document['ended_early']}."]
    return "\n".join(lines) + "\n"


def peers_cell(cell: dict[str, Any]) -> str:
    """Render one server under one load."""
    if cell["requests_per_s"] is None:
        return "failed" if cell["failure"] else "no such wire" if not cell["is_supported"] else "—"
    rate, p50, p99 = (cell[name]["median"] for name in ("requests_per_s", "p50_ms", "p99_ms"))
    times = ", ".join(f"{time:,.0f}" if time >= 100 else f"{time:.3g}" for time in (p50, p99))
    shown = f"{rate:,.0f}/s; {times} ms" + ("; wrk was the limit" if cell["generator_cpu"] > CPU_LIMIT else "")
    if cell["ratio"] is None or cell["server"] == "ours":
        return shown
    ratio = cell["ratio"]
    return f"{shown}; {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"


def protocol() -> str:
    """Render the server's own OpenAPI document, a table a route."""
    document = openapi()
    sections = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            said = operation.get("description") or f"{operation['summary']}."
            sections += [
                f"## `{method.upper()} {path}`",
                "",
                " ".join(said.split()),
                "",
                *route_table(operation, document),
                "",
            ]
    error = fields({"$ref": "#/components/schemas/ErrorReply"}, document)
    sections += ["## Errors", "", "Of every route:", "", "| field | type | meaning |", "|---|---|---|"]
    sections += [f"| {' | '.join(row)} |" for row in error]
    return "\n".join(sections) + "\n"


def openapi() -> dict[str, Any]:
    """Return the document that a server of the bundled model serves at /openapi.json."""
    from models.config import ModelConfig
    from models.directory import resolve
    from service.server import Server
    from service.settings import Settings

    model = resolve("digits")
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Settings(device="cpu", dtype="float32"), model, ModelConfig.load(model), Path(directory))
        document: dict[str, Any] = server.host.app.openapi()
    return document


def route_table(operation: dict[str, Any], document: dict[str, Any]) -> list[str]:
    """Render what one route takes and answers."""
    rows = []
    for parameter in operation.get("parameters", []):
        schema = parameter["schema"]
        meaning = parameter.get("description") or " or ".join(schema["enum"])
        mark = "`" if parameter["required"] else "*"
        rows.append((parameter["in"], f"{mark}{parameter['name']}{mark}", type_of(schema), meaning))
    for where, described in (("body", operation.get("requestBody", {})), ("reply", operation["responses"]["200"])):
        for media_type, each in described.get("content", {}).items():
            found = fields(each["schema"], document)
            whole = ("the whole", f"`{media_type}`", each["schema"].get("description", "not in fields"))
            rows += [(where, *row) for row in found or [whole]]
    return ["| in | field | type | meaning |", "|---|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def fields(schema: dict[str, Any], document: dict[str, Any], prefix: str = "") -> list[tuple[str, str, str]]:
    """Return name, type and meaning of each field of a schema, those inside it after the one that holds them."""
    schema = resolved(schema, document)
    rows = []
    for name, field in schema.get("properties", {}).items():
        place, inner, suffix = f"{prefix}{name}", unwrapped(field), ""
        if inner.get("type") == "array" and "items" in inner:
            inner, suffix = unwrapped(inner["items"]), "[]"
        elif isinstance(inner.get("additionalProperties"), dict):
            inner, suffix = inner["additionalProperties"], ".{}"
        mark = "`" if name in schema.get("required", []) else "*"
        rows.append((f"{mark}{place}{mark}", type_of(field), field.get("description", "")))
        if "$ref" in inner:
            rows += fields(inner, document, f"{place}{suffix}.")
    return rows


def resolved(schema: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference to the schema it names."""
    if "$ref" not in schema:
        return schema
    found: dict[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def unwrapped(schema: dict[str, Any]) -> dict[str, Any]:
    """Return what a schema is where it is not null."""
    found: dict[str, Any] = next((each for each in schema.get("anyOf", []) if each.get("type") != "null"), schema)
    return found


def type_of(schema: dict[str, Any]) -> str:
    """Return a schema's type in a few words, with its bounds."""
    kinds = [each for each in schema.get("anyOf", []) if each.get("type") == "null"]
    inner = unwrapped(schema)
    kind = str(inner.get("type", "object" if "$ref" in inner else "any"))
    if kind == "array":
        items = unwrapped(inner.get("items", {}))
        of = (
            "numbers, nested"
            if "anyOf" in inner.get("items", {})
            else f"{type_of(items).partition(',')[0]}s"
            if items
            else "any"
        )
        kind = f"list of {of}"
    bounds = [
        f"{sign} {inner[key]:,}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("maxLength", "length ≤"))
        if key in inner
    ]
    return ", ".join([kind, *bounds]) + (" or null" if kinds else "")


PARTS: dict[str, Callable[[], str]] = {
    "compare": compare,
    "backends": backends,
    "settings": settings,
    "fuse": fuse,
    "overhead": overhead,
    "saturation": if_measured("saturation", saturation),
    "overload": if_measured("overload", overload),
    "overload_all_cores": if_measured("overload-all-cores", overload),
    "soak": if_measured("soak", soak),
    "request_path": request_path,
    "batch_invariance": batch_invariance,
    "peers": if_measured("peers", peers),
    "protocol": protocol,
    "setting_headings": setting_headings,
}
# Name to what draws docs/results/NAME.json, given the file's digest.
PLOTS: dict[str, Callable[[str], bytes]] = {"compare": compare_plot}


def rendered(text: str) -> str:
    """Return the text with every generated part made anew."""
    return PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}{part[3]}", text)


def digest_of(name: str) -> str:
    """Return the digest of docs/results/NAME.json."""
    return hashlib.sha256((RESULTS / f"{name}.json").read_bytes()).hexdigest()


def is_drawn(name: str) -> bool:
    """Return whether docs/results/NAME.png shows docs/results/NAME.json as it is now."""
    path = RESULTS / f"{name}.png"
    if not path.is_file():
        return False
    with Image.open(path) as picture:
        return bool(picture.info.get(DIGEST) == digest_of(name))


def is_of_changes(path: Path) -> bool:
    """Return whether a result was measured on a tree with changes, which nobody can check out."""
    document = json.loads(path.read_text())
    if isinstance(document, list):  # aot.json, which is of a source and no measurement
        return False
    return str(document["conditions"]["commit"]).endswith("+")


def main(arguments: list[str]) -> int:
    """Write the parts and the plots, or check them; return the exit status."""
    outdated = [RESULTS / f"{name}.png" for name in PLOTS if not is_drawn(name)]
    if arguments != ["--check"]:
        for path in outdated:
            path.write_bytes(PLOTS[path.stem](digest_of(path.stem)))
    for document in DOCUMENTS:
        text = document.read_text()
        new = rendered(text)
        if arguments != ["--check"]:
            document.write_text(new)
        elif new != text:
            outdated.append(document)
    if arguments != ["--check"]:
        return 0
    for path in sorted(path for path in RESULTS.glob("*.json") if is_of_changes(path)):
        told = "was measured with uncommitted changes, which nobody can check out; commit them and measure anew"
        print(f"warning: {path.relative_to(ROOT)} {told}", file=sys.stderr)
    for path in outdated:
        name = path.relative_to(ROOT)
        print(f"error: {name} and what it is generated from differ; run `make docs`", file=sys.stderr)
    return int(bool(outdated))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
