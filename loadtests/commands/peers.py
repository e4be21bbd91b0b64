"""`peers`: this server against stock LitServe, FastAPI, BentoML, Ray Serve and mosec, under the same load."""

import argparse
import sys
from typing import Any

from tqdm import tqdm

from loadtests import evidence
from loadtests.conditions import ROOT, conditions, recorded
from loadtests.flags import DAY_S, MOST_CONNECTIONS, MOST_ROUNDS, MOST_ROWS, names, numbers, path, some_of, up_to
from loadtests.inference import WIRES
from loadtests.output import require_directory, require_file
from loadtests.peers import wrk
from loadtests.peers.comparison import PeerComparison, PeerPlan
from loadtests.peers.servers import BACKEND, OURS, SERVERS, samples, threads

LOGS = ROOT / "out/peers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--servers", type=some_of(tuple(SERVERS)), default=",".join(SERVERS), help="comma-separated")
    parser.add_argument(
        "--models",
        type=names,
        default="digits,geglu-768",
        help="model directories or names, such as one that costs nothing and one that does",
    )
    parser.add_argument("--wires", type=some_of(WIRES), default=",".join(WIRES), help="comma-separated")
    parser.add_argument(
        "--connections",
        type=numbers(up_to(MOST_CONNECTIONS)),
        default="1,8,32,128",
        help="numbers of connections of the closed loop, comma-separated",
    )
    parser.add_argument(
        "--rounds", type=up_to(MOST_ROUNDS), default=3, help="how often each server is started and loaded"
    )
    parser.add_argument(
        "--seconds", type=up_to(DAY_S), default=5, help="seconds of each load, after a second of warm-up"
    )
    parser.add_argument("--rows", type=up_to(MOST_ROWS), default=1, help="rows in each request")
    parser.add_argument("--logs", type=path, default=LOGS, help="directory for the output of servers that failed")
    parser.add_argument("--json", type=path, required=True, help="file to write the result to")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the file; return 1 where a server or a load failed, 130 after Ctrl-C.

    Raises:
        LoadTestError, OSError: nothing could be measured or written.
    """
    plan = PeerPlan(
        servers=tuple(options.servers),
        models=tuple(options.models),
        wires=tuple(options.wires),
        connections=tuple(options.connections),
        rounds=options.rounds,
        seconds=options.seconds,
        rows=options.rows,
    )
    require_file("--json", options.json)
    require_directory("--logs", options.logs)
    generator = wrk.version()
    comparison = PeerComparison(plan, {model: samples(model, plan.rows) for model in plan.models}, options.logs)
    surroundings = conditions() | {
        "servers": {name: f"{SERVERS[name].title} {SERVERS[name].version()}" for name in plan.servers if name != OURS},
        "backend": BACKEND,
        "threads": threads(),
        "wrk": generator,
        "load": "closed loop, wrk on the cores of the servers",
    }

    command = recorded(sys.argv[1:])

    def write(ended_early: str | None) -> None:
        document = {"peers": comparison.document(), "conditions": surroundings, "command": command}
        evidence.write(options.json, document | {"ended_early": ended_early})

    starts = plan.rounds * len(comparison.starts)
    status = 0
    try:
        with tqdm(total=starts, desc="peers", unit="start") as bar:
            for start in comparison.run():
                write("not all rounds are there")
                bar.set_postfix_str(f"{start.server} {start.model} {start.wire}")
                bar.update()
    except KeyboardInterrupt:
        status = 130
    write("interrupted" if status else None)
    print("\n".join(lines(comparison.document())))
    for cell in comparison.failures:
        where = f"{cell.server}, {cell.model}, {cell.wire}, {cell.connections} connections"
        print(f"error: {where}: {cell.failure}", file=sys.stderr)
    return status or int(bool(comparison.failures))


def lines(document: dict[str, Any]) -> list[str]:
    """Return the result as a table for a terminal."""
    form = "{:<10} {:<10} {:<7} {:>5} {:>10} {:>9} {:>9}  {}"
    table = [form.format("model", "server", "wire", "conn", "requests/s", "p50 ms", "p99 ms", "ours / theirs")]
    for cell in document["cells"]:
        if cell["requests_per_s"] is None:
            why = "failed" if cell["failure"] else "not measured" if cell["is_supported"] else "no such wire"
            said = ["-", "-", "-", why]
        else:
            said = [f"{cell[name]['median']:g}" for name in ("requests_per_s", "p50_ms", "p99_ms")]
            said.append("{median:.3g} ({min:.3g} to {max:.3g})".format(**cell["ratio"]) if cell["ratio"] else "-")
        table.append(form.format(cell["model"], cell["server"], cell["wire"], cell["connections"], *said))
    for each in document["starts"]:
        if each["start_s"] and each["memory_mib"]:
            figures = f"{each['start_s']['median']:.3g} s to start, {each['memory_mib']['median']:.0f} MiB"
            table.append(f"{each['model']:<10} {each['server']:<10} {each['wire']:<7} {figures}")
    return table
