"""Closed-loop load by wrk, a generator in C, where a generator in Python would be the limit.

Each connection sends its next request when it has the reply to the one before. wrk keeps to a duration by itself; its
percentiles allow for requests that a slow reply kept from being sent (`stats_correct` in its sources).
Source: https://github.com/wg/wrk, SCRIPTING.
"""

import json
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtests.errors import LoadTestError

MARK = "LOAD "
REPLY_LIMIT_S = 10  # for one reply; what takes longer is counted as a time-out
GRACE_S = 30  # for wrk to end after its duration
DONE = f"""
function done(summary, latency, requests)
  local counts = {{
    requests = summary.requests, duration_us = summary.duration, max_us = latency.max,
    p50_us = latency:percentile(50), p90_us = latency:percentile(90), p99_us = latency:percentile(99),
  }}
  for name, count in pairs(summary.errors) do counts[name] = count end
  local told = {{}}
  for name, count in pairs(counts) do told[#told + 1] = string.format('"%s": %d', name, count) end
  io.write("\\n{MARK}{{" .. table.concat(told, ", ") .. "}}\\n")
end
"""
ERRORS = {
    "status": "replies with a status of 400 or above",
    "timeout": f"requests without a reply after {REPLY_LIMIT_S} s",
    "connect": "connections refused",
    "read": "connections that ended in mid-reply",
    "write": "connections that ended in mid-request",
}


class LoadError(LoadTestError):
    """wrk is not installed, or printed nothing that can be read."""


@dataclass(frozen=True, slots=True)
class WrkResult:
    """What wrk counted."""

    requests: int
    duration_us: int
    p50_us: int
    p90_us: int
    p99_us: int
    max_us: int
    errors: dict[str, int]  # those that happened, by wrk's names
    generator_cpu: float  # share of one core that wrk used

    @property
    def requests_per_s(self) -> float:
        """Replies a second."""
        return self.requests / self.duration_us * 1e6

    @property
    def fault(self) -> str | None:
        """What went wrong, or None."""
        if self.errors:
            return ", ".join(f"{count} {ERRORS[name]}" for name, count in self.errors.items())
        return None if self.requests else "no reply at all"


def version() -> str:
    """Return wrk's version.

    Raises:
        LoadError: wrk is not installed.
    """
    if shutil.which("wrk") is None:
        raise LoadError("wrk, the load generator, is not on PATH; install it, on Debian with: apt-get install wrk")
    told = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False)  # noqa: S607  it is on PATH
    found = re.search(r"wrk \S+", told.stdout + told.stderr)
    return found[0].removeprefix("wrk ") if found else "unknown"


def lua_string(text: str | bytes) -> str:
    """Return a Lua literal of the same bytes."""
    data = text.encode() if isinstance(text, str) else text
    plain = set(range(0x20, 0x7F)) - set(b'"\\')
    return '"' + "".join(chr(byte) if byte in plain else f"\\{byte:03d}" for byte in data) + '"'


def script(path: str, headers: Mapping[str, str], body: bytes) -> str:
    """Return the Lua that sends one POST request again and again, and prints the results as JSON at the end.

    wrk formats the request once, before the load, and calls no Lua while it runs.
    """
    lines = ['wrk.method = "POST"', f"wrk.path = {lua_string(path)}", f"wrk.body = {lua_string(body)}"]
    lines += [f"wrk.headers[{lua_string(name)}] = {lua_string(value)}" for name, value in headers.items()]
    return "\n".join(lines) + DONE


def parsed(output: str, generator_cpu: float) -> WrkResult:
    """Read what the script told.

    Raises:
        LoadError: it is not there.
    """
    told = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    try:
        (line,) = told
        counts = json.loads(line)
        errors = {name: counts.pop(name) for name in ERRORS}
        return WrkResult(
            **counts, errors={name: count for name, count in errors.items() if count}, generator_cpu=generator_cpu
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"wrk: expected one line of counts, got {output.strip()[-300:]!r}") from error


def load(port: int, path: str, headers: Mapping[str, str], body: bytes, connections: int, seconds: int) -> WrkResult:
    """Load a server on loopback for a number of seconds.

    Raises:
        LoadError: wrk could not connect, did not end, or told nothing.
    """
    with tempfile.TemporaryDirectory(prefix="wrk-") as directory:
        file = Path(directory) / "load.lua"
        file.write_text(script(path, headers, body))
        command = ["wrk", "--threads", "1", "--connections", str(connections), "--duration", f"{seconds}s"]
        command += ["--timeout", f"{REPLY_LIMIT_S}s", "--script", str(file), f"http://127.0.0.1:{port}"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            raise LoadError(f"wrk did not end within {GRACE_S} s of its {seconds} s") from None
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise LoadError(f"wrk ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return parsed(done.stdout, round(used_s / seconds, 2))
