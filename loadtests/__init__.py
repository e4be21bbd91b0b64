"""Load tests: they speak HTTP to a running server and import nothing of it."""
