"""One paper, one file. A new method is a file, an import and a place in a tuple here."""

from __future__ import annotations

from ..core.method import Method
from .dense import Dense
from .disagree import Disagree
from .feddst import FedDST
from .fedpm import FedPM
from .fedrts import FedRTS
from .fedspa import FedSpa
from .fjord import FjORD
from .flashplus import FlashPlus
from .hetero import HeteroJMWST, HeteroSPDST
from .heterofl import HeteroFL
from .jmwst import JMWST
from .lotteryfl import LotteryFL
from .nst import NST
from .pdst import PDST
from .prunefl import PruneFL
from .scaffold import Scaffold
from .sparse import Sparse
from .sparsyfed import SparsyFed
from .spdst import SPDST
from .ssfl import SSFL
from .topk import TopK
from .zerofl import ZeroFL

_FLASH = (Dense, NST, PDST, SPDST, JMWST, FlashPlus, HeteroSPDST, HeteroJMWST, Sparse, Disagree)
_OTHERS = (TopK, FedDST, FedSpa, SSFL, FedRTS, SparsyFed, ZeroFL, FedPM, Scaffold, HeteroFL, FjORD, PruneFL, LotteryFL)
METHODS: dict[str, type[Method]] = {cls.name: cls for cls in (*_FLASH, *_OTHERS)}
