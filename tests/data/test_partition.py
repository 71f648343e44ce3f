"""Partitions: every sample once, nobody empty, the shapes each scheme promises."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashfl.core.errors import ConfigError, DataError
from flashfl.data import partition
from flashfl.data.show import plot, render

LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=120).map(lambda x: np.array(x, dtype=np.int64))
KEYS = st.integers(0, 2**64 - 1)
ALPHAS = st.sampled_from([1e-3, 0.1, 1.0, 10.0, 100.0, 1000.0])


def assert_cover(parts: partition.Partition, samples: int, clients: int) -> None:
    assert len(parts) == clients
    assert min(map(len, parts)) >= 1
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples))


@settings(deadline=None, max_examples=60)
@given(labels=LABELS, key=KEYS, alpha=ALPHAS, data=st.data(), scheme=st.sampled_from(["lda", "iid", "dirichlet"]))
def test_partition_has_every_sample_once_and_no_empty_client(
    labels: np.ndarray, key: int, alpha: float, data: st.DataObject, scheme: str
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    parts = partition.split(scheme, labels, clients, key, alpha=alpha)
    assert_cover(parts, len(labels), clients)
    again = partition.split(scheme, labels, clients, key, alpha=alpha)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    if scheme != "dirichlet":
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None, max_examples=60)
@given(labels=LABELS, key=KEYS, each=st.integers(1, 4), data=st.data())
def test_shards_hold_few_classes(labels: np.ndarray, key: int, each: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    if clients * each > len(labels):
        with pytest.raises(ConfigError, match="Each client has"):
            partition.shards(labels, clients, key, each)
        return
    parts = partition.shards(labels, clients, key, each)
    if clients * each < len(np.unique(labels)):  # too few shards for all classes: some are left out whole
        kept = np.flatnonzero(np.isin(labels, labels[np.concatenate(parts)]))
        assert np.array_equal(np.sort(np.concatenate(parts)), kept)
    else:
        assert_cover(parts, len(labels), clients)
    assert max(len(np.unique(labels[part])) for part in parts) <= each


def test_shards_of_paper_have_exactly_two_classes_a_client() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 6000)
    parts = partition.shards(labels, 400, 1, 2)
    assert {len(np.unique(labels[part])) for part in parts} == {2}
    assert max(map(len, parts)) - min(map(len, parts)) <= 2
    pairs = {tuple(np.unique(labels[part])) for part in parts}
    assert len(pairs) > 25  # of 45: who goes with whom is random


@settings(deadline=None, max_examples=30)
@given(ids=LABELS, key=KEYS)
def test_natural_gives_each_id_a_client(ids: np.ndarray, key: int) -> None:
    parts = partition.natural(ids, 0, key)
    assert_cover(parts, len(ids), len(np.unique(ids)))
    assert all(len(np.unique(ids[part])) == 1 for part in parts)


def test_natural_with_fewer_clients_chooses_whole_ids() -> None:
    ids = np.repeat(np.arange(50), 3)
    parts = partition.natural(ids, 20, 4)
    assert len({int(ids[part[0]]) for part in parts}) == 20
    assert all(len(part) == 3 for part in parts)
    other = partition.natural(ids, 20, 5)
    assert {int(ids[p[0]]) for p in parts} != {int(ids[p[0]]) for p in other}
    with pytest.raises(ConfigError, match="There are 50 writers or users; 0 takes them all"):
        partition.natural(ids, 51, 0)


def test_lda_clients_differ_more_with_smaller_alpha() -> None:
    labels = np.arange(20_000) % 10

    def skew(alpha: float) -> float:
        counts = partition.histogram(partition.lda(labels, 50, 3, alpha), labels, 10)
        return float((counts.max(1) / counts.sum(1)).mean())

    assert skew(0.1) > 0.55
    assert 0.2 < skew(1.0) < 0.45
    assert skew(1000.0) < 0.14


@pytest.mark.parametrize("alpha", [1e6, 1e300, float("inf")])
def test_dirichlet_with_huge_alpha_gives_equal_sizes(alpha: float) -> None:
    sizes = [len(part) for part in partition.dirichlet(np.arange(1000) % 10, 4, 1, alpha)]
    assert max(sizes) - min(sizes) <= 20


def test_lda_class_proportions_have_dirichlet_variance() -> None:
    """With far more samples than are taken, a client's counts follow the Dirichlet-multinomial's variance."""
    labels = np.arange(400_000) % 4
    counts = partition.histogram(partition.lda(labels, 2000, 9, 2.0), labels, 4)
    n, a = 200, 8.0
    wanted = n * 0.25 * 0.75 * (n + a) / (1 + a)
    first = counts[:, 0]
    assert first.mean() == pytest.approx(50, abs=2)
    assert first.var() == pytest.approx(wanted, rel=0.15)


def test_partition_depends_on_key() -> None:
    labels = np.arange(1000) % 10
    one, two = partition.lda(labels, 10, 1, 1.0), partition.lda(labels, 10, 2, 1.0)
    assert not all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("scheme", ["lda", "dirichlet", "shards", "iid"])
def test_partition_for_thousands_of_clients_is_quick(scheme: str) -> None:
    labels = np.random.default_rng(0).integers(0, 10, 50_000)
    start = time.process_time()  # of this process: the machine may be busy elsewhere
    assert_cover(partition.split(scheme, labels, 3400, 7, alpha=0.1), 50_000, 3400)
    assert time.process_time() - start < 1.0


def test_impossible_partitions_are_errors() -> None:
    labels = np.arange(10) % 2
    with pytest.raises(ConfigError, match=r"clients = 11: must be at least 1 and at most 10. There are 10 samples"):
        partition.lda(labels, 11, 0)
    with pytest.raises(ConfigError, match="clients = 0"):
        partition.iid(10, 0, 0)
    with pytest.raises(ConfigError, match=r"alpha = 0\.0"):
        partition.dirichlet(labels, 2, 0, 0.0)
    with pytest.raises(ConfigError, match="did you mean 'shards'"):
        partition.split("shard", labels, 2, 0)
    with pytest.raises(ConfigError, match="who made each sample"):
        partition.split("natural", labels, 2, 0)


def test_partition_save_and_load(tmp_path: Path) -> None:
    labels = np.arange(100) % 10
    parts = partition.lda(labels, 7, 1, 0.5)
    partition.save(parts, tmp_path / "split", labels)
    again = partition.load(tmp_path / "split", labels)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    with pytest.raises(DataError, match="not a saved partition of these 99 samples"):
        partition.load(tmp_path / "split", labels[:99])
    for other in (np.arange(200) % 10, labels[::-1]):  # the indices fit these, too
        with pytest.raises(DataError, match="it was saved for other samples or other labels"):
            partition.load(tmp_path / "split", other)
    with pytest.raises(DataError, match=r"nothing is not a saved partition .* No such file"):
        partition.load(tmp_path / "nothing", labels)
    (tmp_path / "text").write_text("0 1 2")
    np.save(tmp_path / "array.npy", labels)
    for name in ("text", "array.npy"):
        with pytest.raises(DataError, match=r"File is not a zip file\. To make one: flashfl data partition DATASET"):
            partition.load(tmp_path / name, labels)
    np.savez(tmp_path / "older.npz", index=[3, 1, 2], ends=[1, 3])
    assert [part.tolist() for part in partition.load(tmp_path / "older.npz", labels)] == [[3], [1, 2]]


@pytest.mark.parametrize(
    ("index", "ends", "what"),
    [
        ([0, 1, 2], [1, 1, 3], "empty"),
        ([0, 1, 2], [1, 2], "empty"),
        ([0, 0, 2], [1, 3], "twice"),
        ([0, -1, 2], [1, 3], "out of range"),
        ([0, 1, 2], [5, 3], "empty"),
        ([0.5, 1.5, 2.5], [1, 3], "not a saved partition of these 10 samples"),
        ([0, 1, 2], [1.0, 3.0], "not a saved partition of these 10 samples"),
        ([0, 1, 2], [], "not a saved partition of these 10 samples"),
    ],
)
def test_bad_partition_file_is_refused(tmp_path: Path, index: object, ends: object, what: str) -> None:
    np.savez(tmp_path / "p.npz", index=index, ends=ends)
    with pytest.raises(DataError, match=what):
        partition.load(tmp_path / "p.npz", np.arange(10))


def test_partition_file_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", index=np.array([{}], dtype=object), ends=[1])
    with pytest.raises(DataError, match="not a saved partition"):
        partition.load(tmp_path / "p.npz", np.arange(10))


def test_partition_file_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "p.npz", index=np.zeros(1_000_000, dtype=np.int64), ends=[1_000_000])
    assert (tmp_path / "p.npz").stat().st_size < 10_000
    with pytest.raises(DataError, match="of these 10 samples: it is too large"):
        partition.load(tmp_path / "p.npz", np.arange(10))


def test_partition_histogram_render_and_plot(tmp_path: Path) -> None:
    labels = np.array([0, 0, 1, 2, 2, 2])
    counts = partition.histogram([np.array([0, 1, 2]), np.array([3, 4, 5])], labels, 4)
    assert counts.tolist() == [[2, 1, 0, 0], [0, 0, 3, 0]]
    text = render(counts)
    assert "2 clients, 6 samples, 3 to 3 a client (median 3), 1 to 2 of 4 classes" in text
    assert "|█▄  |" in text
    assert len(render(np.ones((500, 300), dtype=int), rows=10, columns=20).splitlines()) == 12
    pytest.importorskip("matplotlib")
    plot(counts, tmp_path / "split.png", "a split")
    assert (tmp_path / "split.png").read_bytes().startswith(b"\x89PNG")
