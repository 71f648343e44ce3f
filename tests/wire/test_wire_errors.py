"""One test for each named error of the decoder."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from wire_support import changed, mask_of, order, small_layout, update
from wire_surgery import LENGTH, close_up, mask_choice, open_up, payload, remove, replace

from flashfl.core.errors import FlashError
from flashfl.core.exchange import Extra
from flashfl.core.mask import Mask, Recipe
from flashfl.core.precision import Precision
from flashfl.sparsity import recipe_mask
from flashfl.wire import Limits, Message, decode, encode, errors, seal

LAYOUT = small_layout()
BASE = mask_of(LAYOUT, [0.2, 0.1, 0.0, 1.0], 1)
NEAR = changed(BASE, 0.3, 2)
KNOWN = {BASE.hash: BASE}
EXTRA = {"a": Extra("scalar", torch.tensor(1.0)), "b": Extra("bits", torch.ones(5, dtype=torch.bool))}
UPDATE = encode(update(NEAR, extra=EXTRA, metrics={"loss": 1.0, "steps": 2.0}), (BASE,), form="difference").data
ORDER = encode(order(BASE, start=(2, 1, 0)), (BASE,), form="known").data


def refused(error: type[errors.WireError], data: bytes, match: str | None = None, **more: object) -> None:
    with pytest.raises(error, match=match) as found:
        decode(data, LAYOUT, KNOWN, **more)  # type: ignore[arg-type]
    assert type(found.value) is error


def put(data: bytes, at: int, what: bytes) -> bytes:
    return data[:at] + what + data[at + len(what) :]


def test_untouched_messages_decode() -> None:
    decode(UPDATE, LAYOUT, KNOWN)
    decode(ORDER, LAYOUT, KNOWN)


def test_bad_magic() -> None:
    refused(errors.BadMagic, b"")
    refused(errors.BadMagic, b"PK\3\4" + UPDATE[4:])


def test_bad_version() -> None:
    refused(errors.BadVersion, seal(put(UPDATE, 4, b"\2")))


def test_bad_length() -> None:
    refused(errors.BadLength, UPDATE[:20])
    refused(errors.BadLength, UPDATE[:-1])
    refused(errors.BadLength, replace(UPDATE, "values", payload(UPDATE, "values")[:-1]))
    header, sections = open_up(UPDATE)
    cut = bytearray(close_up(header, sections)[:-1])
    cut[LENGTH] = struct.pack("<I", len(cut))
    refused(errors.BadLength, seal(cut))


def test_trailing_bytes() -> None:
    refused(errors.TrailingBytes, UPDATE + b"\0")
    for name in ("mask", "values", "metrics", "extra"):
        refused(errors.TrailingBytes, replace(UPDATE, name, payload(UPDATE, name) + b"\0"))
    refused(errors.TrailingBytes, replace(ORDER, "start", payload(ORDER, "start") + b"\0"))


def test_bad_checksum() -> None:
    refused(errors.BadChecksum, put(UPDATE, 100, bytes([UPDATE[100] ^ 1])))


def test_wrong_layout() -> None:
    with pytest.raises(errors.WrongLayout):
        decode(UPDATE, small_layout((40, 300, 17)), KNOWN)


def test_too_large() -> None:
    refused(errors.TooLarge, replace(ORDER, "local", b'{"is":' + b"[" * 20 + b"]" * 20 + b"}"))
    wide = struct.pack("<BB", 0, 8) + struct.pack("<I", 1 << 31) * 8
    refused(errors.TooLarge, replace(UPDATE, "extra", b"\1\1x\1" + wide))
    refused(errors.TooLarge, replace(UPDATE, "extra", b"\1\1x\2" + b"\xff\xff\xff\xff"))


def test_bad_section() -> None:
    header, sections = open_up(UPDATE)
    refused(errors.BadSection, close_up(header, [*sections, sections[0]]))
    refused(errors.BadSection, close_up(header, [*sections, (99, b"")]))
    refused(errors.BadSection, replace(UPDATE, "lacks", b"\0" * 8))
    refused(errors.BadSection, remove(ORDER, "local"))
    refused(errors.BadSection, remove(UPDATE, "mask"))
    refused(errors.BadSection, replace(UPDATE, "counts", b"\0" * 5))


def test_bad_field() -> None:
    refused(errors.BadField, seal(put(UPDATE, 5, b"\7")), "kind")
    refused(errors.BadField, replace(UPDATE, "mask", b"\x09"), "form")
    refused(errors.BadField, replace(UPDATE, "values", b"\0\x09"), "form")
    refused(errors.BadField, replace(UPDATE, "metrics", b"\1\1\x07" + b"\0" * 8), "ASCII")
    refused(errors.BadField, replace(UPDATE, "extra", b"\1\1x\x09"), "form")


@pytest.mark.parametrize(
    "text",
    [
        '{"is":"Local","lr":0.03,"lr":0.04}',
        '{"is":"Local", "lr":0.03}',
        '{"is":"Local","lr":1}',
        '{"is":"Local","epochs":1}',
        '{"is":"Local","lr":NaN}',
        '{"is":"Local","lr":1e999}',
        '{"is":"Local","lr":-1.0}',
        '{"is":"Local","nonsense":1}',
        '{"is":"Recipe","key":1,"budgets":[1]}',
        '{"is":"os.system"}',
        '{"is":"Local","epochs":' + "9" * 5000 + "}",
        "[1]",
        "\xff",
        "",
    ],
)
def test_settings_not_in_canonical_form_are_refused(text: str) -> None:
    refused(errors.BadField, replace(ORDER, "local", text.encode("latin1")), "settings")


def test_canonical_settings_are_what_json_gives() -> None:
    plain = payload(ORDER, "local")
    assert json.dumps(json.loads(plain), sort_keys=True, separators=(",", ":")).encode() == plain


def test_bad_count() -> None:
    rice = payload(encode(update(NEAR), form="rice").data, "mask")
    refused(errors.BadCount, replace(UPDATE, "mask", put(rice, 1, b"\xff")))
    difference = payload(UPDATE, "mask")
    refused(errors.BadCount, replace(UPDATE, "mask", put(difference, 9, b"\x28")))
    counts = encode(Message("update", LAYOUT, (1, 0, 0), 3, 50, counts=BASE.counts)).data
    refused(errors.BadCount, replace(counts, "counts", b"\xff" * 5))
    refused(errors.BadCount, replace(UPDATE, "metrics", b"\0"))


def test_bad_order() -> None:
    one, two = b"\4loss" + struct.pack("<d", 1.0), b"\5steps" + struct.pack("<d", 2.0)
    decode(replace(UPDATE, "metrics", b"\2" + one + two), LAYOUT, KNOWN)
    refused(errors.BadOrder, replace(UPDATE, "metrics", b"\2" + two + one))
    refused(errors.BadOrder, replace(UPDATE, "metrics", b"\2" + one + one))


def test_out_of_range() -> None:
    """One weight of layer 0 at gap 39 of 40 moved one place too far."""
    bits = torch.zeros(LAYOUT.prunable_size, dtype=torch.bool)
    bits[39] = True
    mask = Mask(LAYOUT, bits)
    data = encode(update(mask), form="rice").data
    body = bytearray(payload(data, "mask"))
    assert body[-2:] == bytes([0b0111, 0b100])  # k = 4: low bits 7, quotient 2
    body[-2] = 0b1000
    refused(errors.OutOfRange, replace(data, "mask", bytes(body)))


def test_non_finite() -> None:
    bad = struct.pack("<f", float("nan"))
    refused(errors.NonFinite, replace(UPDATE, "values", payload(UPDATE, "values")[:-4] + bad))
    refused(errors.NonFinite, replace(UPDATE, "metrics", b"\1\1x" + struct.pack("<d", float("inf"))))
    refused(errors.NonFinite, replace(UPDATE, "extra", b"\1\1x\3\0" + bad))
    half = encode(update(BASE), (BASE,), Precision("fp16")).data
    refused(errors.NonFinite, replace(half, "values", put(payload(half, "values"), 2, struct.pack("<e", float("inf")))))


def test_bad_mask() -> None:
    data = encode(order(recipe_mask(LAYOUT, Recipe(5, BASE.counts))), form="recipe").data
    decode(data, LAYOUT)
    body = payload(data, "mask")
    refused(errors.BadMask, replace(data, "mask", put(body, 9, b"\7")))


def test_recipe_with_an_invalid_pattern_is_refused() -> None:
    data = encode(order(recipe_mask(LAYOUT, Recipe(5, BASE.counts))), form="recipe").data
    body = payload(data, "mask")
    refused(errors.BadField, replace(data, "mask", put(body, 17, b"\1\0")), "group size is 1")
    refused(errors.BadCount, replace(data, "mask", put(body, 17, b"\2\0")), "it must be from 20 to 20")


def test_unknown_mask() -> None:
    with pytest.raises(errors.UnknownMask) as found:
        decode(ORDER, LAYOUT, {})
    assert found.value.hash == BASE.hash


def test_invalid_int8_scales_are_refused() -> None:
    data = encode(update(BASE), (BASE,), Precision("int8")).data
    body = payload(data, "values")
    refused(errors.BadField, replace(data, "values", put(body, 2, struct.pack("<f", -1.0))))
    refused(errors.BadField, replace(data, "values", put(body, 2, struct.pack("<f", 0.0))))
    refused(errors.BadField, replace(data, "values", put(body, 2, struct.pack("<f", np.float32(0.1)))))
    refused(errors.NonFinite, replace(data, "values", put(body, 2, struct.pack("<f", float("inf")))))


def test_invalid_int4_scales_and_levels_are_refused() -> None:
    data = encode(update(BASE), (BASE,), Precision("int4")).data
    body = payload(data, "values")
    for scale in (b"\0\x80", b"\0\0", b"\x01\0"):  # negative zero, zero, and far too small
        refused(errors.BadField, replace(data, "values", put(body, 2, scale)))
    refused(errors.NonFinite, replace(data, "values", put(body, 2, b"\x80\x7f")))
    first = 2 + 2 * -(-(BASE.active + 12) // 64)
    refused(errors.BadField, replace(data, "values", put(body, first, b"\x88")))  # level -8


def test_changes_are_refused_where_they_make_no_sense() -> None:
    how = Precision("int8", changes=True)
    data = encode(update(BASE), (BASE,), how).data
    assert decode(data, LAYOUT, {BASE.hash: BASE}).precision == how
    assert mask_choice(payload(data, "mask")) == ("known", BASE.hash)
    body = payload(data, "values")
    refused(errors.BadField, replace(data, "values", put(body, 0, b"\2")))  # statistics alone
    data = encode(order(BASE), (BASE,)).data
    refused(errors.BadField, replace(data, "values", put(payload(data, "values"), 1, bytes([32]))))
    refused(errors.BadField, replace(data, "values", put(payload(data, "values"), 1, bytes([5]))))
    refused(errors.BadField, replace(data, "values", put(payload(data, "values"), 1, bytes([64]))))
    refused(errors.BadField, replace(data, "values", put(payload(data, "values"), 1, bytes([16]))))  # fp32 has no rest


def test_every_error_is_a_wire_error() -> None:
    named = [x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, FlashError)]
    assert len(named) > 15
    assert all(issubclass(x, errors.WireError) or x is FlashError for x in named)


def test_sections_and_fields_out_of_place_are_refused() -> None:
    kept = encode(order(BASE, start=(2, 1, 0), own=BASE.hash), (BASE,)).data
    decode(kept, LAYOUT, KNOWN)
    refused(errors.BadSection, remove(kept, "start"), "no section 'start', the round it was stored in")
    lack = encode(Message("lack", LAYOUT, (2, 1, 0), 5, lacks=BASE.hash)).data
    decode(lack, LAYOUT)
    for at in (37, 45):  # the number of samples, the key
        refused(errors.BadField, seal(put(lack, at, b"\1")), "both must be 0")
    counted = encode(Message("update", LAYOUT, (2, 1, 0), 5, n=3, counts=BASE.counts)).data
    refused(errors.BadSection, remove(counted, "counts"), "no mask, values or counts")
    made = encode(order(recipe_mask(LAYOUT, Recipe(5, BASE.counts))), form="recipe").data
    refused(errors.BadField, made, "a recipe, but the order did not allow one", limits=Limits(recipes=False))
