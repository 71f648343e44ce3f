"""Shamir's secret sharing (1979) over the integers modulo a prime.

A secret is the value at 0 of a random polynomial of degree t - 1; a share is its value at another place. Any t shares
give the secret. Fewer say nothing about it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**256 + 297  # the smallest prime above 2^256: every secret of 32 bytes is smaller
SHARE = 33  # bytes of a share


def split(secret: bytes, threshold: int, places: Sequence[int]) -> list[bytes]:
    """A share of `secret` (32 bytes) for each place, all different and above 0; any `threshold` restore it."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [evaluate(coefficients, place, PRIME).to_bytes(SHARE, "big") for place in places]


def restore(shares: Mapping[int, bytes]) -> bytes:
    """The secret that these shares, by place, were made from. They must be at least as many as the threshold."""
    value = at_zero({place: int.from_bytes(share, "big") for place, share in shares.items()}, PRIME)
    if value >= 1 << 256:
        raise ValueError("these shares do not give a secret of 32 bytes")
    return value.to_bytes(32, "big")


def evaluate(coefficients: Sequence[int], place: int, prime: int) -> int:
    """A polynomial's value, from its coefficients in ascending order."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % prime
    return value


def at_zero(points: Mapping[int, int], prime: int) -> int:
    """The value at 0 of the polynomial of lowest degree through these points."""
    weights = _lagrange(tuple(points), prime)
    return sum(weight * y for weight, y in zip(weights, points.values(), strict=True)) % prime


@lru_cache(maxsize=1024)
def _lagrange(places: tuple[int, ...], prime: int) -> tuple[int, ...]:
    """What each point counts for in the value at 0. Many secrets are held at the same places."""
    out = []
    for i in places:
        above, below = 1, 1
        for j in places:
            if j != i:
                above, below = above * j % prime, below * (j - i) % prime
        out.append(above * pow(below, -1, prime) % prime)
    return tuple(out)
