"""Randomness as a pure function of (key, index): the same on every device and in every order.

A key is a plain integer; `fold` derives a new one from it and any names or numbers. Draws rank or scale a bijective
32-bit hash of the index, made of integer tensor operations only, so a CPU and a GPU agree bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .kernel import kernel

Device = torch.device | str
_SHIFT16, _SHIFT13 = (1 << 16) - 1, (1 << 19) - 1  # what a logical shift of an int32 by 16 or 13 keeps
_BLOCK = 1 << 16  # indices hashed at a time on a CPU: they stay in its cache, which is several times faster


def fold(key: int, *parts: str | int) -> int:
    """A new 64-bit key for `parts` under `key`."""
    text = "\0".join([str(key), *(f"{type(part).__name__}:{part}" for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


_M1, _M2 = _signed(0x85EBCA6B), _signed(0xC2B2AE35)


def _mix(x: Tensor) -> Tensor:
    """Murmur3's finalizer on int32, in place: a bijection that spreads every bit."""
    x ^= (x >> 16) & _SHIFT16
    x *= _M1
    x ^= (x >> 13) & _SHIFT13
    x *= _M2
    x ^= (x >> 16) & _SHIFT16
    return x


def mix(x: Tensor) -> Tensor:
    """A bijection on int32 that spreads every bit."""
    return _mix(x.clone())


def words(keys: Sequence[int], device: Device = "cpu") -> Tensor:
    """Keys as pairs of int32, [keys, 2], for draws inside captured work."""
    return torch.tensor(_pairs(keys), dtype=torch.int32).to(device, non_blocking=True)


def _pairs(keys: Sequence[int]) -> list[list[int]]:
    return [[_signed(key & 0xFFFFFFFF), _signed(key >> 32 & 0xFFFFFFFF)] for key in keys]


def hashes(key: int, start: int, stop: int, device: Device = "cpu") -> Tensor:
    """int32 hashes of the indices start..stop-1 under `key`; distinct indices get distinct hashes."""
    x = torch.arange(start, stop, dtype=torch.int32, device=device)
    for part in x.split(_BLOCK) if x.device.type == "cpu" else (x,):
        part ^= _signed(key & 0xFFFFFFFF)
        _mix(part)
        part += _signed(key >> 32 & 0xFFFFFFFF)
        _mix(part)
    return x


def hash_rows(keys: Sequence[int], start: int, stop: int, device: Device = "cpu") -> Tensor:
    """One row of `hashes` for each key, all at once."""
    fast = None if torch.device(device).type == "cpu" else kernel("hash", "hash_rows")
    if fast is not None:
        rows: Tensor = fast(_pairs(keys), start, stop, torch.device(device))
        return rows
    each = [hashes(key, start, stop, device) for key in keys]
    return torch.stack(each) if len(each) != 1 else each[0][None]


def unit(words: Tensor) -> Tensor:
    """int32 hashes as float32 numbers in [0, 1), 24 bits each."""
    return ((words >> 8) & ((1 << 24) - 1)).to(torch.float32) / (1 << 24)


def uniform(key: int, count: int, device: Device = "cpu") -> Tensor:
    """`count` float32 numbers in [0, 1), 24 bits each."""
    return unit(hashes(key, 0, count, device))


def permutation(key: int, count: int, device: Device = "cpu") -> Tensor:
    """A random order of 0..count-1 (int64)."""
    return torch.argsort(hashes(key, 0, count, device))


def permutations(keys: Sequence[int], counts: Sequence[int], device: Device = "cpu") -> list[Tensor]:
    """`permutation` for many keys and counts at once."""
    rows = hash_rows(keys, 0, max(counts), device).to(torch.int64)
    sizes = torch.tensor(counts).to(device, non_blocking=True)[:, None]
    rows.masked_fill_(torch.arange(max(counts), device=device) >= sizes, 1 << 40)
    return [row[:count] for row, count in zip(rows.argsort(-1), counts, strict=True)]


def choose(key: int, items: Sequence[int], count: int) -> list[int]:
    """`count` of `items`, each equally likely whatever their order, returned ascending."""
    ranked = sorted(items, key=lambda item: fold(key, item))
    return sorted(ranked[:count])


def flip(key: int, items: Sequence[int], chance: float) -> list[int]:
    """Those of `items` whose coin shows heads, ascending. Each has its own coin with this chance of heads."""
    return sorted(item for item in items if fold(key, item) < chance * 2.0**64)
