"""What a kernel is compiled from, so that a change of it is seen."""

import ast
import hashlib
from functools import cache
from pathlib import Path

from kernels.aot.cases import KERNELS

PACKAGE = Path(__file__).parents[1]


@cache
def source_hash(kernel: str) -> str:
    """Hash what `kernel` is compiled from: its function and the jitted ones it calls, less comments and docstrings.

    Raises:
        ValueError: the kernel is unknown, or two jitted functions have one name.
    """
    if kernel not in KERNELS:
        raise ValueError(f"aot: kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    functions = _jitted(PACKAGE)
    pending, sources = [KERNELS[kernel][1]], dict[str, str]()
    while pending:
        name = pending.pop()
        if name in functions and name not in sources:
            sources[name], names = functions[name]
            pending += names
    return hashlib.sha256("\n".join(sources[name] for name in sorted(sources)).encode()).hexdigest()[:16]


@cache
def _jitted(package: Path) -> dict[str, tuple[str, list[str]]]:
    """Return the source of each jitted function of a package, less comments and docstring, and the names in it.

    Raises:
        ValueError: two have one name, by which one would be taken for the other.
    """
    found: dict[str, tuple[str, list[str]]] = {}
    for path in sorted(package.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                if node.name in found:
                    raise ValueError(
                        f"{path.name}: {node.name}: expected a name that no other jitted function has, since their "
                        "sources are told apart by it; rename it"
                    )
                names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
                found[node.name] = ast.unparse(_without_docstring(node)), names
    return found


def _is_jit(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).startswith("triton.jit")


def _without_docstring(node: ast.FunctionDef) -> ast.FunctionDef:
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    return node
