"""Checks and measures everything on one GPU, in under 8 minutes: ``python -m models.gpu``, or ``make gpu``.

Its steps: every operator's correctness, tiles, and whether a norm is folded (``python -m kernels check`` and ``tune``),
the way of each hidden layer (models/backends/paths.json), the table of the backends, a batch's way from the host and
back with its answers compared (models/staging.py), the profile of the reference shape, the table of the operators
(``python -m kernels bench``). Everything lands under ``--out`` as gpu-*.json, and as gpu.md for people. A step that
fails is reported as such, and the others go on; so is one that time runs out in, which ends then, where Python runs
next, and one that none is left for. It needs torch, triton, numpy and safetensors alone.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from kernels.progress import Progress
from models.config import FFNConfig, InitConfig, ModelConfig, NormConfig
from models.errors import first_line

if TYPE_CHECKING:
    import torch

    from models.engine import Engine
    from models.staging import Passage, Staging

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
BUDGET_S = 450.0
STOPPED = "stopped: no time was left"
CHECK_S = 120.0  # most of it is compiling, in a process for each dtype
TUNE_S = 30  # for each shape's gated layers, and for its down projection: no row count is begun after it
TRAIN = 4  # batches one after another, each timed way: more than a ring has buffers for
TRANSFER_REPETITIONS = 9
DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: one shape is (dim, hidden, depth); the first one is profiled, at `profile_rows`."""

    shapes: tuple[tuple[int, int, int], ...]
    rows: tuple[int, ...]
    profile_rows: int
    repetitions: int
    backends: tuple[str, ...]


PLANS = {
    "cuda": Plan(
        shapes=((768, 3072, 4), (4096, 14336, 1)),
        rows=(1, 8, 32, 128, 512, 2048, 8192),
        profile_rows=8192,
        repetitions=31,
        backends=("eager", "compiled", "fused"),
    ),
    "cpu": Plan(shapes=((32, 48, 2),), rows=(1, 8), profile_rows=8, repetitions=2, backends=("eager", "fused")),
}


@dataclass(slots=True)
class Report:
    """What has been done: the state of each step, and what the steps found; `deadline` is by `time.monotonic`."""

    out: Path
    deadline: float
    steps: list[dict[str, Any]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def step(self, name: str, run: Callable[[], str | None]) -> None:
        """Run one step until the deadline and note "done", or why not.

        Args:
            name: of the step.
            run: returns what kept it from being done, None for nothing.
        """
        start = time.monotonic()
        if start >= self.deadline:
            state = "left out: no time was left"
        else:
            try:
                with stopped_after(self.left_s):
                    state = run() or "done"
            except StoppedError:
                state = STOPPED
            except Exception as error:
                state = f"failed: {first_line(error)}"
        self.steps.append({"step": name, "state": state, "seconds": round(time.monotonic() - start, 1)})
        print(f"{name}: {state}", flush=True)

    def write(self, name: str, document: Any) -> None:
        """Write gpu-`name`.json."""
        (self.out / f"gpu-{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @property
    def left_s(self) -> float:
        """Seconds until the step in progress ends, and none is begun any more."""
        return self.deadline - time.monotonic()


class StoppedError(BaseException):
    """No time is left; no Exception, so that what tries one thing after another lets it pass."""


@contextmanager
def stopped_after(limit_s: float) -> Iterator[None]:
    """End what is inside after so many seconds, where Python runs next; for the main thread.

    Raises:
        StoppedError: it ended so.
    """

    def stop(*_: object) -> None:
        raise StoppedError

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, max(limit_s, 1e-6))  # 0 would set none
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and return the exit status: 0, 1 where a step is not done, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m models.gpu", description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of tiny shapes")
    parser.add_argument("--dtype", default=DEFAULT_DTYPE, help=f"default: {DEFAULT_DTYPE}")
    parser.add_argument("--out", type=Path, help=f"where results go; default: {RESULTS.relative_to(ROOT)}")
    parser.add_argument(
        "--budget-s", type=float, default=BUDGET_S, help="it ends after so many seconds, default: %(default)g"
    )
    options = parser.parse_args(arguments)
    start = time.monotonic()

    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        return refuse(
            f"expected a CUDA or ROCm device, torch {torch.__version__} sees none; run this on a GPU host, or try the "
            "script itself with --device cpu --out DIR"
        )
    if options.device == "cpu" and options.out is None:
        return refuse("--out: expected a directory with --device cpu, whose figures are none of a GPU's, got none")
    out: Path = RESULTS if options.out is None else options.out
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out, start + options.budget_s)
    measure(report, PLANS[options.device], options.device, options.dtype)
    return 0 if all(step["state"] == "done" for step in report.steps) else 1


