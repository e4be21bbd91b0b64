"""What operators that have tiles are called, and the dtypes of operands: known without loading PyTorch or Triton."""

OPS = ("gated_linear", "rms_gated_linear", "linear")
DTYPE_NAMES = ("float32", "bfloat16", "float16")
