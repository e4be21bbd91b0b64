"""The steps: each measures, writes its file, and says what kept it from being done."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, get_args

from kernels.progress import Progress
from models.gpu.plan import Plan, config_of, ready_engine
from models.gpu.report import STOPPED, Report

ROOT = Path(__file__).parents[2]
CHECK_S = 120.0  # most of it is compiling, in a process for each dtype
TUNE_S = 30  # for each shape's gated layers, and for its down projection: no row count is begun after it


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
        None if it succeeded and wrote gpu-kernels-`name`.json, else why it did not.
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
    """Time each way to compute a hidden layer, per row count, run as requests run it; on a GPU, renew paths.json."""
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
                seconds = bench.rounds(runs, plan.repetitions, place)
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
    from kernels.roof import roof_record
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
        "roof": roof_record(roof),
        "geometric_mean_ratio_to_eager": {name: round(mean, 3) for name, mean in bench.geometric_means(found).items()},
        "notes": {name: status.note for name, status in engine.backends.items() if status.note is not None},
        "bench": [it.to_dict() for it in found],
    }
    report.found.setdefault("bench", []).append(document)
    report.write(f"bench-{path.name}", document)
    return absent


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
