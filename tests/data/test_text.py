"""Texts to ids."""

from __future__ import annotations

from pathlib import Path

import published
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashfl.data.text import Tokenizer, tokens, words


def test_words() -> None:
    assert words("Café's  naïve\tÀ-la, $5.00") == ["cafe", "'", "s", "naive", "a", "-", "la", ",", "$", "5", ".", "00"]
    assert words("中文 film\u200b \x07") == ["中", "文", "film"]
    assert words("  ") == []


def test_vocabulary_has_most_frequent_words_ties_by_alphabet() -> None:
    made = Tokenizer.of_words(["b a b", "c a", "d"], size=7)
    assert made.vocab == {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4, "b": 5, "c": 6}
    assert made.ids("a d b") == [4, 1, 5]
    assert len(made) == 7


def test_wordpiece_takes_longest_pieces_first(tmp_path: Path) -> None:
    made = Tokenizer.wordpiece(published.vocabulary(tmp_path))
    assert made.ids("unloved") == [7, 8, 9]
    assert made.ids("unlovely") == [1]
    assert made.ids("x" * 101) == [1]
    assert made.encode(["fine fine fine", ""], 4).tolist() == [[2, 5, 5, 3], [2, 3, 0, 0]]


def test_padding_is_masked() -> None:
    ids, mask = tokens((torch.tensor([[2, 5, 3, 0]], dtype=torch.int32),))
    assert ids.dtype == torch.int64
    assert mask.tolist() == [[1, 1, 1, 0]]


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=30))
def test_words_match_transformers(text: str) -> None:
    transformers = pytest.importorskip("transformers")
    basic = transformers.models.bert.tokenization_bert
    if not hasattr(basic, "BasicTokenizer"):
        pytest.skip("this version of transformers has no BasicTokenizer")
    assert words(text) == basic.BasicTokenizer().tokenize(text)
