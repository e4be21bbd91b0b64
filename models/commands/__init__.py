"""The commands of `python -m models`, a file each: `add_arguments(parser)`, and `run(options)`."""
