"""Secret sharing: published numbers, and what any t and any t - 1 shares say."""

from __future__ import annotations

import itertools
import os

import pytest

from flashfl.privacy.shamir import PRIME, SHARE, at_zero, evaluate, restore, split


def test_published_example_of_six_shares_modulo_1613() -> None:
    """Wikipedia, Shamir's secret sharing: f(x) = 1234 + 166 x + 94 x^2 modulo 1613."""
    shares = {1: 1494, 2: 329, 3: 965, 4: 176, 5: 1188, 6: 775}
    assert {x: evaluate([1234, 166, 94], x, 1613) for x in shares} == shares
    for some in itertools.combinations(shares, 3):
        assert at_zero({x: shares[x] for x in some}, 1613) == 1234


def test_published_example_without_a_modulus() -> None:
    """The same page's f(x) = 1234 + 166 x + 94 x^2 over the integers: (2, 1942), (4, 3402), (5, 4414) give 1234."""
    assert [evaluate([1234, 166, 94], x, PRIME) for x in (1, 2, 3, 4, 5, 6)] == [1494, 1942, 2578, 3402, 4414, 5614]
    assert at_zero({2: 1942, 4: 3402, 5: 4414}, PRIME) == 1234


def test_field_is_the_smallest_prime_above_all_secrets() -> None:
    def prime(n: int) -> bool:  # Miller and Rabin, with the first 20 primes as bases
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71):
            x = pow(base, odd, n)
            if x not in (1, n - 1) and all((x := x * x % n) != n - 1 for _ in range(twos - 1)):
                return False
        return True

    assert prime(PRIME)
    assert not any(prime(2**256 + more) for more in range(1, 297, 2))


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, b"flash" * 6 + b"12"])
def test_any_threshold_of_shares_restores_the_secret(secret: bytes) -> None:
    places = [1, 4, 5, 9, 200]
    shares = dict(zip(places, split(secret, 3, places), strict=True))
    assert {len(share) for share in shares.values()} == {SHARE}
    for some in itertools.combinations(places, 3):
        assert restore({place: shares[place] for place in some}) == secret
    assert restore(shares) == secret


def test_fewer_shares_fit_every_secret_equally_well() -> None:
    """Two of three shares, with any third value, are shares of some secret: so they say nothing."""
    shares = dict(zip([1, 2, 3], split(os.urandom(32), 3, [1, 2, 3]), strict=True))
    two = {place: int.from_bytes(shares[place], "big") for place in (1, 2)}
    found = {at_zero({**two, 3: third}, PRIME) for third in range(100)}
    assert len(found) == 100


def test_shares_of_one_secret_differ_every_time() -> None:
    assert split(bytes(32), 2, [1, 2]) != split(bytes(32), 2, [1, 2])
