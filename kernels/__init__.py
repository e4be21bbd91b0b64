"""Fused operators for transformer-style MLP blocks: Triton kernels for GPUs and oneDNN post-ops for CPUs."""

# Some releases of transformers ask an importable `kernels` for its version, to tell whether it is the Hugging Face
# package of that name; "0" answers that it is not.
__version__ = "0"
