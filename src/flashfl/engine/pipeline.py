"""Runs the parts of some clients before and after training, for every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.client import Clients, Field, Part, active_range, fields_of
from ..core.errors import FlashError
from ..core.exchange import Extra, Local
from ..core.layout import Layout
from ..core.mask import count_rows
from ..core.rng import fold

_BOOLEAN = ("bits", "indices")
Notes = Mapping[str, Extra]  # what one client's parts remember, by name


@dataclass(frozen=True)
class Finished:
    """What training came to: masks and their layer counts, reported tensors and notes, one of each for every client."""

    counts: list[tuple[int, ...]] | None  # None: the masks are those that were trained
    extras: list[dict[str, Extra]]
    notes: list[dict[str, Extra]]


def open_clients(
    layout: Layout,
    local: Local,
    keys: Sequence[int],
    steps: Sequence[int],
    start: Tensor,
    masks: Tensor,
    given: Sequence[Notes],
    notes: Sequence[Notes],
    validate: Callable[[int], float],
    initial: Callable[[int], Tensor],
    classes: Callable[[int], Tensor | None],
) -> Clients:
    """Some clients before training, after `begin` of all their parts; it may have changed their models and masks."""
    device, count = start.device, len(keys)
    memory = {}
    for name, declared in fields_of(local.parts, "remembers", layout).items():
        empty = _empty(declared, layout, device)
        kept = [one[name].value.to(device) if name in one else empty for one in notes]
        fits = [value if value.shape == empty.shape else empty for value in kept]
        memory[name] = torch.stack(fits)
    names = sorted(set.intersection(*(set(one) for one in given))) if given else []
    brought = {name: torch.stack([one[name].value.to(device) for one in given]) for name in names}
    keys = [fold(key, "parts") for key in keys]
    rows = (start, start, masks.expand(count, -1))
    asked = (validate, lambda key: initial(key).to(device), classes)
    c = Clients(layout, keys, steps, local.lr, *rows, brought, memory, *asked)
    for part in local.parts:
        part.begin(c)
    for name, value in c.state.items():
        if value.dim() != 2 or len(value) != count or value.shape[1] not in (layout.trained_size, layout.prunable_size):
            raise FlashError(
                f"a part's `begin` put {name!r} of shape {tuple(value.shape)} into `c.state`: it must be "
                f"[{count}, {layout.trained_size}] (clients, trained weights) or [{count}, {layout.prunable_size}] "
                "(clients, prunable weights)"
            )
    if c.masks is not rows[2]:
        c.vectors = c.vectors.clone()
        c.vectors[:, : layout.prunable_size].masked_fill_(~c.masks, 0.0)
    c.start = c.vectors
    return c


def close_clients(local: Local, c: Clients) -> Finished:
    """What is reported and remembered, after `finish` of all parts. `c.vectors` and `c.masks` may change."""
    layout, trained = c.layout, c.masks
    for part in local.parts:
        part.finish(c)
    counts = None
    if c.masks is not trained:
        counts = count_rows(layout, c.masks)
        c.vectors[:, : layout.prunable_size].masked_fill_(~c.masks, 0.0)
        for before, after in zip(count_rows(layout, trained), counts, strict=True):
            _check_active(local.parts, layout, sum(before), sum(after))
    reported = fields_of(local.parts, "reports", layout)
    remembered = fields_of(local.parts, "remembers", layout)
    for what, names, found in (("reports", reported, c.report), ("remembers", remembered, c.memory)):
        if names.keys() != found.keys():
            raise FlashError(
                f"the parts declare {sorted(names)} in `{what}`, but they set {sorted(found)}. Declare every name that "
                "a part sets, and set every name that is declared"
            )
        for name, declared in names.items():
            wanted = (len(c.keys), *declared.shape(layout))
            if found[name].shape != wanted or (found[name].dtype == torch.bool) != (declared.form in _BOOLEAN):
                raise FlashError(
                    f"the parts' `{what}` declares {name!r} as {declared.form} of shape {wanted}, but it is "
                    f"{found[name].dtype} of shape {tuple(found[name].shape)}"
                )
    extras: list[dict[str, Extra]] = []
    for row in range(len(c.keys)):
        mine = {}
        for name, declared in reported.items():
            value = c.report[name][row]
            mine[name] = Extra(declared.form, value[c.masks[row]] if declared.form == "masked" else value)
        extras.append(mine)
    notes = [
        {name: Extra(declared.form, c.memory[name][row].clone()) for name, declared in remembered.items()}
        for row in range(len(c.keys))
    ]
    return Finished(counts, extras, notes)


def tallied(parts: Sequence[Part], layout: Layout, vector: Tensor, bits: Tensor) -> dict[str, Extra]:
    """What the server derives from an update, to be added up with what the client sent."""
    found = [part.tally(layout, vector[None], bits[None]) for part in parts]
    rows = {name: value[0] for one in found for name, value in one.items()}
    return {name: Extra("bits" if row.dtype == torch.bool else "dense", row) for name, row in rows.items()}


def _check_active(parts: Sequence[Part], layout: Layout, before: int, found: int) -> None:
    least, most = active_range(parts, layout, before)
    if not least <= found <= most:
        raise FlashError(
            f"a part changed the mask to {found} active weights, but {least} to {most} are allowed. A part that "
            "changes the mask must define `active`, which returns the least and the most. Correct `active` or the mask."
        )


def _empty(declared: Field, layout: Layout, device: torch.device) -> Tensor:
    dtype = torch.bool if declared.form in _BOOLEAN else torch.float32
    return torch.zeros(declared.shape(layout), dtype=dtype, device=device)
