"""The command line: ``python -m kernels check|aot``."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status: 0, 1 where a check fails, or 2 with one line on stderr."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.run(options)
    except OSError as error:
        sentence = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (RuntimeError, TypeError, ValueError) as error:
        sentence = str(error)
    except KeyboardInterrupt:
        print(f"{parser.prog} {options.command}: interrupted", file=sys.stderr)
        return 130
    else:
        return status
    print(f"{parser.prog} {options.command}: error: {sentence}", file=sys.stderr)
    return 2


def aot(options: argparse.Namespace) -> int:
    """Compile every shipped kernel for GPUs that need not be present; fail where the code is not what it must be."""
    from kernels import aot

    cache_dir = options.cache or aot.default_cache()
    compiled = aot.compile_all(aot.cases(options.arch or tuple(aot.ARCHS)), cache_dir, options.jobs)
    if options.out is not None:
        aot.write_binaries(compiled, options.out)
    if options.json is not None:
        options.json.write_text(aot.to_json(compiled))
    if options.markdown is not None:
        options.markdown.write_text(aot.to_markdown([each.record() for each in compiled]))
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

    checks = check_all(device)
    if options.json is not None:
        options.json.write_text(json.dumps([each.record() for each in checks], indent=1) + "\n")
    print("runs on      dtype     rows x in x out  operator")
    for each in checks:
        shape, dtype = "x".join(map(str, each.shape)), str(each.dtype).removeprefix("torch.")
        verdict = each.problem or (f"not run: {each.skipped}" if each.skipped else "exact enough")
        print(f"{each.implementation:<11}  {dtype:<8}  {shape:<15}  {each.op}: {verdict}")
    wrong, skipped = (sum(getattr(each, name) is not None for each in checks) for name in ("problem", "skipped"))
    print(f"{len(checks)} comparisons on {device}, {wrong} wrong, {skipped} not run")
    if device.type == "cpu":
        print('"interpreter" is Triton\'s own, on the CPU: it checks what the kernels compute, not what a GPU runs')
    return 1 if wrong else 0


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
    return parser


def _aot_options(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = _command(commands, "aot", aot)
    command.add_argument("--arch", action="append", help="may be given more than once; all if not given")
    command.add_argument("--out", type=Path, metavar="DIR", help="write the machine code here")
    command.add_argument("--markdown", type=Path, metavar="FILE", help="write a table here, one row a tile")
    command.add_argument("--cache", type=Path, metavar="DIR", help="keep compiled code here; ~/.cache if not given")
    command.add_argument("--jobs", type=_positive, metavar="N", help="compiling processes; one a core if not given")


def _check_options(commands: "argparse._SubParsersAction[Parser]") -> None:
    command = _command(commands, "check", check)
    command.add_argument("--device", choices=("cpu", "cuda"), help="the GPU where there is one, if not given")


def _command(commands: "argparse._SubParsersAction[Parser]", name: str, run: object) -> Parser:
    summary = (getattr(run, "__doc__", None) or "").splitlines()[0]
    command = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    command.set_defaults(run=run)
    return command


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above zero, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
