"""The command line: ``python -m models.gpu``."""

import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kernels import interruption
from kernels.flags import Parser, path
from kernels.names import DTYPE_NAMES
from kernels.output import no_directory_reason
from models import gpu
from models.commands.flags import finite
from models.gpu import steps
from models.gpu.page import markdown
from models.gpu.plan import PLANS, Plan, write_model
from models.gpu.report import Report
from models.gpu.steps import ROOT
from models.gpu.transfer import measure_transfer

RESULTS = ROOT / "docs/results"
BUDGET_S = 450.0
DEFAULT_DTYPE = "bfloat16"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and return the exit status: 0, 1 where a step is not done, or 2 or 130 with one line on stderr."""
    parser = Parser(prog="python -m models.gpu", description=(gpu.__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run of tiny shapes")
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default=DEFAULT_DTYPE, help=f"default: {DEFAULT_DTYPE}")
    parser.add_argument("--out", type=path, help=f"where results go; default: {RESULTS.relative_to(ROOT)}")
    parser.add_argument(
        "--budget-s", type=finite, default=BUDGET_S, help="seconds after which it ends; default: %(default)g"
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
    reason = no_directory_reason(out)
    if reason is not None:
        return refuse(f"--out: {reason}")
    out.mkdir(parents=True, exist_ok=True)
    report = Report(out, start + options.budget_s)
    try:
        interruption.interruptible(lambda: measure(report, PLANS[options.device], options.device, options.dtype))
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return 130
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
        report.step("kernels check", partial(steps.check_operators, report, ("float32", "float16", "bfloat16")))
        for dim, hidden, _ in plan.shapes:
            for ops, widths in (("gated_linear,rms_gated_linear", (dim, hidden)), ("linear", (hidden, dim))):
                report.step(f"kernels tune {ops}", partial(steps.tune_operators, report, plan, ops, widths, dtype))
    else:
        report.step("kernels check", partial(steps.check_operators, report, ("float16",), "--device", "cpu"))
    report.step("paths", partial(steps.measure_paths, report, plan, device, dtype))
    with tempfile.TemporaryDirectory() as directory:
        paths = [write_model(Path(directory), shape) for shape in plan.shapes]
        for path in paths:
            report.step(f"bench {path.name}", partial(steps.measure_backends, report, plan, path, device, dtype))
        for path in paths:
            report.step(f"transfer {path.name}", partial(measure_transfer, report, plan, path, device, dtype))
        report.step(f"profile {paths[0].name}", partial(steps.measure_profile, report, plan, paths[0], device, dtype))
    if device == "cuda":
        report.step("kernels bench", partial(steps.measure_operators, report, plan))
    report.write("summary", {"conditions": facts, "steps": report.steps})
    (report.out / "gpu.md").write_text(markdown(report), encoding="utf-8")


if __name__ == "__main__":
    interruption.handle()
    status = main()
    interruption.ignore()
    sys.exit(status)
