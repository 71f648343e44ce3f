"""SST-2, the sentences of GLUE: one film critic's phrase a line, a tab, 0 (bad) or 1 (good)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from .dataset import DataSet, Form, Options
from .examples import Arrays
from .files import damaged, read_text
from .text import Tokenizer, tokens


def load(paths: list[Path], options: Options) -> DataSet:
    """67,349 phrases to train on; judged on GLUE's 872 development sentences, for its test labels are not public."""
    texts, labels = zip(*(read_tsv(path) for path in paths), strict=True)
    if options.vocab:
        tokenizer = Tokenizer.wordpiece(Path(options.vocab))
    else:
        tokenizer = Tokenizer.of_words(texts[0], options.vocab_size)
    train, test = (text_arrays(t, y, tokenizer, options.length) for t, y in zip(texts, labels, strict=True))
    return DataSet("sst2", train, test, 2, (options.length,), vocab=len(tokenizer))


def text_arrays(texts: list[str], labels: list[int], tokenizer: Tokenizer, length: int) -> Arrays:
    """Texts as token ids that are masked when they are fetched."""
    ids = torch.from_numpy(tokenizer.encode(texts, length))
    return Arrays((ids,), torch.from_numpy(np.array(labels, dtype=np.int64)), tokens)


def read_tsv(path: Path) -> tuple[list[str], list[int]]:
    """The sentences and labels of a GLUE file, whose first line names the columns."""
    lines = read_text(path).split("\n")
    if lines[0].strip() != "sentence\tlabel":
        raise damaged(path, f"its first line is {lines[0][:40]!r} where 'sentence<tab>label' belongs")
    texts, labels = [], []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        text, tab, label = line.rstrip("\r").rpartition("\t")
        if not tab or label not in ("0", "1"):
            raise damaged(path, f"line {number} does not end in a tab and 0 or 1")
        texts.append(text)
        labels.append(int(label))
    if not texts:
        raise damaged(path, "it holds no sentences")
    return texts, labels


SST2 = (Form(("SST-2/train.tsv", "SST-2/dev.tsv"), load),)
