"""Transformer-style MLPs: configuration, weights, and an engine that runs one set of weights three ways."""
