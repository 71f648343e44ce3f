"""Masks in all forms: round trips, exact sizes, and the choice of the smallest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_lists import plain_gap_sums
from wire_support import changed, layouts, mask_of, masks, small_layout
from wire_surgery import mask_choice

from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Recipe
from flashfl.sparsity import pattern_budgets, recipe_mask
from flashfl.wire import mask_from_bytes, mask_to_bytes
from flashfl.wire.errors import BadField, WireError
from flashfl.wire.geometry import geometry
from flashfl.wire.masks import FORMS, read_mask
from flashfl.wire.reader import Reader
from flashfl.wire.sizes import count_sizes, mask_sizes


def sent(mask: Mask, bases: tuple[Mask, ...], form: str | None) -> tuple[Mask, str, int]:
    data = mask_to_bytes(mask, bases, form)
    known = {base.hash: base for base in bases}
    reader = Reader(memoryview(data), "mask")
    found, name = read_mask(reader, mask.layout, known), mask_choice(data)[0]
    reader.end()
    assert form in (None, name)
    assert torch.equal(found.bits, mask.bits)
    assert found.counts == Mask(mask.layout, mask.bits).counts
    return found, name, len(data)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_every_form_round_trips(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    mask, base = data.draw(masks(layout)), data.draw(masks(layout))
    sizes = [sent(mask, (base,), form)[2] for form in ("difference", "rice", "bitmap")]
    assert sent(mask, (base, mask), "known")[2] == 9
    assert sent(mask, (base,), None)[2] == (9 if mask.equal(base) else min(sizes))
    assert sent(mask, (base, mask), None)[2] == 9


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_counted_size_is_the_encoded_size(data: st.DataObject) -> None:
    """Bytes counted by tensor reductions, with shared and with own bases, are those the encoder writes."""
    layout = data.draw(layouts(least=1))
    rows = [data.draw(masks(layout)) for _ in range(3)]
    own = [data.draw(masks(layout)), rows[1], data.draw(masks(layout))]
    shared = data.draw(masks(layout))
    bits, mine = torch.stack([x.bits for x in rows]), torch.stack([x.bits for x in own])
    one = shared.bits[None]
    for masks_, bases, pairs in (
        (bits, [], [(m, ()) for m in rows]),
        (bits, [one], [(m, (shared,)) for m in rows]),
        (bits, [one, mine], [(m, (shared, x)) for m, x in zip(rows, own, strict=True)]),
        (one, [bits], [(shared, (m,)) for m in rows]),  # one mask against what each of three clients holds
    ):
        for found in (count_sizes(layout, masks_, bases, plain_gap_sums), mask_sizes(layout, masks_, bases)):
            assert found.tolist() == [len(mask_to_bytes(mask, held)) for mask, held in pairs]


def test_masks_of_no_weights_and_no_masks_are_counted() -> None:
    empty = small_layout(())
    bits = torch.zeros(2, 0, dtype=torch.bool)
    assert mask_sizes(empty, bits).tolist() == [1, 1]
    assert mask_sizes(empty, bits, [bits]).tolist() == [9, 9]
    assert mask_sizes(small_layout((4,)), torch.zeros(0, 4, dtype=torch.bool)).tolist() == []


def test_recipe_round_trips() -> None:
    layout = small_layout((4000, 30_000))
    mask = recipe_mask(layout, Recipe(2**64 - 1, (400, 600)))
    found, form, size = sent(mask, (), None)
    assert form == "recipe"
    assert size == geometry(layout).recipe_size == 23
    assert found.recipe == mask.recipe


def test_full_and_empty_layers_are_almost_free() -> None:
    layout = small_layout((100_000, 200_000, 50_000))
    assert sent(mask_of(layout, [1.0, 0.0, 1.0], 1), (), None)[2] == 1 + 3 * (3 + 1) - 1 + 4


def test_smallest_form_is_chosen() -> None:
    layout = small_layout((5000, 20_000))
    base = mask_of(layout, [0.1, 0.05], 1)
    assert sent(base, (base,), None)[1:] == ("known", 9)
    assert sent(Mask(layout, base.bits.clone()), (base,), None)[1] == "known"
    assert sent(changed(base, 0.1, 2), (base,), None)[1] == "difference"
    assert sent(mask_of(layout, [0.1, 0.05], 9), (base,), None)[1] == "rice"
    assert sent(mask_of(layout, [0.5, 0.5], 9), (base,), None)[1] == "bitmap"
    near, far = changed(base, 0.1, 2), changed(base, 0.5, 3)
    data = mask_to_bytes(changed(near, 0.05, 4), (far, near))
    assert mask_choice(data) == ("difference", near.hash)


@pytest.mark.parametrize("form", ["known", "recipe"])
def test_impossible_forms_are_refused(form: str) -> None:
    layout = small_layout()
    assert form in FORMS
    with pytest.raises(BadField, match="cannot be sent"):
        mask_to_bytes(mask_of(layout, [0.1] * 4, 1), (), form)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_stored_mask_round_trips(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    mask = data.draw(masks(layout))
    stored = mask_to_bytes(mask)
    found = mask_from_bytes(stored, layout)
    assert torch.equal(found.bits, mask.bits)
    assert found.counts == mask.counts
    assert mask_to_bytes(found) == stored


def test_stored_mask_takes_the_smallest_form() -> None:
    layout = small_layout((4000, 30_000))
    made = recipe_mask(layout, Recipe(5, (400, 600)))
    assert [mask_to_bytes(mask)[0] for mask in (made, Mask(layout, made.bits), mask_of(layout, [0.5, 0.5], 1))] == [
        FORMS.index("recipe"),
        FORMS.index("rice"),
        FORMS.index("bitmap"),
    ]
    assert mask_from_bytes(mask_to_bytes(made), layout).recipe == made.recipe


def test_damaged_stored_mask_is_a_wire_error() -> None:
    layout = small_layout((4000, 30_000))
    mask = mask_of(layout, [0.1, 0.02], 1)
    stored = mask_to_bytes(mask)
    leaning = mask_to_bytes(changed(mask, 0.1, 2), (mask,), "difference")
    for bad in (b"", stored[:-1], stored + b"\0", b"\x07" + stored[1:], leaning):
        with pytest.raises(WireError):
            mask_from_bytes(bad, layout)


@pytest.mark.parametrize("m", [2, 3, 4])
def test_recipe_mask_with_a_pattern_round_trips(m: int) -> None:
    """Every recipe that fits is followed: empty layers, vectors and layers narrower than a group included."""
    shapes = [("a", (4, 6, 3)), ("b", (5,)), ("c", (3, 1)), ("up", (7, 2, 3))]
    part = Layout.build({"prunable": shapes}, turned=["up"])
    layout = Layout.build({"prunable": [*shapes, ("empty", (1, 0))]}, turned=["up"])
    for density in (0.0, 0.3, 0.5, 1.0):
        budgets = (*pattern_budgets(part, [round(size * density) for size in part.sizes], m), 0)
        found, _, _ = sent(recipe_mask(layout, Recipe(7, budgets, m)), (), "recipe")
        assert found.counts == budgets
