"""The examples that call a running server do so, each as its reader would run it."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.loadtests.faulty_server import document, faulty_server, reply
from tests.made_model import write_made_model
from tests.service.running_server import ROOT, RunningServer, free_port

EXAMPLES = ROOT / "examples"
KEY = "a key of its own"
PYTHON = str(ROOT / ".judges/bin/python")


def output_of(*command: str, **environment: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_curl_example_shows_five_replies(server: RunningServer) -> None:
    replies = [json.loads(line) for line in output_of("sh", str(EXAMPLES / "predict_curl.sh"), server.url).splitlines()]
    default, eager, two, compared, inferred = replies
    assert (default["labels"], default["backend"], eager["backend"]) == ("0", "fused", "eager")
    assert (two["labels"], two["id"]) == (["0", "0"], "two zeros")
    assert set(compared["backends"]) == {"eager", "compiled", "fused"}
    assert inferred["outputs"][0]["shape"] == [1, 10]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_curl_example_fails_where_a_request_does(server: RunningServer) -> None:
    done = subprocess.run(
        ["sh", str(EXAMPLES / "predict_curl.sh"), f"{server.url}/nowhere"], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert json.loads(done.stdout)["code"] == "not_found"


@pytest.mark.slow
@pytest.mark.parametrize("example", ["infer_tritonclient.py", "infer_kserve.py"])
def test_a_clients_example_gets_one_answer_from_every_backend(server: RunningServer, example: str) -> None:
    lines = output_of(PYTHON, str(EXAMPLES / example), server.url).splitlines()
    shown = [re.fullmatch(r"(\w+) \((\w+)\): largest output of each row at (\d \d)", line) for line in lines]
    assert [found[1] for found in shown if found] == ["eager", "compiled", "fused"]
    assert len({found[3] for found in shown if found}) == 1


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that asks for its key and has another model."""
    directory = tmp_path_factory.mktemp("guarded")
    model = write_made_model(directory, "tiny", dim=8, hidden=16, depth=1)
    server = RunningServer(directory / "log", "--model", str(model), MLP_API_KEY=KEY)
    try:
        yield server.wait_ready()
    finally:
        server.end()


@pytest.mark.slow
def test_a_clients_example_says_why_it_is_refused(guarded: RunningServer) -> None:
    for example, key, model, sentence, status in (
        ("infer_kserve.py", "", "tiny", "expected this server's key", "'401 "),
        ("infer_kserve.py", KEY, "tiny", "expected (..., 8), got (2, 64)", "'400 "),
        ("infer_tritonclient.py", "", "tiny", "expected this server's key", "[401] "),
        ("infer_tritonclient.py", KEY, "small", "no model 'small' here; this server has 'tiny'", "[404] "),
    ):
        environment = os.environ | {"MLP_API_KEY": key}
        command = [PYTHON, str(EXAMPLES / example), guarded.url, model]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 1
        assert sentence in done.stderr
        assert status in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("example", ["infer_tritonclient.py", "infer_kserve.py"])
def test_a_clients_example_tells_in_a_line_that_no_server_is_there(example: str) -> None:
    command = [PYTHON, str(EXAMPLES / example), f"http://127.0.0.1:{free_port()}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "onnection" in done.stderr


NOT_THE_PROTOCOL = "expected replies of the Open Inference Protocol, got another one"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metadata", "sent", "sentence"),
    [
        (None, b"garbage\r\n\r\n", "garbage|HTTPParseError"),
        (None, reply(b"<html>hello</html>"), NOT_THE_PROTOCOL),
        (None, document([1]), NOT_THE_PROTOCOL),
        (document({"inputs": [{"shape": [-1, 64]}]}), document({}), NOT_THE_PROTOCOL),
        (None, reply(b"<html>no</html>", status="500 No"), "500"),
    ],
    ids=["bytes", "page", "list", "inference", "error"],
)
def test_a_clients_example_tells_in_a_line_that_a_server_speaks_something_else(
    metadata: bytes | None, sent: bytes, sentence: str
) -> None:
    with faulty_server(lambda path, *_: metadata if metadata and path == "/v2/models/digits" else sent) as server:
        commands = [
            [PYTHON, str(EXAMPLES / example), server.url] for example in ("infer_tritonclient.py", "infer_kserve.py")
        ]
        started = [subprocess.Popen(each, stderr=subprocess.PIPE, text=True) for each in commands]
        for process in started:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 1
            assert re.search(sentence, errors), errors
            assert errors.count("\n") == 1


@pytest.mark.slow
def test_the_examples_send_the_key_and_take_another_model(guarded: RunningServer) -> None:
    for name, *flags in (("infer_tritonclient.py", "tiny"), ("infer_kserve.py", "tiny", "8")):
        said = output_of(PYTHON, str(EXAMPLES / name), guarded.url, *flags, MLP_API_KEY=KEY)
        assert said.count("largest output") == 3