def refuse(sentence: str) -> int:
    """Print why nothing is done."""
    print(f"python -m models.gpu: error: {sentence}", file=sys.stderr)
    return 2


def measure(report: Report, plan: Plan, device: str, dtype: str) -> None:
    """Take every step; on a CPU those that tune and measure kernels are left out: only a GPU runs them at speed."""
    import torch

    from models.conditions import conditions

    facts = conditions(torch.device(device), getattr(torch, dtype), torch.get_num_threads())
    report.found["conditions"] = facts
    if device == "cuda":
        report.step("kernels check", partial(check_operators, report, ("float32", "float16", "bfloat16")))
        for dim, hidden, _ in plan.shapes:
            for ops, widths in (("gated_linear,rms_gated_linear", (dim, hidden)), ("linear", (hidden, dim))):
                report.step(f"kernels tune {ops}", partial(tune_operators, report, plan, ops, widths, dtype))
    else:
        report.step("kernels check", partial(check_operators, report, ("float16",), "--device", "cpu"))
    report.step("paths", partial(measure_paths, report, plan, device, dtype))
    with tempfile.TemporaryDirectory() as directory:
        paths = [write_model(Path(directory), shape) for shape in plan.shapes]
        for path in paths:
            report.step(f"bench {path.name}", partial(measure_backends, report, plan, path, device, dtype))
        for path in paths:
            report.step(f"transfer {path.name}", partial(measure_transfer, report, plan, path, device, dtype))
        report.step(f"profile {paths[0].name}", partial(measure_profile, report, plan, paths[0], device, dtype))
    if device == "cuda":
        report.step("kernels bench", partial(measure_operators, report, plan))
    report.write("summary", {"conditions": facts, "steps": report.steps})
    (report.out / "gpu.md").write_text(markdown(report), encoding="utf-8")


def check_operators(report: Report, dtypes: Sequence[str], *options: str) -> str | None:
    """Compare every operator with float64, each dtype in a process of its own at the same time; nothing is timed."""

    def check(dtype: str) -> str | None:
        arguments = "check", "--dtypes", dtype, *options
        state = kernels_command(report, f"check-{dtype}", arguments, min(CHECK_S, report.left_s))
        return None if state is None else f"{dtype} {state}"

    with ThreadPoolExecutor(len(dtypes)) as pool:
        return "; ".join(filter(None, pool.map(check, dtypes))) or None


def tune_operators(report: Report, plan: Plan, ops: str, widths: tuple[int, int], dtype: str) -> str | None:
    """Measure a few tiles of `ops` for each row count, and with gated layers whether to fold a norm."""
    width = "x".join(map(str, widths))
    name = f"tune-{ops.partition(',')[0]}-{width}"
    rows = ",".join(map(str, plan.rows))
    shape = "--ops", ops, "--dtypes", dtype, "--widths", width, "--rows", rows
    state = kernels_command(report, name, ("tune", *shape, "--few", "--seconds", str(TUNE_S)), report.left_s)
    file = report.out / f"gpu-kernels-{name}.json"
    if file.exists():  # what was measured before time was over counts
        report.found.setdefault("tune", []).extend(json.loads(file.read_text(encoding="utf-8")))
    return state


def measure_operators(report: Report, plan: Plan) -> str | None:
    """Time each operator beside eager and, where it is installed, Liger's MLP."""
    rows = ",".join(map(str, plan.rows))
    state = kernels_command(report, "bench", ("bench", "--rows", rows), report.left_s)
    if state is None:
        file = report.out / "gpu-kernels-bench.json"
        report.found["operators"] = json.loads(file.read_text(encoding="utf-8"))
    return state


