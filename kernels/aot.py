"""Compiles every kernel for GPUs that need not be present, and judges the machine code.

Triton's wheel brings the assemblers and NVIDIA's disassembler, so neither a GPU nor a toolkit is needed. A process of
its own compiles, since an interpreting one (TRITON_INTERPRET=1) holds no kernels to compile.
"""

import ast
import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
import triton

from kernels.activation import ACTIVATIONS
from kernels.activation import BLOCK as ACTIVATION_BLOCK
from kernels.linear import BLOCK as SUM_BLOCK
from kernels.norm import WIDEST, norm_block
from kernels.progress import Progress
from kernels.tiles import GROUP_M, Tile, shipped

PACKAGE = Path(__file__).parent
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# What PyTorch's allocator and widths that are multiples of 16 give: Triton specializes on it, as at run time.
ALIGNMENT = 16


class Arch(NamedTuple):
    """A GPU to compile for.

    Args:
        backend: Triton's name of it.
        target: Triton's name of the architecture.
        warp: threads.
        shared_bytes: the most that one program may have.
    """

    backend: str
    target: int | str
    warp: int
    shared_bytes: int


# Source of the bounds: CUDA C++ Programming Guide, technical specifications per compute capability; CDNA3 ISA, LDS.
ARCHS = {
    "sm_80": Arch("cuda", 80, 32, 163 * 1024),
    "sm_90": Arch("cuda", 90, 32, 227 * 1024),
    "sm_100": Arch("cuda", 100, 32, 227 * 1024),
    "gfx942": Arch("hip", "gfx942", 64, 64 * 1024),
}

# Where each kernel stands.
KERNELS = {
    "gated_activation": ("activation", "_gated_activation_kernel"),
    "gated_linear": ("gated_linear", "_gated_linear_kernel"),
    "gated_linear_tma": ("gated_linear", "_gated_linear_tma_kernel"),
    "linear": ("linear", "_linear_kernel"),
    "linear_tma": ("linear", "_linear_tma_kernel"),
    "linear_sum": ("linear", "_linear_sum_kernel"),
    "norm": ("norm", "_norm_kernel"),
}
MATRIX_KERNELS = {"gated_linear", "gated_linear_tma", "linear", "linear_tma"}
POINTERS_OF_FLOAT32 = {"parts_ptr"}

