"""What a run writes down about each round beside accuracy and bytes: how the masks stand and how they moved."""

from __future__ import annotations

from typing import Any

from ..core.state import State
from ..sparsity import layer_mismatch, mismatch


class Recorder:
    """Looks at consecutive states; its findings go into the results file."""

    def __init__(self) -> None:
        self._last: State | None = None

    def observe(self, state: State) -> dict[str, Any]:
        """Density, layer densities, and the mismatch to the mask one round earlier (of stage 2)."""
        seen: dict[str, Any] = {
            "density": state.mask.density,
            "layer_densities": [round(d, 6) for d in state.mask.layer_densities],
        }
        last, self._last = self._last, state
        if last is not None and last.stage == 2 and state.stage == 2:
            same = last.mask is state.mask
            seen["mismatch"] = 0.0 if same else mismatch(last.mask, state.mask)
            seen["layer_mismatch"] = [] if same else [round(m, 6) for m in layer_mismatch(last.mask, state.mask)]
        return seen
