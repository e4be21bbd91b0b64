import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("(50, 50)", "got a hard limit of 50"),
        ("(50, 500)", "soft limit 164"),
        ("(200, 500)", "soft limit 200"),
    ],
    ids=["too low", "raised", "enough"],
)
def test_the_limit_of_open_files_is_raised_or_what_is_missing_said(limits: str, said: str) -> None:
    program = f"""
import resource
from loadtests.errors import LoadTestError
from loadtests.generator.open_files import require_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, {limits})
try:
    require_open_files(100)
    print("soft limit", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except LoadTestError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said in done.stdout
