"""What the documents say holds: figures, settings, error codes, commands."""

import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from docs import render
from service.errors import STATUS
from tests.service.running_server import RunningServer

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def block(language: str, containing: str) -> str:
    """The one code block of the README that contains a text."""
    (found,) = [code for code in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in code]
    return str(found)


@pytest.mark.parametrize("document", render.DOCUMENTS, ids=lambda path: path.name)
def test_the_generated_parts_are_up_to_date(document: Path) -> None:
    text = document.read_text()
    assert render.rendered(text) == text


def test_every_generated_part_stands_in_a_document() -> None:
    texts = [document.read_text() for document in render.DOCUMENTS]
    assert [name for text in texts for _, name, _ in render.PART.findall(text)] == list(render.PARTS)


@pytest.mark.parametrize("code", STATUS)
def test_every_error_code_stands_beside_its_status(code: str) -> None:
    (row,) = [line for line in README.splitlines() if line.startswith("|") and f"`{code}`" in line]
    assert str(STATUS[code]) in row.split("|")[1]


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE))))
def test_every_make_target_that_is_named_is_there(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_curl_line_of_the_readme_gets_the_reply_it_shows(server: RunningServer) -> None:
    command, _, shown = block("", "curl ").removeprefix("$ ").partition("}'\n")
    command = command.replace("http://127.0.0.1:8000", server.url) + "}' -s"
    reply = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
    keys = re.findall(r'"(\w+)":', shown)
    assert re.findall(r'"(\w+)":', reply) == keys
    assert '"labels":"0","backend":"fused","implementation":"onednn"' in shown
    assert '"labels":"0","backend":"fused","implementation":"onednn"' in reply


def test_the_python_of_the_readme_runs() -> None:
    import torch

    code = block("python", "load_engine")
    names = {"rows": torch.zeros(3, 64)}
    exec(code, names)  # noqa: S102  the README's own code is what is tested
    assert names["outputs"].shape == (3, 10)


def test_the_readme_names_every_route(client: httpx.Client) -> None:
    routes = (line.split("|")[1] for line in README.splitlines() if line.startswith("| `"))
    shown = set(re.findall(r"/[\w{}/.]*", " ".join(routes)))
    assert set(client.get("/openapi.json").json()["paths"]) - shown == set()
