"""Reads a compiled kernel's machine code: registers, stack, shared memory, matrix instructions, the width of loads.

NVIDIA's cubin goes through the disassembler in Triton's wheel; for AMD the compiler's own assembly is read.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton

MNEMONIC = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
WIDE_LOAD = re.compile(r"(?:LDG|LDGSTS)\.[\w.]*128\b|UTMALDG")


@dataclass(frozen=True, slots=True)
class Reading:
    """What the machine code of one case holds.

    Args:
        registers: per thread, without those of the matrix units on gfx942.
        stack_bytes: per thread; above zero, registers spill.
        shared_bytes: per program.
        matrix_instructions: instructions of the kind that the case asks for; 0 where it asks for none.
        wide_loads: loads of at least 16 bytes per thread from global memory.
        error: the compiler's, in one line.
    """

    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    matrix_instructions: int = 0
    wide_loads: int = 0
    error: str | None = None


def read_sass(matrix_instruction: str | None, cubin: bytes, shared_bytes: int) -> Reading:
    """Read a cubin; `matrix_instruction` is the one to count, without its suffixes."""
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
        matrix_instructions=sum(mnemonic.split(".")[0] == matrix_instruction for mnemonic in mnemonics),
        wide_loads=sum(bool(WIDE_LOAD.match(mnemonic)) for mnemonic in mnemonics),
    )


def read_amdgcn(matrix_instruction: str | None, code: str, shared_bytes: int) -> Reading:
    """Read AMD's assembly; `matrix_instruction` None: none is counted."""

    def metadata(name: str) -> int:
        return sum(int(value) for value in re.findall(rf"\.{name}:\s+(\d+)", code))

    return Reading(
        registers=metadata("vgpr_count"),
        stack_bytes=metadata("private_segment_fixed_size"),
        shared_bytes=shared_bytes,
        matrix_instructions=len(re.findall(r"^\s+v_mfma_", code, re.MULTILINE)) if matrix_instruction else 0,
        wide_loads=len(re.findall(r"^\s+(?:global|buffer|flat)_load_dwordx4\b", code, re.MULTILINE)),
    )
