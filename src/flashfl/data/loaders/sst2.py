"""SST-2 from GLUE: on each line a film critic's phrase, a tab, and 0 (bad) or 1 (good)."""

from __future__ import annotations

from pathlib import Path

from ..dataset import DataSet, Files, Options, Texts, texts
from ..files import damaged, read_text


def _load(paths: list[Path], options: Options) -> DataSet:
    """The test samples are GLUE's development sentences: the labels of its test sentences are not public."""
    return texts([read_tsv(path) for path in paths], 2, options)


def read_tsv(path: Path) -> Texts:
    """The sentences and labels of a GLUE file. Its first line names the columns."""
    first, *lines = read_text(path).split("\n")
    if first.strip() != "sentence\tlabel" or not any(lines):
        raise damaged(path, f"its first line is {first[:40]!r}, expected 'sentence<tab>label' and then sentences")
    sentences, labels = [], []
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        sentence, tab, label = line.rstrip("\r").rpartition("\t")
        if not tab or label not in ("0", "1"):
            raise damaged(path, f"line {number} does not end in a tab and 0 or 1")
        sentences.append(sentence)
        labels.append(int(label))
    return sentences, labels


SST2 = Files(
    read=_load,
    forms=(("SST-2/train.tsv", "SST-2/dev.tsv"),),
    get="Unpack https://dl.fbaipublicfiles.com/glue/data/SST-2.zip there; a pretrained BERT (config.json, "
    "vocab.txt, model.safetensors) goes into the folder bert-base-uncased/",
)
