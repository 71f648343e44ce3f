"""One message, one text: what is accepted is written again to the same bytes, whatever was read or written before."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from wire_support import mask_of, order, small_layout
from wire_surgery import close_up, open_up, payload, replace

from flashfl.core.errors import ConfigError
from flashfl.core.exchange import Local
from flashfl.core.mask import Recipe
from flashfl.sparsity import PruneRegrow
from flashfl.wire import decode, encode
from flashfl.wire.errors import BadField, BadSection

LAYOUT = small_layout()
MASK = mask_of(LAYOUT, [0.2, 0.1, 0.0, 1.0], 1)
ORDER = encode(order(MASK, Local()), form="rice").data


def text_of(**fields: object) -> str:
    """Settings as the format wants them written, whatever their values."""
    return json.dumps({"is": "Local", **fields}, sort_keys=True, separators=(",", ":"))


def with_settings(text: str) -> bytes:
    return replace(ORDER, "local", text.encode())


def again(data: bytes) -> bytes:
    return encode(decode(data, LAYOUT), form="rice").data


@pytest.mark.parametrize("body", [b"", b"\0" * 8, b"\1\0"])
def test_reserved_section_9_is_refused(body: bytes) -> None:
    header, sections = open_up(ORDER)
    with pytest.raises(BadSection, match="section 9"):
        decode(close_up(header, [*sections, (9, body)]), LAYOUT)


RATES = [text_of(adapt={"is": "PruneRegrow", "rate": zero}) for zero in (0.0, -0.0)]


@pytest.mark.parametrize("texts", [RATES, RATES[::-1]])
def test_zeros_of_both_signs_are_kept_apart_whatever_came_before(texts: list[str]) -> None:
    for text in texts:
        assert again(with_settings(text)) == with_settings(text)
    for rate, text in zip((0.0, -0.0), RATES, strict=True):
        data = encode(order(MASK, Local(adapt=PruneRegrow(rate)))).data
        assert payload(data, "local") == text.encode()


def test_settings_have_one_zero_and_exact_types() -> None:
    plain = payload(encode(order(MASK, Local(lr=1.0))).data, "local")
    for same in (Local(lr=1), Local(lr=1.0, prox=-0.0), Local(lr=1, momentum=0)):
        assert payload(encode(order(MASK, same)).data, "local") == plain
    for wrong in ({"epochs": True}, {"epochs": 1.0}, {"lr": True}, {"lr": "0.1"}, {"batch": None}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Local(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"prox": -0.0}, {"epochs": True}, {"epochs": 2.0}, {"lr": 2}, {"statistics": 0}])
def test_settings_in_another_text_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadField, match="settings"):
        decode(with_settings(text_of(**wrong)), LAYOUT)


def recipe(key: int = 5, budgets: Sequence[int] = (8, 30, 0, 17), nm: int = 0) -> str:
    return text_of(start={"is": "Recipe", "key": key, "budgets": budgets, **({"nm": nm} if nm else {})})


def test_recipe_in_settings_that_fits_is_accepted() -> None:
    for text in (recipe(), recipe(2**64 - 1), recipe(budgets=(20, 150, 0, 8), nm=2)):
        assert again(with_settings(text)) == with_settings(text)


@pytest.mark.parametrize(
    "text",
    [
        recipe(key=-1),
        recipe(key=2**64),
        recipe(budgets=(8, 30, 0)),
        recipe(budgets=(8, 30, 0, 17, 0)),
        recipe(budgets=(-8, 30, 0, 17)),
        recipe(budgets=(41, 30, 0, 17)),
        recipe(budgets=(8, 30, 1, 17)),
        recipe(nm=1),
        recipe(nm=-2),
        recipe(nm=2**16),
        recipe(budgets=(2, 150, 0, 8), nm=2),  # 20 groups keep at least one weight each
    ],
)
def test_recipe_in_settings_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(BadField, match="recipe"):
        decode(with_settings(text), LAYOUT)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"epochs": 10**30}, "epochs"),
        ({"epochs": 2**31}, "epochs"),
        ({"batch": 2**31}, "batch"),
        ({"max_steps": 2**31}, "max_steps"),
        ({"lr": 1e308}, "lr"),
        ({"momentum": 1000001.0}, "momentum"),
        ({"prox": 1e300}, "prox"),
        ({"weight_decay": 1e300}, "weight_decay"),
        ({"adapt": {"is": "Recipe", "budgets": [8], "key": 1}}, "adapt"),
        ({"adapt": {"is": "Local"}}, "adapt"),
        ({"start": {"is": "PruneRegrow"}}, "start"),
        ({"keep": ["mask", "mask"]}, "keep"),
    ],
)
def test_settings_beyond_their_bounds_are_refused(wrong: dict[str, object], name: str) -> None:
    with pytest.raises(BadField, match=f"settings in the message cannot be read: {name} = "):
        decode(with_settings(text_of(**wrong)), LAYOUT)


def test_adapt_must_be_a_rule() -> None:
    with pytest.raises(ConfigError, match="adapt = "):
        Local(adapt=Recipe(1, (8,)))  # type: ignore[arg-type]
