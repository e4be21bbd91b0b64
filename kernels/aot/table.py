"""The table of what was compiled: what is a fault, and how it is written down, for programs and for people."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton

from kernels.aot.cases import Case
from kernels.aot.machine_code import Reading
from kernels.aot.targets import ARCHS


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
