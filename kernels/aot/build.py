"""Compiles many cases in parallel, and keeps what was compiled."""

import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue

import triton

from kernels.aot import compiler, machine_code
from kernels.aot.cases import Case
from kernels.aot.machine_code import Reading
from kernels.aot.source import PACKAGE, source_hash
from kernels.aot.table import Compiled
from kernels.aot.targets import ARCHS
from kernels.progress import Progress

WAKING_S = 0.1


def default_cache() -> Path:
    """Return the folder where compiled cases are kept: ``$XDG_CACHE_HOME``, else ``~/.cache``, and below it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fused-mlp-server" / "aot"


def compile_all(wanted: Sequence[Case], cache_dir: Path, jobs: int | None = None) -> list[Compiled]:
    """Compile `wanted`, in parallel; what `cache_dir` holds of this source and this Triton is read from there.

    Args:
        wanted: the cases.
        cache_dir: made where it is missing.
        jobs: compiling processes; one a core if None.

    Returns:
        One a case, in their order.

    Raises:
        OSError: the cache cannot be written.
        RuntimeError: a compiling process ended early.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    found: dict[Case, Compiled] = {}
    missing: SimpleQueue[Case] = SimpleQueue()
    for case in wanted:
        cached = _cached(case, cache_dir)
        if cached is None:
            missing.put(case)
        else:
            found[case] = cached
    total = missing.qsize()
    if total:
        with Progress("aot", total) as progress, tempfile.TemporaryDirectory() as scratch:
            failures: list[Exception] = []
            processes: list[subprocess.Popen[str]] = []
            workers = [
                threading.Thread(
                    target=_compile_each, args=(missing, found, cache_dir, scratch, progress, failures, processes)
                )
                for _ in range(min(total, jobs or len(os.sched_getaffinity(0))))
            ]
            try:
                for worker in workers:
                    worker.start()
                _await(workers)
            except BaseException as error:  # an interrupt, which only this thread sees
                failures.append(RuntimeError(f"aot: {type(error).__name__}"))
                for process in processes:
                    process.kill()
                _await(workers)
                raise
        if failures:
            raise failures[0]
    return [found[case] for case in wanted]


def _await(workers: Sequence[threading.Thread]) -> None:
    """Wait for those that were started, waking up: an interrupt that another thread receives does not end a wait."""
    for worker in workers:
        while worker.is_alive():
            worker.join(WAKING_S)


def _key(case: Case) -> str:
    words = case.name, source_hash(case.kernel), triton.__version__, _reader_hash()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:32]


@cache
def _reader_hash() -> str:
    words = inspect.getsource(compiler), inspect.getsource(machine_code), str(ARCHS)
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


def _cached(case: Case, cache_dir: Path) -> Compiled | None:
    path = cache_dir / _key(case)
    try:
        reading = Reading(**json.loads(path.with_suffix(".json").read_text()))
        return Compiled(case, reading, source_hash(case.kernel), path.with_suffix(".bin").read_bytes())
    except FileNotFoundError:
        return None


def _compile_each(
    missing: "SimpleQueue[Case]",
    found: dict[Case, Compiled],
    cache_dir: Path,
    scratch: str,
    progress: Progress,
    failures: list[Exception],
    processes: "list[subprocess.Popen[str]]",
) -> None:
    """Feed one compiling process until nothing is missing; what goes wrong, here or in another, ends it."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": scratch, "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-m", compiler.__name__]
    pipe = subprocess.PIPE
    at = "its start"
    try:
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=PACKAGE.parent, env=env) as process:
            processes.append(process)
            assert process.stdin is not None  # noqa: S101  # both are pipes
            assert process.stdout is not None  # noqa: S101
            while not failures:
                try:
                    case = missing.get_nowait()
                except Empty:
                    break
                at, path = case.name, cache_dir / _key(case)
                process.stdin.write(json.dumps([asdict(case), str(path)]) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
                if not line:
                    raise BrokenPipeError
                reading, binary = Reading(**json.loads(line)), b""
                if reading.error is None:  # else it is not kept: the next run tries again
                    compiler.write(path.with_suffix(".json"), json.dumps(asdict(reading)).encode())
                    binary = path.with_suffix(".bin").read_bytes()
                found[case] = Compiled(case, reading, source_hash(case.kernel), binary)
                progress.step(case.name)
    except BrokenPipeError:
        failures.append(RuntimeError(f"aot: a compiling process ended early, at {at}"))
    except Exception as error:  # a thread's is seen by nobody: the caller raises it
        failures.append(error)
