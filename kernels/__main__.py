"""The command line: ``python -m kernels check|aot|roof|bench|tune``."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kernels import interruption, output
from kernels.flags import Parser, listed, path, positive, thread_count
from kernels.names import DTYPE_NAMES, OPS

if TYPE_CHECKING:
    import torch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status: 0, 1 where a check fails, or 2 with one line on stderr."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status = interruption.interruptible(lambda: _run(options))
    except (Exception, KeyboardInterrupt) as error:
        if interruption.is_cause(error):
            print(f"{parser.prog} {options.command}: interrupted", file=sys.stderr)
            return 130
        if not isinstance(error, OSError | RuntimeError | TypeError | ValueError):
            raise
        sentence = str(error)
        if isinstance(error, OSError) and error.filename:
            sentence = f"{error.filename}: {error.strerror}"
    else:
        return status
    print(f"{parser.prog} {options.command}: error: {sentence}", file=sys.stderr)
    return 2


def _run(options: argparse.Namespace) -> int:
    _require_writable(options)
    return int(options.run(options))


def aot(options: argparse.Namespace) -> int:
    """Compile every shipped kernel for GPUs that need not be present; fail where the code is not what it must be."""
    from kernels.aot import build, table
    from kernels.aot.cases import cases
    from kernels.aot.targets import ARCHS

    cache_dir = options.cache or build.default_cache()
    compiled = build.compile_all(cases(options.arch or tuple(ARCHS)), cache_dir, options.jobs)
    if options.out is not None:
        table.write_binaries(compiled, options.out)
    if options.json is not None:
        output.write(options.json, table.to_json(compiled))
    if options.markdown is not None:
        output.write(options.markdown, table.to_markdown([each.record() for each in compiled]))
    print("registers  stack  shared  matrix  16-byte loads  kernel")
    for each in compiled:
        reading, kind = each.reading, each.case.matrix_instruction or "-"
        print(
            f"{reading.registers:9}  {reading.stack_bytes:5}  {reading.shared_bytes:6}  "
            f"{reading.matrix_instructions:3} {kind:<8}  {reading.wide_loads:4}  {each.case.name}"
        )
    faulty = [each for each in compiled if each.faults]
    for each in faulty:
        print(f"{each.case.name}: {'; '.join(each.faults)}", file=sys.stderr)
    print(f"{len(compiled)} kernels, {len(faulty)} with a fault")
    if any(each.case.dtype == "fp32" and each.case.arch.startswith("sm_") for each in compiled):
        print("float32 has no matrix instruction on NVIDIA that keeps its precision: none is asked for")
    return 1 if faulty else 0


def check(options: argparse.Namespace) -> int:
    """Compare every operator with float64 on the device at hand; fail where one is less exact than eager allows."""
    device = _device(options.device)
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: it decides what they become
    from kernels.checking import check_all
    from kernels.dtypes import DTYPES, name_of

    checks = check_all(device, [DTYPES[name] for name in options.dtypes])
    if options.json is not None:
        output.write(options.json, json.dumps([each.record() for each in checks], indent=1) + "\n")
    print("runs on      dtype     rows x in x out  operator")
    for each in checks:
        shape, dtype = "x".join(map(str, each.shape)), name_of(each.dtype)
        verdict = each.problem or (f"not run: {each.skipped}" if each.skipped else "exact enough")
        print(f"{each.implementation:<11}  {dtype:<8}  {shape:<15}  {each.op}: {verdict}")
    wrong, skipped = (sum(getattr(each, name) is not None for each in checks) for name in ("problem", "skipped"))
    print(f"{len(checks)} comparisons on {device}, {wrong} wrong, {skipped} not run")
    if device.type == "cpu":
        print('"interpreter" is Triton\'s own, on the CPU: it checks what the kernels compute, not what a GPU runs')
    return 1 if wrong else 0


def roof(options: argparse.Namespace) -> int:
    """Measure the most that the device at hand does, copying and multiplying, and the ridge between; takes seconds."""
    import torch

    from kernels import onednn
    from kernels.bench import CPU_DTYPES, GPU_DTYPES
    from kernels.conditions import conditions
    from kernels.roof import described, measured_roof, roof_record

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = _device(options.device)
    able = [torch.float32, *(each for each in CPU_DTYPES if each != torch.float32 and not onednn.unavailable(each))]
    found = measured_roof(device, GPU_DTYPES if device.type == "cuda" else able)
    facts = conditions(device)
    if options.json is not None:
        document = {"conditions": facts, "roof": roof_record(found)}
        output.write(options.json, json.dumps(document, indent=1) + "\n")
    print(f"{facts['device']}, {facts['threads']} threads")
    print(*described(found).split("; "), sep="\n")
    return 0


def bench(options: argparse.Namespace) -> int:
    """Measure operators against eager and against the roof of the device at hand."""
    import torch

    from kernels.bench import bench, document
    from kernels.roof import described

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = _device(options.device)
    roof, measured = bench(device, options.repetitions, options.rows, options.widths, options.compiled)
    results = document(device, roof, measured)
    if options.json is not None:
        head = {name: results[name] for name in ("conditions", "liger", "roof")}
        rows = ",\n".join(json.dumps(row) for row in results["rows"])  # one a line, so that a change shows as one
        output.write(options.json, f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n]}}\n')
    of = results["conditions"]
    print(f"{of['device']}, {of['threads']} threads")
    print(f"roof: {described(roof)}")
    print(f"Liger's MLP: {results['liger']}")
    print("     us (20th to 80th percentile)     GB/s  TFLOP/s  % of roof  of first  operator")
    for row, each in zip(results["rows"], measured, strict=True):
        first = next(one for one in measured if one.problem == each.problem)
        spread = f"{row['median_us']:9.1f} ({row['low_us']:.1f} to {row['high_us']:.1f})"
        print(
            f"{spread:<33} {row['gb_per_s']:8.1f} {row['tflop_per_s']:8.3f} {row['roof_percent']:10.1f} "
            f"{each.timing.median_s / first.timing.median_s:9.2f}  {row['op']}, {row['way']}, {row['dtype']}, "
            f"{'x'.join(map(str, row['shape']))}, {'cold' if row['cold'] else 'warm'}"
        )
    return 0


def tune(options: argparse.Namespace) -> int:
    """Measure tiles on the GPU at hand and write the fastest into its table under kernels/tiles."""
    import torch

    from kernels import tiles
    from kernels.tuning import candidates, few_candidates, problems, tune, write_entries

    if not torch.cuda.is_available():
        raise RuntimeError("tiles are measured on a CUDA or ROCm GPU, and none is present")
    device = torch.device("cuda", torch.cuda.current_device())
    arch = tiles.arch_of(device)
    if arch is None:
        raise RuntimeError(f"tune: cannot name the architecture of {device}")
    deadline = math.inf if options.seconds is None else time.monotonic() + options.seconds
    tiles_for = few_candidates if options.few else candidates
    tiles.TABLES.mkdir(exist_ok=True)
    path, entries, left_out = tiles.TABLES / f"{arch}.json", [], 0
    for op in sorted(options.ops, key=OPS.index):  # a folded norm is compared with the tiles found before
        wanted = problems([op], options.dtypes, options.widths, options.rows)
        found = tune(wanted, arch, device, tiles_for=tiles_for, deadline=deadline)
        left_out += len(wanted) - len(found)
        if found:
            write_entries(found, path)
            tiles.forget_tables()
        entries += found
    if options.json is not None:
        output.write(options.json, json.dumps(entries, indent=1) + "\n")
    for entry in entries:
        print(json.dumps(entry))
    print(f"{len(entries)} entries in {path}; vet them: python -m kernels aot --arch {arch}")
    if left_out:
        print(f"shapes left out: {left_out}, since {options.seconds} seconds were over", file=sys.stderr)
    return 1 if left_out else 0


def _require_writable(options: argparse.Namespace) -> None:
    """Say what cannot be written before the work, not after it.

    Raises:
        ValueError: a file or a directory that was asked for cannot be.
    """
    reasons = {"json": output.no_file_reason, "markdown": output.no_file_reason}
    reasons |= {"out": output.no_directory_reason, "cache": output.no_directory_reason}
    for name, reason in reasons.items():
        place = getattr(options, name, None)
        found = None if place is None else reason(place)
        if found is not None:
            raise ValueError(f"--{name}: {found}")


def _device(name: str | None) -> "torch.device":
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA or ROCm GPU is present; use --device cpu")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _parser() -> Parser:
    parser = Parser(prog="python -m kernels", description="Checks and measures the kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _check_options(commands)
    _aot_options(commands)
    _roof_options(commands)
    _bench_options(commands)
    _tune_options(commands)
    return parser


def _aot_options(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = _command(commands, "aot", aot)
    command.add_argument("--arch", action="append", help="may be given more than once; all if not given")
    command.add_argument("--out", type=path, metavar="DIR", help="write the machine code here")
    command.add_argument("--markdown", type=path, metavar="FILE", help="write a table here, one row per tile")
    command.add_argument("--cache", type=path, metavar="DIR", help="keep compiled code here; ~/.cache if not given")
    command.add_argument("--jobs", type=positive, metavar="N", help="compiling processes; one per core if not given")


def _check_options(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = _command(commands, "check", check)
    command.add_argument(
        "--dtypes",
        type=listed(_one_of(DTYPE_NAMES)),
        default=list(DTYPE_NAMES),
        metavar="DTYPE,...",
        help="default: all",
    )
    command.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, if not given")


def _roof_options(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = _command(commands, "roof", roof)
    command.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, if not given")
    command.add_argument("--threads", type=thread_count, metavar="N", help="on a CPU; PyTorch's choice if not given")


def _bench_options(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = _command(commands, "bench", bench)
    command.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, if not given")
    command.add_argument("--rows", type=listed(positive), metavar="N,...", help="row counts; a few if not given")
    command.add_argument(
        "--widths", type=listed(_width), metavar="INxOUT,...", help="such as 768x3072; a few if not given"
    )
    command.add_argument("--repetitions", type=positive, default=15, metavar="N", help="default: %(default)s")
    command.add_argument("--threads", type=thread_count, metavar="N", help="on a CPU; PyTorch's choice if not given")
    command.add_argument("--compiled", action="store_true", help="measure torch.compile as well, on a GPU")


def _tune_options(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = _command(commands, "tune", tune)
    command.add_argument("--ops", type=listed(_one_of(OPS)), default=list(OPS), metavar="OP,...", help="default: all")
    command.add_argument(
        "--dtypes",
        type=listed(_one_of(DTYPE_NAMES)),
        default=["bfloat16"],
        metavar="DTYPE,...",
        help="default: bfloat16",
    )
    command.add_argument("--widths", type=listed(_width), required=True, metavar="INxOUT,...", help="such as 768x3072")
    command.add_argument("--rows", type=listed(positive), required=True, metavar="N,...", help="such as 1,32,512,8192")
    command.add_argument("--few", action="store_true", help="try only the default tile and its neighbours")
    command.add_argument(
        "--seconds", type=positive, metavar="N", help="begin no shape after this long; all if not given"
    )


def _command(commands: "argparse._SubParsersAction[Parser]", name: str, run: object) -> Parser:
    summary = (getattr(run, "__doc__", None) or "").splitlines()[0]
    command = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("--json", type=path, metavar="FILE", help="write the results here")
    command.set_defaults(run=run)
    return command


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {text!r}")
        return text

    return parse


def _width(text: str) -> tuple[int, int]:
    sizes = text.split("x")
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"expected INxOUT, such as 768x3072, got {text!r}")
    return positive(sizes[0]), positive(sizes[1])


if __name__ == "__main__":
    interruption.handle()
    status = main()
    interruption.ignore()
    sys.exit(status)
