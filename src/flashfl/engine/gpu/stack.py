"""The weights and masks of several clients in one matrix, in the memory order a GPU likes best.

What concerns all clients at once (moving masks, averaging) is then one operation on the stack.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.client import Place
from ...core.layout import Layer, Layout

_ALIGN = 64  # elements; kernels that load 16 bytes at a time fault on anything less regular


class Stack:
    """The flat vectors of several clients: every tensor aligned, convolutions channels-last where that is wanted.

    The first `head` columns hold the prunable weights, `trained` all weights, `size` the statistics too, each with
    padding. With half precision the forward pass reads the prunable weights from `half`, a bfloat16 copy.
    """

    def __init__(
        self, layout: Layout, rows: int, device: torch.device, channels_last: bool, half: bool = False
    ) -> None:
        self.layout, self.device, self.channels_last = layout, device, channels_last
        self.starts: dict[str, int] = {}
        at, ends = 0, {"prunable": 0, "dense": 0, "statistic": 0}
        for layer in layout.travelling:
            self.starts[layer.name] = at
            at += -(-layer.size // _ALIGN) * _ALIGN
            ends[layer.kind] = at
        self.head = ends["prunable"]
        self.trained = max(self.head, ends["dense"])
        self.size = max(self.trained, ends["statistic"])
        self.values = torch.zeros(rows, self.size, device=device)
        self.masks = torch.zeros(rows, self.head, dtype=torch.bool, device=device)
        self.half = torch.zeros(rows, self.head, dtype=torch.bfloat16, device=device) if half else None
        self._logical, padding, self._stacked = (each.to(device) for each in self._maps())
        self._padding = {width: padding[padding < width] for width in (self.head, self.trained, self.size)}
        spans = tuple(self._span(layer) for layer in layout.prunable)
        self.place = Place(layout, spans, self._logical[: self.trained])

    def __len__(self) -> int:
        return len(self.values)

    def _maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """The logical place of each position, which positions are padding, and the position of each logical place."""
        logical = torch.full((self.size,), -1, dtype=torch.int32)
        for layer in self.layout.travelling:
            places = torch.arange(layer.start, layer.stop, dtype=torch.int32).view(layer.shape)
            logical[self._span(layer)] = (places.permute(0, 2, 3, 1) if self._turned(layer) else places).reshape(-1)
        filled, padding = (logical >= 0).nonzero().squeeze(1), (logical < 0).nonzero().squeeze(1)
        stacked = torch.empty(self.layout.size, dtype=torch.int32)
        stacked[logical[filled].long()] = filled.int()
        return logical.clamp(min=0), padding, stacked

    def _turned(self, layer: Layer) -> bool:
        return self.channels_last and len(layer.shape) == 4

    def _span(self, layer: Layer) -> slice:
        start = self.starts[layer.name]
        return slice(start, start + layer.size)

    def view(self, flat: Tensor, layer: Layer) -> Tensor:
        """A layer's tensors of all rows, [rows, *shape], inside a matrix with this stack's columns."""
        part = flat[:, self._span(layer)]
        if self._turned(layer):
            o, i, h, w = layer.shape
            return part.view(len(flat), o, h, w, i).permute(0, 1, 4, 2, 3)
        return part.view(len(flat), *layer.shape)

    def used(self, layer: Layer) -> Tensor:
        """A layer's tensors of all rows, as the forward pass uses them."""
        return self.view(self.half if self.half is not None and layer.kind == "prunable" else self.values, layer)

    def join(self, layers: Sequence[Layer], tensors: Sequence[Tensor], out: Tensor) -> None:
        """Write the tensors of consecutive layers into one flat piece of a row, in this stack's order, with padding."""
        pieces = []
        for layer, tensor in zip(layers, tensors, strict=True):
            flat = (tensor.permute(0, 2, 3, 1) if self._turned(layer) else tensor).reshape(-1).to(out.dtype)
            pieces.append(flat)
            if pad := -layer.size % _ALIGN:
                pieces.append(flat.new_zeros(pad))
        if pieces:
            torch.cat(pieces, out=out)

    def load(self, values: Tensor, masks: Tensor, rows: int) -> None:
        """Take the first rows in logical order: as many as there are, or one for all of them."""
        self._fill(self.values[:rows], values)
        self._fill(self.masks[:rows], masks)

    def _fill(self, rows: Tensor, logical: Tensor) -> None:
        width = rows.shape[1]
        if len(logical) == len(rows):
            torch.index_select(logical, 1, self._logical[:width], out=rows)
        else:
            rows.copy_(logical.index_select(1, self._logical[:width]))
        rows.index_fill_(1, self._padding[width], 0)

    def logical(self, columns: Tensor) -> Tensor:
        """Rows over the prunable weights, over all trained ones, or over everything, in logical order."""
        layout = self.layout
        ends = {self.size: layout.size, self.trained: layout.trained_size, self.head: layout.prunable_size}
        return columns.index_select(1, self._stacked[: ends[columns.shape[1]]])

    def columns(self, logical: Tensor) -> Tensor:
        """Rows over the prunable or over all trained weights, in this stack's order."""
        width = self.head if logical.shape[1] == self.layout.prunable_size else self.trained
        rows = logical.new_zeros(len(logical), width)
        self._fill(rows, logical)
        return rows
