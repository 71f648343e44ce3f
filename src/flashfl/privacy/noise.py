"""Noise for differential privacy, drawn from the operating system and never from a run's seed.

The discrete Gaussian of Canonne, Kamath and Steinke (2020), by their own algorithms: rejection sampling with whole
numbers only, so no floating point error weakens the guarantee. All values are drawn side by side.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

Whole = np.ndarray[Any, np.dtype[np.int64]]
Coins = np.ndarray[Any, np.dtype[np.bool_]]
LARGEST = 1 << 27  # the largest deviation: products of whole numbers must fit 63 bits
LEAST = 16  # the least: sums of shares are then discrete Gaussians to within e^-2500 (Kairouz et al. 2021)
_PART = 1 << 17  # values drawn at a time


def discrete_gaussian(deviation: int, count: int) -> Whole:
    """`count` independent values of the discrete Gaussian with parameter `deviation`, a whole number."""
    if not LEAST <= deviation <= LARGEST:
        raise ValueError(f"deviation = {deviation}: must be between {LEAST} and {LARGEST}")
    out = np.empty(count, np.int64)
    for at in range(0, count, _PART):
        part = out[at : at + _PART]
        part[:] = _gaussian(deviation, len(part))
    return out


def _gaussian(deviation: int, count: int) -> Whole:
    """Algorithm 3, with t = sigma: accept y of a discrete Laplace with exp(-(|y| - sigma)^2 / (2 sigma^2))."""
    found = np.empty(0, np.int64)
    while len(found) < count:
        drawn = _laplace(deviation, 2 * (count - len(found)) + 64)
        # Larger ones would be kept with a probability below e^-180, and their squares could overflow.
        drawn = drawn[np.abs(drawn) <= 20 * deviation]
        kept = _accept((np.abs(drawn) - deviation) ** 2, 2 * deviation**2)
        found = np.concatenate([found, drawn[kept]])
    return found[:count]


def _laplace(scale: int, count: int) -> Whole:
    """Algorithm 2: values of the discrete Laplace distribution, as many of `count` as are accepted."""
    size = _below(scale, count)
    size = size[_accept(size, scale)]
    going = np.arange(len(size))
    while len(going):  # one `scale` more with probability exp(-1), again and again
        going = going[_small(np.ones(len(going), np.int64), 1)]
        size[going] += scale
    negative = _below(2, len(size)) == 1
    signed: Whole = np.where(negative, -size, size)[~negative | (size > 0)]  # else zero would come twice as often
    return signed


def _accept(over: Whole, below: int) -> Coins:
    """Algorithm 1: for each value whether a coin of probability exp(-over / below) shows heads."""
    whole, rest = over // below, over % below
    good = _small(rest, below)
    while len(going := np.flatnonzero(good & (whole > 0))):  # a factor exp(-1) for each whole unit
        good[going] = _small(np.ones(len(going), np.int64), 1)
        whole[going] -= 1
    return good


def _small(over: Whole, below: int) -> Coins:
    """Coins of probability exp(-over / below) for over <= below: the first tail comes at an odd throw."""
    odd = np.zeros(len(over), np.bool_)
    going = np.arange(len(over))
    number = 0
    while len(going):
        number += 1
        odd[going] = number % 2 == 1
        going = going[_below(below * number, len(going)) < over[going]]
    return odd


def _below(limit: int, count: int) -> Whole:
    """`count` whole numbers from 0 to below `limit`, all equally likely."""
    found = np.empty(0, np.int64)
    most = ((1 << 63) - 1) // limit * limit  # beyond this, small numbers would be likelier
    while len(found) < count:
        drawn = np.frombuffer(os.urandom(8 * (count - len(found))), np.int64) & np.int64((1 << 63) - 1)
        found = np.concatenate([found, drawn[drawn < most] % limit])
    return found
