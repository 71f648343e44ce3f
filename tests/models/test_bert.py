"""Transformer encoders: what is prunable, what is fixed, that weights are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashfl.core.errors import ConfigError, DataError
from flashfl.core.layout import Layout
from flashfl.models import bert, build_model

pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def small(folder: Path, freeze: bool = False, **sizes: int) -> bert.Bert:
    """A small encoder for 50 tokens, and its config.json in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES | {"max_position_embeddings": 512} | sizes))
    return bert.scratch(vocab=50, length=12, path=str(folder), freeze=freeze)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(1, 25).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return ids, mask


def test_only_the_encoders_matrices_are_prunable(tmp_path: Path) -> None:
    layout = Layout.of(small(tmp_path))
    assert len(layout.prunable) == 2 * 6
    assert layout.prunable_size == 2 * (4 * 16 * 16 + 2 * 16 * 64)
    assert all(".layer." in layer.name and layer.name.endswith(".weight") for layer in layout.prunable)
    assert not layout.of_kind("fixed")


def test_frozen_embeddings_are_fixed(tmp_path: Path) -> None:
    model = small(tmp_path, freeze=True)
    layout = Layout.of(model)
    assert {layer.name.split(".")[2] for layer in layout.of_kind("fixed")} == {"embeddings"}
    assert not any("embeddings" in layer.name for layer in layout.travelling)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == layout.trained_size


def test_masked_tokens_do_not_matter(tmp_path: Path) -> None:
    model = small(tmp_path).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(10)  # at a fresh model's scale attention hardly changes the output
    ids, mask = batch()
    other = torch.where(mask == 1, ids, 7)
    assert torch.allclose(model(ids, mask), model(other, mask), atol=1e-4)
    assert (model(ids, mask) - model(ids, torch.ones_like(mask))).abs().max() > 1e-3


def test_mask_gives_the_same_output_as_in_transformers(tmp_path: Path) -> None:
    model = small(tmp_path).eval()
    ids, mask = batch()
    assert torch.allclose(model(ids, mask), model.net(input_ids=ids, attention_mask=mask).logits, atol=1e-5)


def test_bert_base_has_its_published_sizes() -> None:
    with torch.device("meta"):
        model = build_model("bert-scratch", freeze=True)
    layout = Layout.of(model)
    assert layout.prunable_size == 12 * (4 * 768 * 768 + 2 * 768 * 3072)
    assert sum(layer.size for layer in layout.of_kind("fixed")) == 23_837_184
    assert len(layout.prunable) == 72


def test_pretrained_weights_are_kept_and_embeddings_fixed(tmp_path: Path) -> None:
    first = small(tmp_path)
    first.net.save_pretrained(tmp_path)
    again = build_model("bert", classes=3, vocab=50, length=12, path=str(tmp_path))
    weights = dict(first.named_parameters())
    kept = [torch.equal(p, weights[name]) for name, p in again.named_parameters() if "classifier" not in name]
    assert all(kept)
    assert again(*batch()).shape == (2, 3)
    assert Layout.of(again).of_kind("fixed")
    assert not again.net.bert.embeddings.word_embeddings.weight.requires_grad


@pytest.mark.parametrize("text", ["", "[1]", '{"hidden_size": 16, "num_attention_heads": 3}'])
def test_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DataError, match=r"the sizes in .*config\.json do not make an encoder: .*Download the file"):
        build_model("bert-scratch", path=str(tmp_path))


def test_folder_without_weights_says_what_to_put_there(tmp_path: Path) -> None:
    small(tmp_path).net.config.save_pretrained(tmp_path)
    with pytest.raises(
        DataError, match=r"no encoder could be loaded .*config\.json, vocab\.txt and model\.safetensors"
    ):
        build_model("bert", path=str(tmp_path))


def spoil_width(folder: Path) -> None:
    other = small(folder.parent / "wide", hidden_size=32, intermediate_size=128).net
    safetensors.save_file(other.state_dict(), folder / "model.safetensors", {"format": "pt"})


def spoil_layer(folder: Path) -> None:
    held = safetensors.load_file(folder / "model.safetensors")
    held = {name: value for name, value in held.items() if ".layer.1." not in name}
    safetensors.save_file(held, folder / "model.safetensors", {"format": "pt"})


def spoil_one(folder: Path) -> None:
    held = safetensors.load_file(folder / "model.safetensors")
    del held["bert.encoder.layer.1.output.dense.bias"]
    safetensors.save_file(held, folder / "model.safetensors", {"format": "pt"})


def spoil_names(folder: Path) -> None:
    safetensors.save_file({"foo": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})


def spoil_end(folder: Path) -> None:
    held = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(held[: len(held) // 2])


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (spoil_width, r"do not match its config\.json\. Missing or of another shape: bert\.embeddings"),
        (spoil_layer, r"encoder\.layer\.1\.attention.* and 14 more\."),
        (spoil_names, r"do not match its config\.json.*: bert\.embeddings"),
        (spoil_one, r"another shape: bert\.encoder\.layer\.1\.output\.dense\.bias\. Download"),
        (spoil_end, "no encoder could be loaded"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), "no encoder could be loaded"),
        (lambda folder: (folder / "config.json").unlink(), r"do not match its config\.json"),
    ],
)
def test_weights_that_do_not_fit_are_not_replaced_by_random_ones(
    tmp_path: Path, spoil: Callable[[Path], object], what: str
) -> None:
    folder = tmp_path / "bert"  # the name alone would tell the library what kind of model this is
    small(folder).net.save_pretrained(folder)
    spoil(folder)
    with pytest.raises(DataError, match=what) as error:
        build_model("bert", path=str(folder))
    assert str(folder) in str(error.value)


def test_encoder_without_classifier_and_with_old_names_loads(tmp_path: Path) -> None:
    """As bert-base-uncased is published: no classifier, gamma and beta for the norms."""
    first = small(tmp_path).net
    first.save_pretrained(tmp_path)
    old = {n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): v
           for n, v in first.state_dict().items() if "classifier" not in n and "pooler" not in n}  # fmt: skip
    safetensors.save_file(old, tmp_path / "model.safetensors", {"format": "pt"})
    again = build_model("bert", path=str(tmp_path)).net
    own = first.state_dict()
    assert all(torch.equal(p, own[n]) for n, p in again.state_dict().items() if "encoder" in n or "embeddings" in n)


def test_texts_must_fit_the_encoder(tmp_path: Path) -> None:
    small(tmp_path).net.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"vocab = 51: must be at least 0 and at most 50.* knows no more tokens"):
        build_model("bert", vocab=51, path=str(tmp_path))
