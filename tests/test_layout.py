"""The folders are found as they are meant to be, and the HTTP side stays light."""

import ast
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_our_kernels_are_the_ones_that_are_found() -> None:
    import kernels

    assert Path(str(kernels.__file__)).is_relative_to(ROOT)


def test_what_a_process_may_use_of_its_machine_is_read_in_one_place() -> None:
    sources = (path for folder in ("kernels", "models", "service") for path in (ROOT / folder).rglob("*.py"))
    reading = [path.relative_to(ROOT) for path in sources if "/sys/fs/cgroup" in path.read_text()]
    assert reading == [Path("models/control_group.py")]


def test_no_distribution_named_kernels_is_installed() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("kernels")


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    from transformers.utils import import_utils

    assert not import_utils.is_kernels_available()


@pytest.mark.parametrize("statement", ["import kernels", "import models, models.config, models.errors, models.weights"])
def test_importing_a_package_loads_neither_torch_nor_triton(statement: str) -> None:
    assert not modules_after(statement) & {"torch", "triton"}


def test_an_http_process_loads_neither_torch_nor_triton() -> None:
    assert not modules_after("import service.__main__, service.server") & {"torch", "triton"}


UNPICKLERS = ("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
CODE_LOADERS = (  # of PyTorch: what they read can run code, as a pickle, a string that is evaluated or a library
    *("torch.load", "torch.serialization", "torch.hub", "torch.package", "torch.jit.load", "torch.ops.load_library"),
    *("torch.export", "torch._export", "torch._inductor.package", "torch._C._aoti"),
    *("torch._inductor.aoti_load_package", "torch.compiler.load_cache_artifacts", "torch.distributed.checkpoint"),
)


def names_of(source: str) -> set[str]:
    """What a module names of others, in full, whatever it calls them itself."""
    nodes = list(ast.walk(ast.parse(source)))
    full: dict[str, str] = {}
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            full |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= set(names.values())
            full |= names
    for node in nodes:
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            found.add(f"{full.get(first, first)}.{rest}")
    return found


def unsafe_names(source: str) -> set[str]:
    """Those that stand for, or in, what runs code that it reads."""
    unsafe = (*UNPICKLERS, *CODE_LOADERS)
    return {name for name in names_of(source) if any(f"{name}.".startswith(f"{each}.") for each in unsafe)}


@pytest.mark.parametrize(
    "source",
    [
        "import torch; torch.load(path)",
        "import torch as t; t.export.load(path)",
        "from torch import export as e; e.load(path)",
        "from torch.export import load",
        "import torch.export",
        "import torch; read = torch._inductor.aoti_load_package",
        "from torch._inductor.package import load_package",
        "import pickle",
        "from joblib import load",
    ],
)
def test_what_runs_code_that_it_reads_is_found_under_any_name(source: str) -> None:
    assert unsafe_names(source)


@pytest.mark.parametrize("package", ["kernels", "models", "service", "loadtests", "examples"])
def test_nothing_that_is_read_is_unpickled_or_run(package: str) -> None:
    paths = list((ROOT / package).rglob("*.py"))
    assert paths
    for path in paths:
        source = path.read_text()
        assert not unsafe_names(source), path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert not (called == "np.load" and "allow_pickle=True" in ast.unparse(node)), path
                if package in ("service", "models"):
                    assert "Connection" not in called.split("."), path  # multiprocessing's, whose recv unpickles


COMPILING_TWICE = """
import torch
import torch.export.pt2_archive._package as archive
from models import load_engine

def refused(*_, **__):
    raise SystemExit("a package was read")

torch.export.load = archive.load_pt2 = torch._C._aoti.AOTIModelPackageLoader = refused
for _ in range(2):
    load_engine({model!r}, backends=("compiled",), threads=1).run(torch.zeros(2, 8), "compiled")
    torch._dynamo.reset()
"""


@pytest.mark.slow
def test_what_torch_compile_keeps_and_finds_again_is_no_package(tiny_model: Path, tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILING_TWICE.format(model=str(tiny_model))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert ".so" in kept
    assert ".pt2" not in kept


ASKING = {"get", "options", "head", "post", "put", "patch", "delete", "request", "stream", "Client", "AsyncClient"}


def calls_without_timeout(source: str) -> list[str]:
    """What asks over httpx and leaves the time that an answer may take to httpx."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        ast.unparse(call)
        for call in calls
        if ast.unparse(call.func) in {f"httpx.{name}" for name in ASKING}
        and "timeout" not in {keyword.arg for keyword in call.keywords}
    ]


def test_no_test_asks_with_the_timeout_of_httpx_which_a_busy_host_exceeds() -> None:
    assert len(calls_without_timeout("httpx.get(url), httpx.Client(), httpx.get(url, timeout=60)")) == 2
    found = {path.name: calls_without_timeout(path.read_text()) for path in (ROOT / "tests").rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_tests_are_no_packages() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
