"""Load tests: they speak HTTP to a running server and import none of its code."""
