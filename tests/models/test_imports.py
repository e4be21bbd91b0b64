"""What importing this package costs: the HTTP processes import it, and must not pay for PyTorch."""

import subprocess
import sys

import pytest

import models


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import models",
        "from models import ModelConfig, WeightsError, UnknownBackendError",
        "import models.errors, models.config, models.directory",
        "from models.directory import resolve; from models import weights, ModelConfig; d = resolve('digits'); "
        "weights.check(d, ModelConfig.load(d))",
    ],
)
def test_what_the_http_processes_use_brings_no_pytorch(statement: str) -> None:
    assert not modules_after(statement) & {"torch", "triton", "pydantic", "sklearn", "transformers"}


def test_no_command_needs_pytorch_to_say_what_it_takes() -> None:
    statement = """
from models.__main__ import COMMANDS, main
for command in COMMANDS:
    try:
        main([command, "--help"])
    except SystemExit:
        continue
"""
    assert not modules_after(statement) & {"torch", "triton", "sklearn", "transformers"}


def test_every_public_name_exists() -> None:
    assert models.__all__ == sorted(models.__all__)
    assert all(hasattr(models, name) for name in models.__all__)
    assert set(dir(models)) == set(models.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'models' has no attribute 'load_motor'"):
        getattr(models, "load_motor")  # noqa: B009, an attribute mypy would refuse


def test_the_engine_comes_when_it_is_asked_for_and_on_the_cpu_without_triton_and_the_compiler() -> None:
    found = modules_after("from models import load_engine; load_engine('digits', backends=('eager', 'fused'))")
    assert "torch" in found
    assert not found & {"triton", "torch._inductor", "torch._dynamo.eval_frame"}
