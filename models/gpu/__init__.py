"""Checks and measures everything on one GPU, in under 8 minutes: ``python -m models.gpu``, or ``make gpu``.

Its steps: every operator's correctness, tiles, and whether a norm is folded (``python -m kernels check`` and ``tune``),
the way of each hidden layer (models/backends/paths.json), the table of the backends, a batch's way from the host and
back with its answers compared (models/staging.py), the profile of the reference shape, the table of the operators
(``python -m kernels bench``). Everything lands under ``--out`` as gpu-*.json, and as gpu.md for people. A step that
fails is reported as such, and the others go on; so is one that time runs out in, which ends then, where Python runs
next, and one that none is left for. It needs torch, triton, numpy and safetensors alone.

Where things are: `plan` says of what, `report` keeps what each step came to and ends it in time, `steps` and
`transfer` are the steps, and `page` lays out what they found for people.
"""
