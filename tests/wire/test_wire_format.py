"""A second reader, written from FORMAT.md alone, bit by bit and without numpy: it must see what the codec wrote."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn
from wire_support import changed, mask_of, small_layout, update

import flashfl as fl
from flashfl.core.exchange import Local
from flashfl.core.layout import KINDS as LAYOUT_KINDS
from flashfl.core.layout import Layer, Layout
from flashfl.core.mask import Mask, Recipe
from flashfl.core.precision import Form, Precision, Rounding
from flashfl.core.rng import fold, hashes
from flashfl.sparsity import PruneRegrow, pattern_budgets, recipe_mask
from flashfl.wire import Limits, encode
from flashfl.wire.coded import write_levels
from flashfl.wire.frame import CODES
from flashfl.wire.message import KINDS as MESSAGE_KINDS
from flashfl.wire.values import round_values, segments

LAYOUT = small_layout((40, 300, 0, 17))
SIZES = LAYOUT.sizes


class Bytes:
    """A cursor."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        self.at += count
        assert self.at <= len(self.data)
        return self.data[self.at - count : self.at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")


def bits_of(data: bytes) -> list[int]:
    return [byte >> i & 1 for byte in data for i in range(8)]


def counts_of(body: Bytes) -> list[int]:
    return [body.number((size.bit_length() + 7) // 8) for size in SIZES]


def block(body: Bytes, counts: list[int], universe: list[int]) -> list[set[int]]:
    """The lists of a block."""
    coded = [min(n, u - n) for n, u in zip(counts, universe, strict=True)]
    ks, unary_length = list(body.take(len(counts))), body.number(4)
    low = bits_of(body.take((sum(n * k for n, k in zip(coded, ks, strict=True)) + 7) // 8))
    unary = bits_of(body.take(unary_length))
    gaps, at = [], 0
    for n, k in zip(coded, ks, strict=True):
        gaps.append([])
        for _ in range(n):
            zeros = 0
            while not unary[at]:
                zeros, at = zeros + 1, at + 1
            at += 1
            gaps[-1].append(zeros << k)
    at = 0
    for j in range(max(ks)):
        for part, k in zip(gaps, ks, strict=True):
            if k > j:
                for i in range(len(part)):
                    part[i] |= low[at] << j
                    at += 1
    out = []
    for part, n, u in zip(gaps, counts, universe, strict=True):
        place, found = -1, set()
        for gap in part:
            place += gap + 1
            found.add(place)
        out.append(set(range(u)) - found if 2 * n > u else found)
    return out


def read_mask(body: Bytes, base: Mask) -> list[bool]:
    form = body.number(1)
    if form == 4:
        return [bool(bit) for bit in bits_of(body.take((sum(SIZES) + 7) // 8))[: sum(SIZES)]]
    out: list[bool] = []
    if form == 3:
        for chosen, size in zip(block(body, counts_of(body), list(SIZES)), SIZES, strict=True):
            out += [i in chosen for i in range(size)]
        return out
    assert form == 2
    assert body.take(8).hex() == base.hash
    before, at = base.bits.tolist(), 0
    layers = []
    for size in SIZES:
        layers.append(before[at : at + size])
        at += size
    counts = counts_of(body) + counts_of(body)
    lists = block(body, counts, [sum(x) for x in layers] + [len(x) - sum(x) for x in layers])
    for layer, dropped, grown in zip(layers, lists[: len(SIZES)], lists[len(SIZES) :], strict=True):
        on = off = 0
        for active in layer:
            out.append(on not in dropped if active else off in grown)
            on, off = on + active, off + (not active)
    return out


def read(data: bytes, base: Mask) -> tuple[dict[str, object], list[bool], Bytes]:
    """Header fields, the mask, and the values section still to be read."""
    names = ("magic", "version", "kind", "layout", "check", "length", "phase", "round", "attempt", "client", "n", "key")
    header = dict(zip(names, struct.unpack("<4sBB8sIIBIHQQQ", data[:53]), strict=True))
    assert header["check"] == zlib.crc32(data[:14] + data[18:])
    assert header["length"] == len(data)
    body, sections = Bytes(data[53:]), {}
    while body.at < len(body.data):
        code, length = body.number(1), body.number(4)
        sections[code] = Bytes(body.take(length))
    mask = read_mask(sections[4], base)
    assert sections[4].at == len(sections[4].data)
    return header, mask, sections[5]


def read_int8(body: Bytes, counts: list[int]) -> list[float]:
    """Prunable layers and the 3 x 4 matrix are coarse; the norm's vector and all statistics are not."""
    scales = struct.unpack("<5f", body.take(20))
    levels = [[v - 256 if v > 127 else v for v in body.take(n)] for n in [*counts, 12]]
    fine = struct.unpack("<15f", body.take(60))
    values = [level * scale for part, scale in zip(levels, scales, strict=True) for level in part]
    return [*values[:-12], *fine[:5], *values[-12:], *fine[5:]]


@pytest.mark.parametrize("form", ["difference", "rice", "bitmap"])
@pytest.mark.parametrize("densities", [[0.2, 0.1, 0.0, 1.0], [0.9, 0.5, 0.0, 0.1], [0.0, 0.01, 0.0, 0.0]])
def test_second_reader_sees_the_same_message(form: str, densities: list[float]) -> None:
    base = mask_of(LAYOUT, [0.2, 0.1, 0.0, 1.0], 1)
    mask = changed(mask_of(LAYOUT, densities, 2), 0.1, 3)
    message = update(mask)
    header, found, values = read(encode(message, (base,), form=form).data, base)
    assert (header["magic"], header["version"], header["kind"]) == (b"FLSH", 1, 1)
    assert (header["phase"], header["round"], header["attempt"]) == message.tag
    assert (header["client"], header["n"], header["key"]) == (message.client, message.n, message.key)
    assert header["layout"] == bytes.fromhex(LAYOUT.hash)
    assert found == mask.bits.tolist()
    assert message.values is not None
    assert values.take(2) == b"\0\0"
    assert list(struct.unpack(f"<{message.values.numel()}f", values.data[2:])) == message.values.tolist()


def read_int4(body: Bytes, counts: list[int]) -> list[float]:
    """The same values are coarse; the rest travels as fp16."""
    count = sum(counts) + 12
    scales = [struct.unpack("<f", b"\0\0" + body.take(2))[0] for _ in range(-(-count // 64))]
    halves = [half for byte in body.take(-(-count // 2)) for half in (byte & 15, byte >> 4)]
    levels = [h - 16 if h > 7 else h for h in halves[:count]]
    assert not any(halves[count:])
    values = [level * scales[i // 64] for i, level in enumerate(levels)]
    fine = struct.unpack("<15e", body.take(30))
    return [*values[:-12], *fine[:5], *values[-12:], *fine[5:]]


@pytest.mark.parametrize("densities", [[0.2, 0.1, 0.0, 1.0], [0.9, 0.5, 0.0, 0.1]])
@pytest.mark.parametrize("rounding", ["unbiased", "nearest"])
def test_second_reader_sees_the_same_int4_values(densities: list[float], rounding: Rounding) -> None:
    mask = mask_of(LAYOUT, densities, 1)
    message, how = update(mask), Precision("int4", "fp16", rounding)
    _, _, values = read(encode(message, values=how, form="rice").data, mask)
    assert values.take(2) == b"\0" + bytes([4 + 16])
    assert message.values is not None
    rounded = round_values(message.values, segments(LAYOUT, mask.counts, "all", "int4"), how, message.value_key)
    assert torch.equal(torch.tensor(read_int4(values, list(mask.counts))), rounded)
    assert values.at == len(values.data)


def test_second_reader_sees_the_same_int8_values() -> None:
    mask = mask_of(LAYOUT, [0.2, 0.1, 0.0, 1.0], 1)
    message = update(mask)
    _, _, values = read(encode(message, values=Precision("int8"), form="rice").data, mask)
    assert values.take(2) == b"\0\3"
    assert message.values is not None
    rounded = round_values(
        message.values, segments(LAYOUT, mask.counts, "all", "int8"), Precision("int8"), message.value_key
    )
    assert torch.equal(torch.tensor(read_int8(values, list(mask.counts))), rounded)
    assert values.at == len(values.data)


def numbers_of(body: Bytes, count: int) -> list[int]:
    """The numbers of a block of one list, as they are."""
    k, length = body.number(1), body.number(4)
    low, unary = bits_of(body.take((count * k + 7) // 8)), bits_of(body.take(length))
    out, at = [], 0
    for i in range(count):
        end = unary.index(1, at)
        out.append((end - at << k) + sum(low[j * count + i] << j for j in range(k)))
        at = end + 1
    assert not any(low[count * k :] + unary[at:])
    return out


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_second_reader_sees_the_same_coded_levels(form: Form) -> None:
    """It turns the numbers into plain levels and reads on as before."""
    mask, how = (
        mask_of(LAYOUT, [0.9, 0.9, 0.0, 1.0], 1),
        Precision(form, "fp16" if form == "int4" else "fp32", changes=True),
    )
    message, count = update(mask), mask.active + 12
    assert message.values is not None
    message = replace(message, values=(message.values - 0.5) ** 7)
    _, _, values = read(encode(message, values=how, form="rice").data, mask)
    assert values.take(2) == bytes([0, {"int8": 3 + 32 + 64, "int4": 4 + 16 + 32 + 64}[form]])
    scales = values.take(20 if form == "int8" else 2 * -(-count // 64))
    levels = [-(x + 1) // 2 if x % 2 else x // 2 for x in numbers_of(values, count)]
    if form == "int8":
        plain = bytes(level % 256 for level in levels)
    else:
        halves = [level % 16 for level in levels] + [0] * (count % 2)
        plain = bytes(a | b << 4 for a, b in zip(halves[::2], halves[1::2], strict=True))
    rest = values.take(len(values.data) - values.at)
    found = {"int8": read_int8, "int4": read_int4}[form](Bytes(scales + plain + rest), list(mask.counts))
    rounded = round_values(message.values, segments(LAYOUT, mask.counts, "all", form), how, message.value_key)
    assert torch.equal(torch.tensor(found), rounded)


def test_hashes_as_described() -> None:
    rows = [[layer.name, list(layer.shape), layer.kind] for layer in LAYOUT.layers]
    text = json.dumps(rows, separators=(", ", ": ")).encode()
    assert hashlib.blake2b(text, digest_size=8).hexdigest() == LAYOUT.hash
    mask = mask_of(LAYOUT, [0.2, 0.1, 0.0, 1.0], 1)
    bits = mask.bits.tolist() + [False] * 7
    packed = bytes(sum(bits[i + j] << j for j in range(8)) for i in range(0, sum(SIZES), 8))
    assert hashlib.blake2b(packed, digest_size=8, key=LAYOUT.hash.encode()).hexdigest() == mask.hash


def test_other_layout_has_another_hash() -> None:
    assert Layout.build({"prunable": [("w", (2, 3))]}).hash != Layout.build({"prunable": [("w", (3, 2))]}).hash


def mixed(x: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ x >> shift) * factor & 0xFFFFFFFF
    return x


def hashed(index: int, key: int) -> int:
    x = mixed((mixed(index ^ key & 0xFFFFFFFF) + (key >> 32)) & 0xFFFFFFFF)
    return x - (1 << 32) if x >> 31 else x


def layer_of_recipe(layer: Layer, budget: int, key: int, m: int) -> set[int]:
    """The positions a layer keeps under a recipe."""

    def lowest(positions: list[int], count: int) -> set[int]:
        return set(sorted(positions, key=lambda i: hashed(i, key))[:count])

    shape, positions = layer.shape, list(range(layer.start, layer.stop))
    if not m or len(shape) < 2:
        return lowest(positions, budget)
    outputs, inputs = (1, shape[0]) if layer.turned else shape[:2]
    rest = layer.size // (outputs * inputs)
    n = min(m, max(1, round(budget * m / layer.size)))
    kept, left = set[int](), []
    for output in range(outputs):
        for place in range(rest):
            line = [layer.start + (output * inputs + i) * rest + place for i in range(inputs)]
            full = inputs // m * m
            for at in range(0, full, m):
                kept |= lowest(line[at : at + m], n)
            left += line[full:]
    return kept | lowest(left, budget - len(kept))


@pytest.mark.parametrize("m", [0, 2, 4])
def test_recipe_mask_as_described(m: int) -> None:
    net = nn.Sequential(nn.Conv2d(5, 6, 3), nn.ConvTranspose2d(6, 9, 2), nn.Conv2d(9, 3, 1), nn.Linear(27, 5))
    layout, key = Layout.of(net), fold(3, "mask", 7)
    text = b"3\0str:mask\0int:7"
    assert key == int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    budgets = pattern_budgets(layout, [size // 3 for size in layout.sizes], m)
    kept = set().union(
        *(layer_of_recipe(x, budget, key, m) for x, budget in zip(layout.prunable, budgets, strict=True))
    )
    assert kept == set(recipe_mask(layout, Recipe(key, budgets, m)).bits.nonzero().flatten().tolist())


PAGE = (Path(fl.wire.__file__).parent / "FORMAT.md").read_text()


def test_limits_as_described() -> None:
    for f in fields(Limits):
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{f.name}`"))
        assert row.endswith(f"| {json.dumps(f.default)} |"), row


def test_sections_and_kinds_as_described() -> None:
    rows = [line.split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ \| [a-z]+ \|", line)]
    assert {row[1]: int(row[0][2:]) for row in rows} == CODES
    assert all(f"{code} `{kind}`" in PAGE for code, kind in enumerate(MESSAGE_KINDS))
    assert ", ".join(f"`{kind}`" for kind in LAYOUT_KINDS[:3]) + f" and `{LAYOUT_KINDS[3]}`" in PAGE.replace("\n", " ")


def test_layout_hash_escapes_names_as_described() -> None:
    layout = Layout.build({"prunable": [('a"\\\n\x7fé\U0001f600', (2,))], "fixed": [("f", ())]})
    text = r"""[["a\"\\\n\u007f\u00e9\ud83d\ude00", [2], "prunable"], ["f", [], "fixed"]]"""
    assert hashlib.blake2b(text.encode("ascii"), digest_size=8).hexdigest() == layout.hash


def test_settings_as_described() -> None:
    """The page's table of fields and defaults is the classes'."""
    for cls in (Local, Precision, Recipe, PruneRegrow):
        section = re.split(r"^###? ", PAGE.split(f"### `{cls.__name__}`\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
        rows = [tuple(line.split(" | ")[:2]) for line in section.splitlines() if line.startswith("| `")]
        defaults = [[] if f.default == () else f.default for f in fields(cls)]
        said = ["(required)" if default is MISSING else json.dumps(default) for default in defaults]
        assert [(name[2:].strip("`"), default.strip(" |")) for name, default in rows] == [
            (f.name, default) for f, default in zip(fields(cls), said, strict=True)
        ]


def test_example_numbers_of_the_page_are_right() -> None:
    assert f"gives {fold(7, 'mask', 2)}." in PAGE
    assert f"hashes {', '.join(map(str, hashes((1 << 40) + 7, 0, 3, 'cpu').tolist()))}." in PAGE
    coded, data = write_levels(torch.tensor([1, -1, -2] * 16, dtype=torch.int8), "int4", True)
    assert coded
    assert f"coded: `{bytes(data).hex(' ')}`." in PAGE
