"""Triton kernels, each with a plain torch twin elsewhere; imported only where a GPU is used."""
