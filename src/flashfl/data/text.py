"""Texts to token ids: WordPiece from a vocab.txt, or a vocabulary of the words that occur."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.errors import DataError
from .files import read_text
from .sources import Inputs

PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
_CHINESE = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)
_LONGEST = 100  # characters of a word that is still cut into pieces


def tokens(inputs: Inputs) -> Inputs:
    """What an encoder reads: padded ids, and the mask of those that are not padding (id 0)."""
    (ids,) = inputs
    return ids.to(torch.int64), (ids != 0).to(torch.int64)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Ids for words. A word that is not in the vocabulary is cut into pieces that are (WordPiece), if it has any."""

    vocab: dict[str, int]
    known: dict[str, list[int]] = field(default_factory=dict)  # words already looked up

    def __len__(self) -> int:
        return max(self.vocab.values()) + 1

    @staticmethod
    def wordpiece(path: Path) -> Tokenizer:
        """The uncased WordPiece tokenizer of a vocab.txt with one piece a line."""
        vocab = {line.rstrip("\n"): i for i, line in enumerate(read_text(path).splitlines())}
        if vocab.get(PAD) != 0 or not {UNKNOWN, START, END} <= vocab.keys():
            raise DataError(
                f"{path} is not a WordPiece vocabulary: it must begin with {PAD} and have {UNKNOWN}, {START} and "
                f"{END}. Set model_path to an encoder with such a vocab.txt, such as bert-base-uncased. If this should "
                "be one, download it again."
            )
        return Tokenizer(vocab)

    @staticmethod
    def of_words(texts: Iterable[str], size: int) -> Tokenizer:
        """The four special words and the most frequent words of `texts`, `size` in all; ties go by the alphabet."""
        counts = Counter(word for text in texts for word in words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        names = [PAD, UNKNOWN, START, END, *ranked][:size]
        return Tokenizer({name: i for i, name in enumerate(names)})

    def ids(self, text: str) -> list[int]:
        """The ids of a text's words, without start and end."""
        out: list[int] = []
        for word in words(text):
            if word not in self.known:
                self.known[word] = self._look_up(word)
            out += self.known[word]
        return out

    def _look_up(self, word: str) -> list[int]:
        """The longest piece from the left, then the longest of the rest. A word that has no such pieces is unknown."""
        unknown = [self.vocab[UNKNOWN]]
        if len(word) > _LONGEST:
            return [self.vocab[word]] if word in self.vocab else unknown
        found: list[int] = []
        rest, prefix = word, ""
        while rest:
            ends = (n for n in range(len(rest), 0, -1) if prefix + rest[:n] in self.vocab)
            if (end := next(ends, 0)) == 0:
                return unknown
            found.append(self.vocab[prefix + rest[:end]])
            rest, prefix = rest[end:], "##"
        return found

    def encode(self, texts: Sequence[str], length: int) -> NDArray[np.int32]:
        """Each text as `length` ids: start, its words (cut to fit), end, then padding."""
        out = np.zeros((len(texts), length), dtype=np.int32)
        for row, text in zip(out, texts, strict=True):
            ids = [self.vocab[START], *self.ids(text)[: length - 2], self.vocab[END]]
            row[: len(ids)] = ids
        return out


def words(text: str) -> list[str]:
    """Lower-case words without accents. Punctuation marks and Chinese characters are words by themselves."""
    if not text.isprintable():
        text = "".join(letter for letter in text if letter in "\t\n\r" or unicodedata.category(letter)[0] != "C")
    return "".join(map(_spaced, unicodedata.normalize("NFD", text.lower()))).split()


@cache
def _spaced(letter: str) -> str:
    """A letter, without accents, between spaces if it is a word by itself."""
    kind = unicodedata.category(letter)
    if kind == "Mn" or letter == "\ufffd":
        return ""
    ascii_mark = letter.isascii() and not letter.isalnum()
    return f" {letter} " if ascii_mark or kind[0] == "P" or _CHINESE.fullmatch(letter) else letter
