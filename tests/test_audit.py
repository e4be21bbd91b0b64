"""`make audit` against a source of known vulnerabilities of our own, which speaks OSV's protocol."""

import json
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.service.running_server import ROOT

pytestmark = pytest.mark.slow  # asks about each pin

PIN = re.compile(r"^([\w.-]+)(?:\[\w+\])?==([^;\s]+)", re.MULTILINE)
FLAW: dict[str, Any] = {"id": "PYSEC-0000-1", "details": "planted", "modified": "2026-01-01T00:00:00Z", "affected": []}
ARGUMENT = re.compile(r"^\| ([A-Z]+-\S+) \| (\S+) (\S+) \|", re.MULTILINE)  # a row of CONTRIBUTING.md's table


class Source:
    """Knows of one flaw in what `flawed` names, or of one for each of `aliases`, its other names."""

    def __init__(self) -> None:
        self.flawed = ""
        self.aliases: tuple[str, ...] = ("",)
        self.asked: set[tuple[str, str]] = set()
        source = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                query = json.loads(self.rfile.read(int(self.headers["content-length"])))
                name = query["package"]["name"]
                source.asked.add((name, query["version"]))
                package = {"name": name, "ecosystem": "PyPI"}
                flaw = FLAW | {"affected": [{"package": package, "versions": [query["version"]]}]}
                flaws = [
                    flaw | {"id": f"PYSEC-0000-{number}", "aliases": [alias] if alias else []}
                    for number, alias in enumerate(source.aliases, 1)
                ]
                body = json.dumps({"vulns": flaws if name == source.flawed else []}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.05,)).start()

    def audit(self) -> subprocess.CompletedProcess[str]:
        arguments = f"ARGS=-s osv --osv-url http://127.0.0.1:{self.http.server_port}"
        command = ["make", "-o", ".venv/dev.stamp", "audit", arguments]
        return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.close()


def pins() -> set[tuple[str, str]]:
    files = (ROOT / "requirements").glob("*.txt")
    found = {pin for file in files for pin in PIN.findall(file.read_text())}
    return {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in found}


def test_the_audit_asks_about_every_pin_and_passes_where_nothing_is_known(source: Source) -> None:
    done = source.audit()
    assert done.returncode == 0, done.stderr
    assert source.asked == pins()


@pytest.mark.parametrize("flawed", ["orjson", "mosec", "urllib3"])  # ours, a peer, one that another brings along
def test_a_pin_with_a_known_flaw_fails_the_audit_by_name(source: Source, flawed: str) -> None:
    source.flawed = flawed
    done = source.audit()
    assert done.returncode != 0
    assert [line for line in done.stdout.splitlines() if line.startswith(flawed) and FLAW["id"] in line] != []


def arguments() -> dict[str, tuple[str, str]]:
    """The ids of CONTRIBUTING.md's table, with the pin of each."""
    return {each: (name, version) for each, name, version in ARGUMENT.findall((ROOT / "CONTRIBUTING.md").read_text())}


def passed_by() -> list[str]:
    makefile = (ROOT / "Makefile").read_text()
    (ids,) = re.findall(r"^ARGUED =(.*)$", makefile, re.MULTILINE)
    return str(ids).split()


def test_what_the_audit_passes_by_is_argued_once_and_of_a_pin_that_is_still_so() -> None:
    assert passed_by() == list(arguments())
    assert set(arguments().values()) <= pins()


def test_an_argued_flaw_is_let_through_under_whatever_name_it_has(source: Source) -> None:
    source.flawed, source.aliases = "torch", tuple(passed_by())
    done = source.audit()
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(passed_by())} ignored" in done.stderr


def test_another_flaw_of_the_same_package_is_not_let_through(source: Source) -> None:
    source.flawed, source.aliases = "torch", (*passed_by(), "CVE-0000-1")
    done = source.audit()
    assert done.returncode != 0
    found = [line for line in done.stdout.splitlines() if line.startswith("torch")]
    assert [line.split()[2] for line in found] == [f"PYSEC-0000-{len(source.aliases)}"]
