import torch

from flashfl.core import rng


def reference(key: int, index: int) -> int:
    """The hash in plain Python integers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x85EBCA6B & 0xFFFFFFFF
        x ^= x >> 13
        x = x * 0xC2B2AE35 & 0xFFFFFFFF
        return x ^ x >> 16

    return mix((mix(index ^ key & 0xFFFFFFFF) + (key >> 32)) & 0xFFFFFFFF)


def test_hashes_are_the_stated_function_of_key_and_index() -> None:
    key = rng.fold(7, "mask", 3)
    got = [h & 0xFFFFFFFF for h in rng.hashes(key, 5, 500).tolist()]
    assert got == [reference(key, i) for i in range(5, 500)]


def test_hashes_of_distinct_indices_are_distinct() -> None:
    assert len(torch.unique(rng.hashes(rng.fold(1, "x"), 0, 200_000))) == 200_000


def test_fold_tells_names_numbers_and_nesting_apart() -> None:
    keys = {
        rng.fold(0), rng.fold(0, 1), rng.fold(0, "1"), rng.fold(0, 1, 2), rng.fold(0, 12), rng.fold(1),
        rng.fold(0, "a", "b"), rng.fold(0, "ab"),
    }  # fmt: skip
    assert len(keys) == 8


def test_a_permutation_is_one() -> None:
    assert sorted(rng.permutation(3, 100).tolist()) == list(range(100))


def test_uniform_stays_in_range_and_fills_it() -> None:
    u = rng.uniform(5, 10_000)
    assert 0 <= float(u.min()) < 0.01
    assert 0.99 < float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 0.01


def test_choose_does_not_depend_on_the_order_of_items() -> None:
    assert rng.choose(4, list(range(50)), 7) == rng.choose(4, list(reversed(range(50))), 7)
    assert len(set(rng.choose(4, list(range(50)), 7))) == 7


def test_many_keys_at_once_are_as_each_alone() -> None:
    keys = [rng.fold(1, i) for i in range(4)]
    rows = rng.hash_rows(keys, 3, 40)
    assert all(torch.equal(row, rng.hashes(key, 3, 40)) for row, key in zip(rows, keys, strict=True))
    many = rng.permutations(keys, [5, 9, 1, 7])
    assert all(torch.equal(m, rng.permutation(k, n)) for m, k, n in zip(many, keys, [5, 9, 1, 7], strict=True))
