"""One paper, one file. A new method is a file and one line here."""

from __future__ import annotations

from ..core.method import Method
from .dense import Dense
from .disagree import Disagree
from .flashplus import FlashPlus
from .hetero import HeteroJMWST, HeteroSPDST
from .jmwst import JMWST
from .nst import NST
from .pdst import PDST
from .sparse import Sparse
from .spdst import SPDST

METHODS: dict[str, type[Method]] = {
    cls.name: cls for cls in (Dense, NST, PDST, SPDST, JMWST, FlashPlus, HeteroSPDST, HeteroJMWST, Sparse, Disagree)
}

__all__ = [
    "JMWST",
    "METHODS",
    "NST",
    "PDST",
    "SPDST",
    "Dense",
    "Disagree",
    "FlashPlus",
    "HeteroJMWST",
    "HeteroSPDST",
    "Sparse",
]
