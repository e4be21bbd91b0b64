"""Generates load: the processes, what they send, and what becomes of it."""
