import subprocess
import sys
from pathlib import Path


def test_the_cpu_path_imports_no_triton() -> None:
    code = (
        "import sys, kernels; assert 'torch' not in sys.modules; import kernels.onednn; print('triton' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "False"
