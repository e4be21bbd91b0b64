"""Checks and measures everything on one GPU, in under 8 minutes: ``python -m models.gpu``, or ``make gpu``.

Its steps: every operator's correctness, tiles, and whether a norm is folded (``python -m kernels check`` and ``tune``),
how each hidden layer is computed (models/backends/paths.json), the table of the backends, a batch's transfer from the
host and back with its answers compared (models/staging.py), the profile of the reference shape, and the table of the
operators (``python -m kernels bench``). Everything is written under ``--out`` as gpu-*.json, and as gpu.md for people.
A step that fails is reported as failed, and the others go on. So is a step for which no time is left, and one during
which time runs out: it is ended as soon as Python runs. Only torch, triton, numpy and safetensors are needed.

Where things are: `plan` says what is measured, `report` records how each step ended and ends it in time, `steps` and
`transfer` are the steps, and `page` lays out the findings for people.
"""