def kernels_command(report: Report, name: str, arguments: Sequence[str], limit_s: float) -> str | None:
    """Run ``python -m kernels`` in a process of its own, so that its tables are read anew afterwards.

    Returns:
        None where it did what it was told and wrote gpu-kernels-`name`.json, else what kept it.
    """
    target = report.out / f"gpu-kernels-{name}.json"
    target.unlink(missing_ok=True)  # an earlier run's
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kernels", *arguments, "--json", str(target)],
            cwd=ROOT,
            timeout=limit_s,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return STOPPED
    if done.returncode != 0:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return f"failed with exit status {done.returncode}{f': {lines[-1]}' if lines else ''}"
    return None


def measure_paths(report: Report, plan: Plan, device: str, dtype: str) -> str | None:
    """Time each way of a hidden layer at each row count, replayed as on a request; on a GPU, renew paths.json."""
    import torch

    from models import bench, weights
    from models.backends import paths
    from models.backends.fused_cuda import FusedOnCUDA
    from models.backends.graphs import captured
    from models.mlp import MLP

    if device == "cpu":
        from kernels.interpreter import INTERPRETED

        if not INTERPRETED:
            return "left out: on a CPU it takes TRITON_INTERPRET=1"
    kind, place = getattr(torch, dtype), torch.device(device)
    name = torch.cuda.get_device_name(place) if device == "cuda" else "cpu"
    chosen: dict[str, dict[str, str]] = {}
    times: list[dict[str, Any]] = []
    for dim, hidden, _ in plan.shapes:
        config = config_of(dim, hidden, 1)
        with torch.device("meta"):
            model = MLP(config)
        model.load_state_dict({key: it.to(place, kind) for key, it in weights.seeded(config).items()}, assign=True)
        backend = FusedOnCUDA(model.requires_grad_(False).eval(), config)
        for rows in plan.rows:
            with torch.inference_mode():
                x = backend.zeros(rows)
                runs: dict[str, Callable[[], object]] = {}
                for path in get_args(paths.HiddenPath):
                    forward = partial(backend.forward, path=path, is_folded=backend.is_folded(rows))
                    runs[path] = partial(captured(forward, x.clone()) if device == "cuda" else forward, x)
                seconds = bench.interleaved(runs, plan.repetitions, place)
            medians = {path: bench.quartiles(values)[1] for path, values in seconds.items()}
            best = min(medians, key=lambda path: medians[path])
            chosen.setdefault(f"{dim}x{hidden}", {})[str(rows)] = best
            times += [
                {"dim": dim, "hidden": hidden, "rows": rows, "path": path, "median_us": round(median * 1e6, 2)}
                for path, median in medians.items()
            ]
    table = {name: {dtype: chosen}}
    report.found["paths"] = chosen
    report.write("paths", {"conditions": report.found["conditions"], "chosen": table, "times": times})
    if device == "cuda":
        paths.record(table)
    return None


def measure_backends(report: Report, plan: Plan, path: Path, device: str, dtype: str) -> str | None:
    """Time the backends of one model, interleaved, those that cannot run here left out and named."""
    from models import bench

    engine, absent = ready_engine(plan, path, device, dtype)
    roof = bench.measure_roof(engine, plan.rows)
    with Progress(f"measuring {path.name}") as progress:
        found = bench.bench(engine, plan.rows, roof, plan.repetitions, progress=progress)
    document = {
        "conditions": {
            **report.found["conditions"],
            "model": engine.config.to_dict(),
            "repetitions": plan.repetitions,
            "is_cold": False,
        },
        "roof": bench.roof_record(roof, engine.dtype),
        "geometric_mean_ratio_to_eager": {name: round(mean, 3) for name, mean in bench.geometric_means(found).items()},
        "notes": {name: status.note for name, status in engine.backends.items() if status.note is not None},
        "bench": [it.to_dict() for it in found],
    }
    report.found.setdefault("bench", []).append(document)
    report.write(f"bench-{path.name}", document)
    return absent


