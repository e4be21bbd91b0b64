"""The command line: ``python -m models COMMAND``; each command is a file in models/commands."""

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from keyword import iskeyword

from kernels import interruption
from kernels.flags import Parser
from models.errors import MLPError

# Name to one line of help. Only the chosen one's module is imported, and PyTorch only when it runs.
COMMANDS = {
    "new": "write a model with random weights",
    "import": "take the blocks of a Hugging Face model: Llama, Qwen, Gemma, GPT-2, BERT, ViT, T5 and others",
    "train": "train the digits model",
    "inspect": "show what a model is",
    "run": "run rows through a model",
    "bench": "time the backends against each other",
    "batch-invariance": "compare rows alone and in batches",
    "profile": "show what a forward pass is made of",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status: 0, or 2 with one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog="python -m models", description="Makes, imports, trains, inspects, runs and measures models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    parsers = {name: commands.add_parser(name, help=line) for name, line in COMMANDS.items()}
    name = arguments[0] if arguments else ""
    if name not in parsers:
        parser.parse_args(arguments)  # prints the help, or what is wrong with the name, and exits
        parser.error(f"expected a command first, got {name!r}")
    try:
        module = import_module(f"models.commands.{module_name(name)}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("kernels", "models"):
            raise
        parser.error(f"it needs {package}, which is not installed here; run `make setup`, and take .venv/bin/python")
    module.add_arguments(parsers[name])
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show is escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        interruption.interruptible(lambda: module.run(options))
    except (Exception, KeyboardInterrupt) as error:
        if interruption.is_cause(error):
            print(f"{parser.prog} {name}: interrupted", file=sys.stderr)
            return 130
        if not isinstance(error, MLPError | OSError):
            raise
        sentence = str(error)
        if isinstance(error, OSError) and error.filename:
            sentence = f"{error.filename}: {error.strerror}"
    else:
        return 0
    print(f"{parser.prog} {name}: error: {sentence}", file=sys.stderr)
    return 2


def module_name(command: str) -> str:
    """Return a command's module: ``import`` is a keyword, so its module is ``import_``."""
    name = command.replace("-", "_")
    return f"{name}_" if iskeyword(name) else name


if __name__ == "__main__":
    interruption.handle()
    status = main()
    interruption.ignore()
    sys.exit(status)
