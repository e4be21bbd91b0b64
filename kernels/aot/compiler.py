"""One process that compiles the cases it is told and reads their machine code: ``python -m kernels.aot.compiler``.

It is a process of its own because one that interprets (TRITON_INTERPRET=1) has no kernels to compile. Triton's wheel
includes the assemblers, so neither a GPU nor a toolkit is needed.
"""

import importlib
import json
import os
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton

from kernels.aot.cases import KERNELS, Case
from kernels.aot.machine_code import Reading, read_amdgcn, read_sass
from kernels.aot.targets import ARCHS

# What PyTorch's allocator and widths that are multiples of 16 give: Triton specializes on it, as at run time.
ALIGNMENT = 16
POINTERS_OF_FLOAT32 = {"parts_ptr"}


def compile_case(case: Case) -> tuple[Reading, bytes]:
    """Compile a case and read its code: the reading, and a cubin or hsaco; without code where it does not compile."""
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
        return read_amdgcn(case.matrix_instruction, built.asm["amdgcn"], shared_bytes), built.asm["hsaco"]
    return read_sass(case.matrix_instruction, built.asm["cubin"], shared_bytes), built.asm["cubin"]


def _kind(case: Case, name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    if not name.endswith("_ptr"):
        return "fp32" if name == "eps" else "i32"
    split = case.constant("SPLIT")
    is_part = case.kernel == "linear" and name == "out_ptr" and isinstance(split, int) and split > 1
    return "*fp32" if is_part or name in POINTERS_OF_FLOAT32 else f"*{case.dtype}"


def write(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a second run, never sees half of it."""
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
        reading, binary = compile_case(Case(**values | {"absent": tuple(values["absent"])}))
        write(Path(path).with_suffix(".bin"), binary)
        replies.write(json.dumps(asdict(reading)) + "\n")
        replies.flush()


if __name__ == "__main__":
    _serve()
