import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.running_server import RunningServer

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_locust_drives_the_backend_it_is_told_to_without_a_failure(server: RunningServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "locust", "-f", "loadtests/locustfile.py", "--headless", "--host", server.url]
    command += ["--users", "2", "--run-time", "3s", "--backend", "eager", "--rows", "3", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (entry,) = [entry for entry in json.loads(done.stdout) if entry["name"] == "/predict/eager"]
    assert entry["num_requests"] > 0
    assert entry["num_failures"] == 0