def measure_transfer(report: Report, plan: Plan, path: Path, device: str, dtype: str) -> str | None:
    """Time a batch from bytes on the host to float32 on the host: unstaged, staged, and staged with others in the air.

    Raises:
        RuntimeError: a way's answers are not those of the engine's own run.
    """
    import torch

    from models import bench
    from models.staging import CUDAStreams, HostStreams, Staging

    engine, absent = ready_engine(replace(plan, backends=("eager", "fused")), path, device, dtype)
    streams = CUDAStreams(engine.device) if device == "cuda" else HostStreams()
    ring = Staging(engine, max(plan.rows), streams)
    measured: list[dict[str, Any]] = []
    for rows in plan.rows:
        drawn = torch.randn(TRAIN, rows, engine.config.width_in, generator=torch.Generator().manual_seed(rows))
        payloads = [bytearray(each.numpy().tobytes()) for each in drawn]
        for name in engine.backends:
            ways: dict[str, Callable[[], list[torch.Tensor]]] = {
                "unstaged": partial(_unstaged, engine, payloads, rows, name),
                "staged": partial(_staged, ring, payloads, rows, name, 1),
                "overlapped": partial(_staged, ring, payloads, rows, name, ring.depth),
            }
            expected = ways["unstaged"]()
            for way in ("staged", "overlapped"):
                for got, answer in zip(ways[way](), expected, strict=True):
                    if not torch.equal(got, answer):  # the same kernels on the same rows
                        apart = float((got - answer).abs().max())
                        raise RuntimeError(f"{name}, {rows} rows, {way}: an answer is {apart:.3g} from the engine's")
            seconds = bench.interleaved(ways, min(plan.repetitions, TRANSFER_REPETITIONS), engine.device)
            for way, values in seconds.items():
                q1, median, q3 = (round(it / TRAIN * 1e6, 2) for it in bench.quartiles(values))
                times = {"median_us": median, "q1_us": q1, "q3_us": q3}
                measured.append({"rows": rows, "backend": name, "way": way, **times})
    document = {
        "conditions": {**report.found["conditions"], "model": engine.config.to_dict(), "batches": TRAIN},
        "depth": ring.depth,
        "pinned_bytes": ring.bytes,
        "transfer": measured,
    }
    report.found.setdefault("transfer", []).append(document)
    report.write(f"transfer-{path.name}", document)
    return absent


def _unstaged(engine: "Engine", payloads: Sequence[bytearray], rows: int, name: str) -> "list[torch.Tensor]":
    import torch

    results = []
    for payload in payloads:
        x = torch.frombuffer(payload, dtype=torch.float32).view(rows, -1)
        results.append(engine.run(x, name).to("cpu", torch.float32))
    return results


def _staged(ring: "Staging", payloads: Sequence[bytearray], rows: int, name: str, depth: int) -> "list[torch.Tensor]":
    """Run with up to `depth` batches in the air; results are copied out of the ring, as replies are."""
    results: list[torch.Tensor] = []
    in_air: deque[Passage] = deque()
    for payload in [*payloads, *[None] * depth]:
        if in_air and (payload is None or len(in_air) == depth):
            passage = in_air.popleft()
            results.append(passage.result().clone())
            passage.release()
        if payload is not None:
            in_air.append(ring.submit([payload], rows, name))
    return results


def measure_profile(report: Report, plan: Plan, path: Path, device: str, dtype: str) -> str | None:
    """Profile one model's backends."""
    from models import profile

    engine, absent = ready_engine(plan, path, device, dtype, (plan.profile_rows,))
    found = [
        profile.profile(engine, plan.profile_rows, name, report.out / f"gpu-trace-{name}.json")
        for name in engine.backends
    ]
    report.found["profile"] = found
    document = {"conditions": report.found["conditions"], "profile": [each.to_dict() for each in found]}
    report.write("profile", document)
    return absent


def ready_engine(
    plan: Plan, path: Path, device: str, dtype: str, rows: Sequence[int] = ()
) -> tuple["Engine", str | None]:
    """Load a model with the backends that run here, each ready for the row counts alone; say which do not.

    A warm-up would compile every bucket up to the largest, and on a GPU that takes minutes.
    """
    import torch

    from models.engine import load_engine

    asked = load_engine(path, device, dtype, plan.backends)
    absent = [f"{name} ({status.reason})" for name, status in asked.backends.items() if status.reason is not None]
    able = [name for name, status in asked.backends.items() if status.reason is None]
    engine = load_engine(path, device, dtype, able) if absent else asked
    for count in sorted(rows or plan.rows, reverse=True):  # the largest first: what is larger is run in parts
        for name in able:
            engine.run(torch.zeros(count, engine.config.width_in), name)
    return engine, f"done without {', '.join(absent)}" if absent else None


