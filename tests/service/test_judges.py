"""What others call this server with, each run as its own users do, from an environment of its own."""

import subprocess
from pathlib import Path

import pytest

from tests.service.running_server import ROOT, RunningServer

pytestmark = pytest.mark.slow

BIN = ROOT / ".judges/bin"
HERE = Path(__file__).parent / "judges"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("client", ["triton_client.py", "kserve_client.py"])
def test_a_client_that_knows_nothing_of_this_server_is_served(server: RunningServer, client: str) -> None:
    run(str(BIN / "python"), str(HERE / client), f"127.0.0.1:{server.port}")


def test_whatever_is_made_up_from_the_schemas_is_answered_as_they_say(server: RunningServer) -> None:
    made_up_from(f"{server.url}/openapi.json")


def test_whatever_is_made_up_from_the_protocol_as_kserve_states_it_is_answered_so(
    server: RunningServer, tmp_path: Path
) -> None:
    file = tmp_path / "protocol.json"
    run(str(BIN / "python"), str(HERE / "kserve_schema.py"), str(file))
    made_up_from(str(file), "--url", server.url)


def made_up_from(schemas: str, *flags: str) -> None:
    run(str(BIN / "schemathesis"), "run", schemas, *flags, "--checks", CHECKS, "-n", "15", "--seed", "0", "--no-color")
