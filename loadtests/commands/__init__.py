"""The subcommands of `python -m loadtests`, a file each: `add_arguments(parser)`, and `run(options) -> int`."""
