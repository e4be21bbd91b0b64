"""What PyTorch's own compiler makes of the module: the fair rival of hand-written fusion.

Inductor is given frozen weights (so that it may pack them) and compiles before the first request. A function that has
been compiled is never compiled again: a call that would need it raises instead.
"""

import os
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.onednn import PACKING_ROWS
from models.backends.graphs import Bucketed, captured
from models.backends.padding import Padded
from models.config import ModelConfig
from models.mlp import MLP


class CompiledOnCPU(Padded):
    """One graph for every row count, 1 included.

    Measured on two Zen 4 cores at 768x3072, four blocks, float32: one row takes 5.3 ms this way and 7.5 ms with a
    static graph, which uses MKL's product in place of oneDNN's packed one. Other row counts do the same, and each would
    compile for seconds. In bfloat16 both take the same time. Freezing packs the matrices for oneDNN, so this holds them
    a second time.
    """

    implementation = "inductor"
    is_thread_count_free = False

    def __init__(self, model: MLP, config: ModelConfig) -> None:
        super().__init__(model, config)
        self._run = compiled_once(model)
        self._is_compiled = False

    @classmethod
    def unavailable_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG003
        """Look for the C++ compiler and the Python header, as Inductor will."""
        return missing_toolchain()

    def __call__(self, x: Tensor) -> Tensor:
        """See `Backend`."""
        if not self._is_compiled:
            example = self.zeros(PACKING_ROWS)  # oneDNN packs the weights for the row count of the example
            torch._dynamo.mark_dynamic(example, 0)
            # Without it, PyTorch takes a row count of 1 for another case than all others.
            with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
                self._run(example)
            self._is_compiled = True
        # A tensor of our own: compiled code is bound to strides, to the type and to whether autograd could see it, and
        # the caller's may differ in each.
        rows = x.shape[0]
        padding = self.padded_rows(rows) - rows
        if padding:
            return self._run(F.pad(x, (0, 0, 0, padding)))[:rows]
        return self._run(torch.empty(x.shape, dtype=x.dtype).copy_(x))


class CompiledOnCUDA(Bucketed):
    """One static graph for each power of two that rows are padded to, captured once and replayed as a CUDA graph.

    Static shapes let Inductor choose its tiles; the replay saves the launches that dominate at few rows.
    """

    implementation = "inductor"
    is_thread_count_free = False

    @classmethod
    def unavailable_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG003
        """Look for Triton, which Inductor writes its GPU kernels in, and the toolchain that builds their launchers."""
        from torch.utils._triton import has_triton

        if not has_triton():
            return f"Inductor needs Triton to write kernels for {device}, and finds none that works there"
        return missing_toolchain()

    def runner(self, size: int) -> Callable[[Tensor], Tensor]:
        """Compile and capture a bucket."""
        return captured(compiled_once(self.model), self.zeros(size))


def compiled_once(model: MLP) -> Callable[[Tensor], Tensor]:
    """Return `model` compiled by Inductor with its weights frozen; a second compilation raises.

    The compilation happens in the first call, for the shape of its rows; a row count marked dynamic stays free.
    PyTorch keeps compiled code and counts recompilations by code object, so each function made here has a code object
    of its own, and engines do not share one.

    Raises:
        RuntimeError: from the returned function, where a call does not fit what was compiled.
    """
    from torch._inductor import compile_fx

    has_compiled = False

    def compile_first(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        nonlocal has_compiled
        if has_compiled:
            raise RuntimeError("the call does not fit the graph that was compiled for it, and none is compiled anew")
        result = compile_fx.compile_fx(graph, inputs)
        has_compiled = True
        return result

    def forward(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y

    own = FunctionType(forward.__code__.replace(), globals(), forward.__name__, None, forward.__closure__)
    run: Callable[[Tensor], Tensor] = torch.compile(own, backend=compile_first, fullgraph=True)

    def plain(x: Tensor) -> Tensor:
        try:
            return run(x)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise error.inner_exception from error  # what went wrong, in place of who it went wrong for

    def frozen(x: Tensor) -> Tensor:
        if has_compiled:
            return plain(x)
        # Both are read while compiling alone: freezing is for inference only, and the other would make a dimension
        # dynamic because another engine's was different.
        with (
            torch._inductor.config.patch(freezing=True),
            torch._dynamo.config.patch(automatic_dynamic_shapes=False),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "Can't find Python.h")  # it looks in one place; see missing_toolchain
            return plain(x)

    return frozen


def missing_toolchain() -> str | None:
    """Say what Inductor lacks to build C++ here, searching as it does; None where nothing is missing.

    Where Python's headers are in the virtual environment alone, CPATH is made to lead the compiler there.

    Source: torch/_inductor/cpp_builder.py, get_cpp_compiler and _get_python_related_args.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        subprocess.run([compiler, "--version"], capture_output=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return f"Inductor needs a C++ compiler and {compiler!r} does not run: install g++, or name one in CXX"
    if (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return None
    own = Path(sys.prefix) / "include"  # of the virtual environment, where `make setup` puts what Debian splits off
    folder = own / Path(sysconfig.get_path("include")).name
    if not (folder / "Python.h").exists():
        return (
            f"Inductor needs Python.h, which is neither in {sysconfig.get_path('include')} nor in {folder}: install "
            "Python's development files (python3-dev)"
        )
    places = os.environ.get("CPATH", "").split(os.pathsep)
    if str(folder) not in places:
        os.environ["CPATH"] = os.pathsep.join([str(folder), str(own), *filter(None, places)])
    return None