MNEMONIC = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
WIDE_LOAD = re.compile(r"(?:LDG|LDGSTS)\.[\w.]*128\b|UTMALDG")


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel to compile for one architecture.

    Args:
        kernel: a key of `KERNELS`.
        arch: a key of `ARCHS`.
        dtype: a key of `DTYPES`; of the operands and the result.
        constants: compile-time parameters of the kernel.
        absent: pointers that are None.
        num_warps: warps a program.
        num_stages: steps whose loads are in flight.
    """

    kernel: str
    arch: str
    dtype: str
    constants: tuple[tuple[str, int | bool | str | None], ...]
    absent: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3

    @property
    def name(self) -> str:
        """A name that no other case has, fit for a file."""
        constants = [f"{name.lower()}-{value}" for name, value in self.constants]
        absent = [f"no-{name.removesuffix('_ptr')}" for name in self.absent]
        words = [self.kernel, self.dtype, *constants, *absent, f"warps-{self.num_warps}", f"stages-{self.num_stages}"]
        return ".".join([*words, self.arch])

    def constant(self, name: str) -> int | bool | str | None:
        """Return a compile-time parameter, None where the kernel has none of that name."""
        return dict(self.constants).get(name)

    @property
    def matrix_instruction(self) -> str | None:
        """The instruction the products must run on, or None where there is none to ask for.

        float32 without TF32 has none on NVIDIA, and is multiplied by FFMA. Hopper's and Blackwell's asynchronous
        products take 64 rows and more; smaller tiles use the older HMMA there.
        """
        if self.kernel not in MATRIX_KERNELS:
            return None
        if self.arch == "gfx942":
            return "v_mfma"
        if self.dtype == "fp32":
            return None
        rows = self.constant("BLOCK_M")
        is_large = isinstance(rows, int) and rows >= 64
        return {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(self.arch, "HMMA") if is_large else "HMMA"


@dataclass(frozen=True, slots=True)
class Reading:
    """What the machine code of one case holds.

    Args:
        registers: a thread, without those of the matrix units on gfx942.
        stack_bytes: a thread; above zero, registers spill.
        shared_bytes: a program.
        matrix_instructions: instructions of the kind that the case asks for; 0 where it asks for none.
        wide_loads: loads of 16 bytes a thread or more from global memory.
        error: the compiler's, in one line.
    """

    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    matrix_instructions: int = 0
    wide_loads: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """A case, what was read, the code itself, and the hash of the source it came from."""

    case: Case
    reading: Reading
    source: str
    binary: bytes = field(default=b"", repr=False)

    def record(self) -> dict[str, Any]:
        """Return the row of the table, ready for JSON."""
        tile = {name: value for name, value in self.case.constants if name != "ACTIVATION"}
        return {
            "kernel": self.case.kernel,
            "dtype": self.case.dtype,
            "activation": self.case.constant("ACTIVATION"),
            "arch": self.case.arch,
            "tile": {**tile, "num_warps": self.case.num_warps, "num_stages": self.case.num_stages},
            "absent": list(self.case.absent),
            **asdict(self.reading),
            "matrix_instruction": self.case.matrix_instruction,
            "source": self.source,
            "triton": triton.__version__,
        }

    @property
    def faults(self) -> list[str]:
        """Say what is wrong with the code, each in a few words."""
        reading, bound = self.reading, ARCHS[self.case.arch].shared_bytes
        if reading.error is not None:
            return [f"does not compile: {reading.error}"]
        faults = []
        if reading.stack_bytes:
            faults.append(f"spills: {reading.stack_bytes} bytes of stack a thread, expected none")
        if self.case.matrix_instruction is not None and not reading.matrix_instructions:
            faults.append(f"has no {self.case.matrix_instruction} instruction")
        if reading.shared_bytes > bound:
            faults.append(f"needs {reading.shared_bytes} bytes of shared memory, {self.case.arch} has {bound}")
        return faults


def cases(archs: Sequence[str] = tuple(ARCHS)) -> list[Case]:
    """List what is shipped: every kernel, dtype, activation and tile, for each of `archs`.

    An operand that may be left out is a load outside the loop: cases have them all. Without it registers are allotted
    anew, and not always fewer, so that in bfloat16 the gated layer is compiled both ways, and the others once.

    Raises:
        ValueError: an architecture is unknown.
    """
    for arch in archs:
        if arch not in ARCHS:
            raise ValueError(f"aot: arch must be one of {', '.join(ARCHS)}, got {arch!r}")
    return [case for arch in archs for dtype in DTYPES for case in _cases(arch, dtype)]


def _cases(arch: str, dtype: str) -> Iterator[Case]:
    def constants(**values: int | bool | str | None) -> tuple[tuple[str, int | bool | str | None], ...]:
        return tuple(values.items())

    def blocks(tile: Tile) -> dict[str, int]:
        return {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP": GROUP_M}

    for activation in ACTIVATIONS:
        yield Case(
            "gated_activation", arch, dtype, constants(ACTIVATION=activation, BLOCK_M=1, BLOCK_N=ACTIVATION_BLOCK)
        )
    narrow = {"BLOCK_M": ACTIVATION_BLOCK // 128, "BLOCK_N": 128}
    yield Case("gated_activation", arch, dtype, constants(ACTIVATION="gelu", **narrow))

    for tile in shipped("gated_linear", DTYPES[dtype], arch):
        kernel = "gated_linear_tma" if tile.feed == "tma" else "gated_linear"
        for activation in ACTIVATIONS:
            parameters = constants(ACTIVATION=activation, **blocks(tile))
            yield Case(kernel, arch, dtype, parameters, (), tile.num_warps, tile.num_stages)
            if dtype == "bf16":
                biases = ("gate_bias_ptr", "up_bias_ptr")
                yield Case(kernel, arch, dtype, parameters, biases, tile.num_warps, tile.num_stages)

    for tile in shipped("linear", DTYPES[dtype], arch):
        is_tma = tile.feed == "tma"
        ends: list[tuple[str | None, int, tuple[str, ...]]] = [(activation, 1, ()) for activation in ACTIVATIONS]
        ends += [(None, 1, ("bias_ptr", "residual_ptr"))]
        ends += [] if is_tma else [(None, 4, ())]
        for end, split, absent in ends:
            parameters = constants(ACTIVATION=end, **blocks(tile), **({} if is_tma else {"SPLIT": split}))
            kernel = "linear_tma" if is_tma else "linear"
            yield Case(kernel, arch, dtype, parameters, absent, tile.num_warps, tile.num_stages)

    for end in (None, *ACTIVATIONS):
        parameters = constants(ACTIVATION=end, BLOCK_M=1, BLOCK_N=SUM_BLOCK, SPLIT=8)
        yield Case("linear_sum", arch, dtype, parameters)

    for width in (1024, 4096, WIDEST):
        block = norm_block(width)
        for is_centered in (False, True):
            parameters = constants(IS_CENTERED=is_centered, BLOCK_M=block.block_m, BLOCK_N=block.block_n)
            bias = () if is_centered else ("bias_ptr",)
            yield Case("norm", arch, dtype, parameters, bias, block.num_warps)
            if width == 1024:
                yield Case("norm", arch, dtype, parameters, ("residual_ptr", *bias, "total_ptr"), block.num_warps)


@cache
def source_hash(kernel: str) -> str:
    """Hash what `kernel` is compiled from: its function and the jitted ones it calls, less comments and docstrings.

    Raises:
        ValueError: the kernel is unknown.
    """
    if kernel not in KERNELS:
        raise ValueError(f"aot: kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    functions = {
        node.name: node
        for path in sorted(PACKAGE.glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list))
    }
    pending, sources = [KERNELS[kernel][1]], dict[str, str]()
    while pending:
        name = pending.pop()
        if name in functions and name not in sources:
            sources[name] = ast.unparse(_without_docstring(functions[name]))
            pending += (node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name))
    return hashlib.sha256("\n".join(sources[name] for name in sorted(sources)).encode()).hexdigest()[:16]


def _is_jit(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("triton.jit")


def _without_docstring(node: ast.FunctionDef) -> ast.FunctionDef:
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    return node


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
            failures: list[str] = []
            workers = [
                threading.Thread(target=_compile_each, args=(missing, found, cache_dir, scratch, progress, failures))
                for _ in range(min(total, jobs or len(os.sched_getaffinity(0))))
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        if failures:
            raise RuntimeError(f"aot: a compiling process ended early, at {'; '.join(failures)}")
    return [found[case] for case in wanted]


def _key(case: Case) -> str:
    words = case.name, source_hash(case.kernel), triton.__version__, _reader_hash()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:32]


@cache
def _reader_hash() -> str:
    readers = inspect.getsource(_compile), inspect.getsource(_kind), inspect.getsource(_read_sass)
    words = *readers, inspect.getsource(_read_amdgcn), MNEMONIC.pattern, WIDE_LOAD.pattern, str(ARCHS)
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
    failures: list[str],
) -> None:
    """Feed one compiling process until nothing is missing."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": scratch, "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-m", "kernels.aot"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=PACKAGE.parent, env=env) as process:
        assert process.stdin is not None  # noqa: S101  # both are pipes
        assert process.stdout is not None  # noqa: S101
        while not failures:
            try:
                case = missing.get_nowait()
            except Empty:
                break
            path = cache_dir / _key(case)
            process.stdin.write(json.dumps([asdict(case), str(path)]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                failures.append(case.name)
                break
            reading = Reading(**json.loads(line))
            if reading.error is None:
                _write(path.with_suffix(".json"), json.dumps(asdict(reading)).encode())
                found[case] = Compiled(case, reading, source_hash(case.kernel), path.with_suffix(".bin").read_bytes())
            else:  # not kept: the next run tries again
                found[case] = Compiled(case, reading, source_hash(case.kernel))
            progress.step(case.name)
        process.stdin.close()


def _write(path: Path, data: bytes) -> None:
    """Write so that a reader, or a second run, never sees half a file."""
    part = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    part.write_bytes(data)
    part.replace(path)


def _serve() -> None:
    """Compile the cases that come in on stdin, one a line, and answer with what was read."""
    replies, sys.stdout = sys.stdout, sys.stderr
    for module, _ in KERNELS.values():  # all at once, so that an edit meanwhile is not half seen
        importlib.import_module(f"kernels.{module}")
    for line in sys.stdin:
        values, path = json.loads(line)
        values["constants"] = tuple((name, value) for name, value in values["constants"])
        reading, binary = _compile(Case(**values | {"absent": tuple(values["absent"])}))
        _write(Path(path).with_suffix(".bin"), binary)
        replies.write(json.dumps(asdict(reading)) + "\n")
        replies.flush()


def _compile(case: Case) -> tuple[Reading, bytes]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, attribute = KERNELS[case.kernel]
    kernel = getattr(importlib.import_module(f"kernels.{module}"), attribute)
    constants = {**dict(case.constants), **dict.fromkeys(case.absent)}
    signature = {name: _kind(case, name, constants) for name in kernel.arg_names}
    aligned = [at for at, kind in enumerate(signature.values()) if kind not in ("constexpr", "fp32")]
    attributes = {(at,): [["tt.divisibility", ALIGNMENT]] for at in aligned}
    arch = ARCHS[case.arch]
    try:
        built = triton.compile(
            ASTSource(kernel, signature, constants, attributes),
            target=GPUTarget(arch.backend, arch.target, arch.warp),
            options={"num_warps": case.num_warps, "num_stages": case.num_stages},
        )
    except Exception as error:  # whatever the compiler throws is the answer for this case
        return Reading(error=" ".join(f"{type(error).__name__}: {error}".split())[:400]), b""
    shared_bytes = int(built.metadata.shared)
    if arch.backend == "hip":
        return _read_amdgcn(case, built.asm["amdgcn"], shared_bytes), built.asm["hsaco"]
    return _read_sass(case, built.asm["cubin"], shared_bytes), built.asm["cubin"]


def _kind(case: Case, name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if not name.endswith("_ptr"):
        return "fp32" if name == "eps" else "i32"
    split = case.constant("SPLIT")
    is_part = case.kernel == "linear" and name == "out_ptr" and isinstance(split, int) and split > 1
    return "*fp32" if is_part or name in POINTERS_OF_FLOAT32 else f"*{case.dtype}"


def _read_sass(case: Case, cubin: bytes, shared_bytes: int) -> Reading:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tools / tool, *options, file.name], capture_output=True, text=True, check=True).stdout
            for tool, options in (("cuobjdump", ["-res-usage"]), ("nvdisasm", []))
        )
    resources = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    mnemonics = MNEMONIC.findall(sass)
    spills = sum(mnemonic.startswith(("STL", "LDL")) for mnemonic in mnemonics)
    return Reading(
        registers=resources["REG"],
        stack_bytes=resources["STACK"] or spills,  # a spill that no frame accounts for is one all the same
        shared_bytes=shared_bytes,
        matrix_instructions=sum(mnemonic.split(".")[0] == case.matrix_instruction for mnemonic in mnemonics),
        wide_loads=sum(bool(WIDE_LOAD.match(mnemonic)) for mnemonic in mnemonics),
    )


