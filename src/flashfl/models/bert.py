"""BERT and other encoders that classify text, through the optional `transformers` package."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError, DataError, check_range

_HOW = (
    "Set model_path to a folder with config.json, vocab.txt and model.safetensors (such as that of `hf download "
    "google-bert/bert-base-uncased`), or to the name of a model on the hub. To train from random weights, set "
    "model = 'bert-scratch' or 'tiny-transformer'."
)


class Bert(nn.Module):
    """An encoder with a classifier on top, from token ids and an attention mask to logits.

    The weight matrices of the encoder's layers are prunable. LayerNorm, biases, pooler and classifier stay dense. With
    `freeze` the embeddings are fixed: never trained, masked or averaged. Use it with pretrained weights only.
    """

    def __init__(self, net: nn.Module, freeze: bool) -> None:
        super().__init__()
        self.net = net
        self.heads_apart = int(_transformers().__version__.split(".")[0]) >= 5  # its masks have a dimension for heads
        for name, p in net.named_parameters():
            if freeze and "embeddings" in name:
                p.requires_grad_(False)

    @staticmethod
    def prunable(name: str, p: nn.Parameter) -> bool:
        return ".layer." in name and p.dim() == 2

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        # With a mask for every pair of tokens, the library does not ask the host whether any token is masked. That
        # question would stall a GPU at every step, and it cannot be recorded in a CUDA graph.
        mask = attention_mask[:, None, :].expand(-1, ids.shape[1], -1)
        if self.heads_apart:
            mask = mask[:, None].to(torch.bool)
        logits: Tensor = self.net(input_ids=ids, attention_mask=mask).logits
        return logits


def _transformers() -> ModuleType:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the library says about itself while it loads
            import transformers
    except ImportError:
        raise ConfigError("this model needs the transformers package: pip install 'flashfl[bert]'") from None
    return transformers  # type: ignore[no-any-return]


def pretrained(
    classes: int = 2, vocab: int = 0, length: int = 0, path: str = "bert-base-uncased", freeze: bool = True
) -> Bert:
    """The encoder in a folder, or of that name on the hub, with its weights. Only the classifier is drawn at random.

    It must know at least `vocab` tokens, and texts of at least `length`.
    """
    net, drawn = _load(path, classes)
    if lost := sorted(n for n in drawn if n.startswith(net.base_model_prefix + ".") and ".pooler." not in n):
        raise DataError(
            f"the weights in {path} do not match its config.json. Missing or of another shape: {', '.join(lost[:2])}"
            f"{f' and {len(lost) - 2} more' if lost[2:] else ''}. Download both files again."
        )
    check_range(f"[0, {net.config.vocab_size}]", f"{path} knows no more tokens: lower vocab_size", vocab=vocab)
    longest = getattr(net.config, "max_position_embeddings", length)
    check_range(f"[0, {longest}]", f"{path} reads texts of at most so many tokens", length=length)
    return Bert(net.float(), freeze)


def _load(path: str, classes: int) -> tuple[Any, list[str]]:
    """A model of the library, and the names of the parameters that its weights lack or that do not fit."""
    transformers = _transformers()
    logging = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # a newly drawn classifier is what we want
    try:
        net, loading = transformers.AutoModelForSequenceClassification.from_pretrained(
            path,
            num_labels=classes,
            ignore_mismatched_sizes=True,  # a classifier for other classes is drawn anew
            output_loading_info=True,
        )
    except Exception as error:  # damaged files raise many kinds
        raise DataError(
            f"no encoder could be loaded from {path!r}: {(str(error) or type(error).__name__).splitlines()[0]}. {_HOW}"
        ) from None
    finally:
        logging.set_verbosity(level)
    drawn = (*loading["missing_keys"], *loading["mismatched_keys"])
    return net, [key if isinstance(key, str) else key[0] for key in drawn]  # some versions give shapes with a name


def vocabulary(path: str) -> Path:
    """The vocab.txt of the encoder in a folder, or of that name on the hub."""
    if Path(path).is_dir():
        return Path(path) / "vocab.txt"
    try:
        return Path(_transformers().utils.cached_file(path, "vocab.txt"))
    except (OSError, ValueError) as error:  # ValueError: no name that the hub could have
        raise DataError(f"no vocab.txt for {path!r} on the hub: {str(error).splitlines()[0]}. {_HOW}") from None


def scratch(classes: int = 2, vocab: int = 30522, length: int = 64, path: str = "", freeze: bool = False) -> Bert:
    """BERT base, or an encoder of the sizes in `path`/config.json, with random weights."""
    transformers, file = _transformers(), Path(path) / "config.json"
    with torch.device("cpu"):  # the class loads torch's compiler, which torch 2.6 cannot load if the default is "meta"
        encoder = transformers.BertForSequenceClassification
    try:
        sizes: dict[str, Any] = json.loads(file.read_text()) if path and file.is_file() else {}
        config = transformers.BertConfig(**sizes | {"vocab_size": vocab, "num_labels": classes})
        config.max_position_embeddings = max(length, config.max_position_embeddings)
        net = encoder(config)
    except Exception as error:  # damaged files raise many kinds
        raise DataError(f"the sizes in {file} do not make an encoder: {error}. Download the file again") from None
    return Bert(net, freeze)
