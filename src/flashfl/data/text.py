"""Texts to token ids: WordPiece from a vocab.txt, or a vocabulary of the words that occur."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from .files import damaged, read_text
from .sources import Inputs

PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
_CHINESE = (
    ("\u3400", "\u4dbf"),
    ("\u4e00", "\u9fff"),
    ("\uf900", "\ufaff"),
    ("\U00020000", "\U0002a6df"),
    ("\U0002a700", "\U0002ceaf"),
    ("\U0002f800", "\U0002fa1f"),
)
_LONGEST = 100  # characters of a word that is still taken apart


def tokens(inputs: Inputs) -> Inputs:
    """Padded ids to what an encoder reads: ids and the mask of those that are not padding (id 0)."""
    (ids,) = inputs
    return ids.to(torch.int64), (ids != 0).to(torch.int64)


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Ids for words; `pieces` says whether a word that is not in the vocabulary is taken apart (WordPiece)."""

    vocab: dict[str, int]
    pieces: bool
    known: dict[str, tuple[int, ...]] = field(default_factory=dict)  # words already looked up

    def __len__(self) -> int:
        return max(self.vocab.values()) + 1

    @staticmethod
    def wordpiece(path: Path) -> Tokenizer:
        """The uncased WordPiece tokenizer of a vocab.txt, one piece a line."""
        lines = read_text(path).splitlines()
        vocab = {line.rstrip("\n"): i for i, line in enumerate(lines)}
        lacking = [name for name in (PAD, UNKNOWN, START, END) if name not in vocab]
        if lacking:
            raise damaged(path, f"it lacks {', '.join(lacking)}, so it is not a WordPiece vocabulary")
        if vocab[PAD] != 0:
            raise damaged(path, f"{PAD} must be its first line")
        return Tokenizer(vocab, pieces=True)

    @staticmethod
    def of_words(texts: Iterable[str], size: int) -> Tokenizer:
        """The `size` most frequent words of `texts`, the four special ones included; equals go by the alphabet."""
        counts = Counter(word for text in texts for word in words(text))
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        names = [PAD, UNKNOWN, START, END, *ranked][:size]
        return Tokenizer({name: i for i, name in enumerate(names)}, pieces=False)

    def ids(self, text: str) -> list[int]:
        """The ids of a text's words, without start and end."""
        out: list[int] = []
        for word in words(text):
            if word not in self.known:
                self.known[word] = self._look_up(word)
            out += self.known[word]
        return out

    def _look_up(self, word: str) -> tuple[int, ...]:
        """Longest pieces first, from the left; a word that cannot be made of pieces is unknown as a whole."""
        if word in self.vocab:
            return (self.vocab[word],)
        unknown = (self.vocab[UNKNOWN],)
        if not self.pieces or len(word) > _LONGEST:
            return unknown
        found: list[int] = []
        at = 0
        while at < len(word):
            for end in range(len(word), at, -1):
                piece = word[at:end] if at == 0 else "##" + word[at:end]
                if piece in self.vocab:
                    found.append(self.vocab[piece])
                    at = end
                    break
            else:
                return unknown
        return tuple(found)

    def encode(self, texts: Sequence[str], length: int) -> NDArray[np.int32]:
        """Each text as `length` ids: start, its words (cut to fit), end, then padding."""
        out = np.zeros((len(texts), length), dtype=np.int32)
        for row, text in zip(out, texts, strict=True):
            ids = [self.vocab[START], *self.ids(text)[: length - 2], self.vocab[END]]
            row[: len(ids)] = ids
        return out


def words(text: str) -> list[str]:
    """Lower-case words without accents; every mark of punctuation and every Chinese character is a word of its own."""
    if not text.isprintable():
        text = "".join(letter for letter in text if letter in "\t\n\r" or unicodedata.category(letter)[0] != "C")
    out: list[str] = []
    for chunk in text.lower().split():
        if chunk.isascii() and chunk.isalnum():  # nearly all of them
            out.append(chunk)
            continue
        word = ""
        for letter in unicodedata.normalize("NFD", chunk):
            kind = unicodedata.category(letter)
            if kind == "Mn" or letter == "\ufffd":
                continue
            if _alone(letter, kind):
                out += [word, letter] if word else [letter]
                word = ""
            else:
                word += letter
        if word:
            out.append(word)
    return out


def _alone(letter: str, kind: str) -> bool:
    ascii_mark = letter.isascii() and not letter.isalnum()
    return ascii_mark or kind[0] == "P" or any(low <= letter <= high for low, high in _CHINESE)