def config_of(dim: int, hidden: int, depth: int) -> ModelConfig:
    """Return a GEGLU (tanh) stack with seeded weights, as the reference shape is."""
    ffn, norm = FFNConfig(True, "gelu_tanh"), NormConfig("rms")
    return ModelConfig(f"geglu-{dim}x{hidden}x{depth}", dim, hidden, depth, ffn, norm, init=InitConfig(0))


def write_model(directory: Path, shape: tuple[int, int, int]) -> Path:
    """Write a model directory and return its path."""
    config = config_of(*shape)
    path = directory / config.name
    path.mkdir()
    config.save(path)
    return path


def markdown(report: Report) -> str:
    """Lay out for people what was found."""
    from models.conditions import described
    from models.profile import table

    lines = ["# Measured on a GPU", "", f"{described(report.found['conditions'])}.", ""]
    lines += ["| step | state | seconds |", "|---|---|---|"]
    lines += [f"| {step['step']} | {step['state']} | {step['seconds']} |" for step in report.steps]
    for document in report.found.get("bench", []):
        roof = document["roof"]
        lines += [
            "",
            f"## {document['conditions']['model']['name']}",
            "",
            f"Roof: copy {roof['copy_gb_s']} GB/s, large product {roof['tflop_s']} TFLOP/s; medians of "
            f"{document['conditions']['repetitions']} interleaved rounds, quartiles in brackets.",
            "",
            "| rows | backend | us | eager / it | GB/s | TFLOP/s | % of roof |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {it['rows']} | {it['backend']} | {it['median_us']:g} ({it['q1_us']:g} to {it['q3_us']:g}) "
            f"| {it['ratio']:.2f} ({it['ratio_q1']:.2f} to {it['ratio_q3']:.2f}) "
            f"| {it['gb_s']:g} | {it['tflop_s']:g} | {it['percent_of_roof']:.0f} |"
            for it in document["bench"]
        ]
        lines += [f"\n{name}: {note}." for name, note in document["notes"].items()]
    for document in report.found.get("transfer", []):
        lines += [
            "",
            f"## {document['conditions']['model']['name']}: from the host and back",
            "",
            f"A batch from bytes on the host to float32 on the host, {document['conditions']['batches']} in a row; "
            f"overlapped: up to {document['depth']} in the air, {document['pinned_bytes']} bytes of pinned memory.",
            "",
            "| rows | backend | way | us |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {it['rows']} | {it['backend']} | {it['way']} "
            f"| {it['median_us']:g} ({it['q1_us']:g} to {it['q3_us']:g}) |"
            for it in document["transfer"]
        ]
    folds = [it for it in report.found.get("tune", []) if "is_folded" in it]
    if folds:
        lines += [
            "",
            "## A norm folded into the gated layer, or apart",
            "",
            "| in x out | rows | folded us | apart us | taken |",
        ]
        lines += ["|---|---|---|---|---|"]
        lines += [
            f"| {it['in_features']}x{it['out_features']} | {it['rows_measured']} | {it['microseconds']:g} "
            f"| {it['separate_microseconds']:g} | {'folded' if it['is_folded'] else 'apart'} |"
            for it in folds
        ]
    if "operators" in report.found:
        lines += ["", "## Operators", "", f"Liger's MLP: {report.found['operators']['liger']}.", ""]
        lines += [
            "| operator | way | dtype | rows x in x out | caches | us | % of roof |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {it['op']} | {it['way']} | {it['dtype']} | {'x'.join(map(str, it['shape']))} "
            f"| {'cold' if it['cold'] else 'warm'} | {it['median_us']:g} ({it['low_us']:g} to {it['high_us']:g}) "
            f"| {it['roof_percent']:.0f} |"
            for it in report.found["operators"]["rows"]
        ]
    if "profile" in report.found:
        lines += ["", "## Profile", "", "```", *(table(each) for each in report.found["profile"]), "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
