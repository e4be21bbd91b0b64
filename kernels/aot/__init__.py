"""Compiles every kernel for GPUs that need not be present, and judges the machine code.

`targets` are the GPUs, `cases` is what is compiled, `source` what it is compiled from, `compiler` a process that
compiles, `build` runs many of these and keeps a cache, `machine_code` reads the result, and `table` judges it and
writes it down.
"""
