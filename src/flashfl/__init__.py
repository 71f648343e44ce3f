"""Sparse federated learning that is real."""

__version__ = "0.1.0"
