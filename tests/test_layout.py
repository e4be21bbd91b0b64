"""The folders are found as they are meant to be, and the HTTP side stays light."""

import ast
import importlib.metadata
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


@pytest.mark.parametrize("package", ["service", "models"])
def test_nothing_that_is_read_is_unpickled(package: str) -> None:
    unsafe = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in imported} & unsafe, path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called != "torch.load", path
                assert not (called == "np.load" and "allow_pickle=True" in ast.unparse(node)), path
                assert "Connection" not in called.split("."), path  # multiprocessing's, whose recv unpickles


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
