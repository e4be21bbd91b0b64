"""Compiles every kernel for GPUs that need not be present, and judges the machine code.

`targets` are the GPUs, `cases` what is compiled, `source` what it is compiled from, `compiler` one process that
compiles, `build` many of them and a cache, `machine_code` what is read of the result, `table` how that is judged and
written down.
"""
