"""The GPU engine: many clients train side by side on one device."""

from .engine import GPUEngine

__all__ = ["GPUEngine"]
