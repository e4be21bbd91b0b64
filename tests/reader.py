"""Somebody who types what a page says, line by line, with little to measure."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from tests.made_model import write_made_model
from tests.service.running_server import ROOT, RunningServer, free_port
from tests.shrink import name_of, shrunk

LIMIT_S = 120
OURS = ("Makefile", "requirements", "docs", "examples", "kernels", "loadtests", "models", "service")
ADDRESS = "http://127.0.0.1:8000"

# The sentence before the commands that a server would share the cores with.
STOP = "Stop the server first"
# Those whose status also tells whether an objective was kept to, which a busy host may keep them from.
JUDGES = ("loadtests scenario",)
# The backends of a server that `make serve` starts: compiling takes longer than all the rest.
BACKENDS = {"MLP_BACKENDS": "eager,fused"}
# The set-up is done, since the tests run; make would do it again where a pin's file is newer.
DONE = [f"--old-file={stamp}" for stamp in (".venv/runtime.stamp", ".venv/dev.stamp", ".judges/stamp", ".peers/stamp")]
PEERS = ROOT / ".peers"


class Block(NamedTuple):
    """The commands of one block of a page, and what stands between it and the one before."""

    prose: str
    commands: list[str]


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of commands, which name no language; where one has prompts, the rest is what they show."""
    found, prose = [], ""
    for before, language, code in re.findall(r"(.*?)^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        prose += before
        if not language:
            whole = code.replace("\\\n", "").splitlines()
            asked = [line.removeprefix("$ ") for line in whole if line.startswith("$ ")]
            found.append(Block(prose, asked or whole))
            prose = ""
    return found


def commands_of(text: str) -> list[str]:
    """Return every command of a page, in its order."""
    return [line for block in blocks_of(text) for line in block.commands]


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
COMMANDS = {page: found for page in PAGES if (found := commands_of((ROOT / page).read_text()))}
LINES = list(dict.fromkeys(line for found in COMMANDS.values() for line in found))


class MadeServer(RunningServer):
    """`make serve` in a reader's folder."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        super().__init__(folder / "server.log", *flags, **BACKENDS)

    def command(self, arguments: Sequence[str]) -> list[str]:
        return ["make", "-C", str(self.folder), *DONE, "serve", f"ARGS={shlex.join(arguments)}"]


class Reader:
    """Types commands in a folder that looks like the project's root, but has an `out` of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: RunningServer | None = None
        self.workers: list[subprocess.Popen[str]] = []
        self.master = ""  # where a comparison waits for workers; chosen when the first one is started
        for name in OURS:
            (folder / name).symlink_to(ROOT / name)
        (folder / ".venv").symlink_to(sys.prefix)
        write_checkpoint(folder / "path/to/hugging-face-directory", depth=4)

    def follow(self, page: str, but: Sequence[str] = ()) -> dict[str, str]:
        """Type every command of a page but some, from top to bottom; return what each one printed."""
        printed = {}
        for block in blocks_of((ROOT / page).read_text()):
            if STOP in block.prose:
                self.stop()
            for line in block.commands:
                if line not in but:
                    printed[line] = self.type(line)
        return printed

    def type(self, line: str) -> str:
        """Type one command, and return what it printed.

        Raises:
            AssertionError: it ended with another status than 0 or, where it judges, 1.
        """
        words = shlex.split(self.here(line))
        if words[:2] == ["make", "serve"]:
            self.stop()
            self.server = MadeServer(self.folder, *shlex.split(words[2].removeprefix("ARGS=") if words[2:] else ""))
            return self.server.wait_ready().output
        if words[0] == "make":
            return self.run(["make", *DONE, *words[1:]])
        if words[0] == "curl":
            return self.run([*words, "--silent", "--fail"])
        words = shrunk(words)
        if name_of(words).partition(" ")[0] in ("kernels", "models"):
            return self.run_here(words[2], words[3:])
        if name_of(words) == "loadtests worker":  # which waits for the command of the next line
            self.workers.append(subprocess.Popen(words, cwd=self.folder, env=environment(), text=True))
            return ""
        return self.run(words, (0, 1) if name_of(words) in JUDGES else (0,))

    def here(self, line: str) -> str:
        """Return a line with the addresses that hold here."""
        url = self.server.url if self.server else ADDRESS
        if " worker " in line:
            self.master = f"127.0.0.1:{free_port()}"
        places = {ADDRESS: url, "http://192.0.2.9:8000": url, "192.0.2.7:5557": self.master}
        for there, here in places.items():
            line = line.replace(there, here)
        return line

    def run(self, words: Sequence[str], statuses: Sequence[int] = (0,)) -> str:
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode in statuses, f"{shlex.join(words)}\n{done.stdout}"
        return done.stdout

    def run_here(self, program: str, arguments: Sequence[str]) -> str:
        """Run a program in this process, which has loaded PyTorch."""
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.chdir(self.folder):
            status = import_module(f"{program}.__main__").main(arguments)
        assert status == 0, shlex.join([program, *arguments])
        return printed.getvalue()

    def stop(self) -> None:
        """Stop the server, if it was started here."""
        if isinstance(self.server, MadeServer):
            self.server.end()
        self.server = None

    def end(self) -> None:
        self.stop()
        for worker in self.workers:
            worker.kill()
            worker.wait()


class Developer:
    """Has make do things in a copy of the project, which they may change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
        shutil.copytree(ROOT, self.folder, ignore=shutil.ignore_patterns(".git", *ignored))
        (self.folder / ".venv").symlink_to(sys.prefix)

    def make(self, *words: str, status: int = 0, done: Sequence[str] = DONE) -> str:
        """Have make do something, with what is set up, and return what it printed.

        Raises:
            AssertionError: it ended with another status.
        """
        ended = subprocess.run(
            ["make", *done, *words],
            cwd=self.folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * LIMIT_S,
        )
        assert ended.returncode == status, ended.stdout
        return ended.stdout

    def measure(self, target: str) -> str:
        """Have make measure, with little to measure: one block of the model, and the flags of tests/shrink.py."""
        shutil.rmtree(self.folder / "models/zoo/geglu-768")
        write_made_model(self.folder / "models/zoo", "geglu-768", dim=768, hidden=3072, depth=1)
        if PEERS.exists():
            (self.folder / ".peers").symlink_to(PEERS)
        python = self.folder / "small/python"
        python.parent.mkdir()
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/shrink.py "$@"\n')
        python.chmod(0o755)
        return self.make(target, "BIN=small")


def environment() -> dict[str, str]:
    ours = ("MLP_", "LOCUST_", "PYTEST_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def write_checkpoint(directory: Path, depth: int, dim: int = 8, hidden: int = 12) -> None:
    """Write the blocks of a small Llama as Hugging Face's files have them."""
    fields = {"model_type": "llama", "hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": depth}
    shapes = {"gate_proj": (hidden, dim), "up_proj": (hidden, dim), "down_proj": (dim, hidden)}
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(depth):
        of = f"model.layers.{layer}"
        tensors |= {f"{of}.mlp.{name}.weight": torch.full(shape, 0.1) for name, shape in shapes.items()}
        tensors[f"{of}.post_attention_layernorm.weight"] = torch.ones(dim)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(tensors, directory / "model.safetensors")


def readers(folder: Path) -> Iterator[Reader]:
    """One reader, whose server and workers end with the test."""
    reader = Reader(folder)
    yield reader
    reader.end()
