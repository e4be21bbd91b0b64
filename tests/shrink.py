"""Makes a command small: `python tests/shrink.py -m models bench geglu-768` runs it with flags that let it end soon."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

# What is put behind a command; of a flag that comes twice the last one counts. A name may go on with an argument.
SMALL = {
    "models new": "--dim 8 --hidden 16 --depth 1",
    "models bench": "--backends eager,fused --repetitions 2",
    "models bench geglu-768": "--rows 1 --repetitions 2",  # the README's table has every backend
    "models batch-invariance": "--backends eager,fused --dtype float32 --rows 2",
    "examples.fuse_minilm": "--repetitions 1",
    "loadtests compare": "--backends eager,fused --users 1 --rates 50 --no-knee "
    "--rounds 1 --seconds 0.2 --warm-up-s 0.05",
    "loadtests overhead": "--requests 100",
    "loadtests peers": "--servers ours,fastapi --models digits --wires json --connections 2 --rounds 1 --seconds 1",
    "loadtests saturation": "--rows 2 --connections 3 --rounds 1 --seconds 1 --server-cpus 0",
    "loadtests scenario": "--users 2 --seconds 1 --backends fused --objective-ms 5000",
    "loadtests scenario overload": "--seconds 0.5 --objective-ms 5000",
    "locust": "-t 1s",
    "tests/service/chaos/soak.py": "--seconds 2 --rate 40",
}


def name_of(words: Sequence[str]) -> str:
    """Return a command's program, with its subcommand where it has one."""
    if words[1:2] == ["-m"]:
        return words[2] if "." in words[2] else " ".join(words[2:4])
    return words[1] if words[1:] and words[1].endswith(".py") else Path(words[0]).name


def shrunk(words: Sequence[str]) -> list[str]:
    """Put a command's small flags behind it, before those that it hands on to a server."""
    end = words.index("--") if "--" in words else len(words)
    name = name_of(words)
    flags = next((SMALL[each] for each in (" ".join([name, *words[4:5]]), name) if each in SMALL), "")
    return [*words[:end], *shlex.split(flags), *words[end:]]


if __name__ == "__main__":
    os.execv(sys.executable, shrunk([sys.executable, *sys.argv[1:]]))  # noqa: S606