def _read_amdgcn(case: Case, code: str, shared_bytes: int) -> Reading:
    def metadata(name: str) -> int:
        return sum(int(value) for value in re.findall(rf"\.{name}:\s+(\d+)", code))

    return Reading(
        registers=metadata("vgpr_count"),
        stack_bytes=metadata("private_segment_fixed_size"),
        shared_bytes=shared_bytes,
        matrix_instructions=len(re.findall(r"^\s+v_mfma_", code, re.MULTILINE)) if case.matrix_instruction else 0,
        wide_loads=len(re.findall(r"^\s+(?:global|buffer|flat)_load_dwordx4\b", code, re.MULTILINE)),
    )


def write_binaries(compiled: Iterable[Compiled], out: Path) -> None:
    """Write each case's machine code into `out`: ``NAME.cubin``, or ``NAME.hsaco`` for gfx942."""
    out.mkdir(parents=True, exist_ok=True)
    for each in compiled:
        if each.binary:
            suffix = "hsaco" if ARCHS[each.case.arch].backend == "hip" else "cubin"
            (out / f"{each.case.name}.{suffix}").write_bytes(each.binary)


def to_markdown(records: Sequence[dict[str, Any]]) -> str:
    """Render the table's records, one row per tile: the most, or fewest to most, over its activations and variants."""
    rows: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        key = record["arch"], record["kernel"], record["dtype"], _shown(record["tile"])
        rows.setdefault(key, []).append(record)
    versions = ", ".join(sorted({record["triton"] for record in records}))
    lines = [
        "# Machine code of every shipped kernel",
        "",
        f"Compiled by Triton {versions} without a GPU: `python -m kernels aot --json docs/results/aot.json --markdown",
        "docs/results/aot.md`. A row is one tile; numbers are ranges over its activations and variants (no bias, no",
        "residual, K split). Products of float32 stay float32, for which NVIDIA has no matrix instruction.",
        "",
        "| arch | kernel | dtype | tile | variants | registers | stack bytes | shared bytes | matrix instructions "
        "| 16-byte loads |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, group in rows.items():
        numbers = [_range(group, name) for name in ("registers", "stack_bytes", "shared_bytes")]
        instruction = group[0]["matrix_instruction"]
        count = f"{_range(group, 'matrix_instructions')} {instruction}" if instruction else "none to ask for"
        cells = [*key, str(len(group)), *numbers, count, _range(group, "wide_loads")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(tile: dict[str, Any]) -> str:
    sizes = "x".join(str(tile[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if name in tile)
    kind = "" if "IS_CENTERED" not in tile else " layer" if tile["IS_CENTERED"] else " rms"
    return f"{sizes}{kind}, {tile['num_warps']} warps, {tile['num_stages']} stages"


def _range(records: Sequence[dict[str, Any]], name: str) -> str:
    values = {int(record[name]) for record in records}
    return str(min(values)) if len(values) == 1 else f"{min(values)} to {max(values)}"


def to_json(compiled: Iterable[Compiled]) -> str:
    """Render the table as a JSON list, one record a line so that a change shows as one."""
    return "[\n" + ",\n".join(json.dumps(each.record()) for each in compiled) + "\n]\n"


if __name__ == "__main__":
    _serve()
