"""Sparse training on a CPU: kernels whose work and memory follow the active weights, and models that use them."""

from .file import load_sparse
from .library import kernels, status
from .model import SparseModel
from .planes import Planes
from .weight import SparseWeight

__all__ = ["Planes", "SparseModel", "SparseWeight", "kernels", "load_sparse", "status"]
