"""Augmentations: keyed by position, blind to how an epoch is cut, whole pixels only."""

from __future__ import annotations

import pytest
import torch

from flashfl.core.rng import fold, hashes
from flashfl.data.augment import CropFlip, Normalise, Rotate
from flashfl.data.loaders.tinyimagenet import augment

ALL = {"crop-flip": CropFlip(), "rotate": Rotate(20.0), "both": augment}


def pictures(count: int = 40, side: int = 12) -> torch.Tensor:
    return torch.randint(1, 256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ALL)
def test_augmentation_depends_on_key_and_position_only(name: str) -> None:
    change, x = ALL[name], pictures()
    (whole,) = change((x,), 5, 100)
    parts = torch.cat([change((x[:7],), 5, 100)[0], change((x[7:],), 5, 107)[0]])
    assert torch.equal(whole, parts)
    assert whole.dtype == torch.uint8
    assert whole.shape == x.shape
    assert not torch.equal(whole, change((x,), 6, 100)[0])
    assert not torch.equal(whole, change((x,), 5, 101)[0])


def test_crop_flip_matches_reference_loop() -> None:
    x = pictures(60, 8)
    (out,) = CropFlip(padding=2)((x,), 3, 10)
    for i, word in enumerate(hashes(fold(3, "crop-flip"), 10, 70).tolist()):
        word &= 0xFFFFFFFF
        place = (word >> 1) * 25 >> 31
        padded = torch.zeros(3, 12, 12, dtype=torch.uint8)
        padded[:, 2:10, 2:10] = x[i]
        y0, x0 = divmod(place, 5)
        crop = padded[:, y0 : y0 + 8, x0 : x0 + 8]
        assert torch.equal(out[i], crop.flip(2) if word & 1 else crop)


def test_every_shift_and_both_mirrors_occur_about_equally() -> None:
    x = torch.zeros(9000, 1, 3, 3, dtype=torch.uint8)
    x[:, :, 1, 1] = 255
    (out,) = CropFlip(padding=1)((x,), 1, 0)
    places = out.flatten(1).argmax(1).bincount(minlength=9)
    assert places.min() > 850
    assert places.max() < 1150
    x[:] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    (out,) = CropFlip(padding=0)((x,), 1, 0)
    assert 4200 < out[:, 0, 0, 0].eq(3).sum() < 4800


def test_no_rotation_changes_nothing() -> None:
    for side in (7, 8):
        x = pictures(5, side)
        assert torch.equal(Rotate(0.0)((x,), 1, 0)[0], x)


def test_rotation_keeps_the_centre_and_blackens_corners() -> None:
    x = torch.full((64, 3, 32, 32), 200, dtype=torch.uint8)
    (out,) = Rotate(20.0)((x,), 1, 0)
    assert out[:, :, 12:20, 12:20].eq(200).all()
    assert out[:, :, 0, 0].eq(0).float().mean() > 0.5
    assert set(out.unique().tolist()) == {0, 200}


def test_rotation_turns_both_ways() -> None:
    x = torch.zeros(400, 1, 33, 33, dtype=torch.uint8)
    x[:, :, 16, 30] = 255
    (out,) = Rotate(20.0)((x,), 1, 0)
    rows = out[:, 0].amax(2).argmax(1)
    assert rows.min() < 13
    assert rows.max() > 19
    assert abs(rows[out[:, 0].flatten(1).amax(1) > 0].float().mean().item() - 16) < 0.7


def test_normalise() -> None:
    x = pictures()
    (out,) = Normalise((0.5, 0.4, 0.3), (0.2, 0.1, 0.3))((x,))
    assert out.dtype == torch.float32
    wanted = (x / 255.0 - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.2, 0.1, 0.3]).view(3, 1, 1)
    assert torch.allclose(out, wanted, atol=1e-5)


def test_other_inputs_pass_through() -> None:
    x, beside = pictures(3), torch.arange(3)
    assert CropFlip()((x, beside), 1, 0)[1] is beside
    assert Normalise((0.5,) * 3, (0.2,) * 3)((x, beside))[1] is beside


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ALL)
def test_augmentation_is_identical_on_gpu(name: str) -> None:
    x = pictures()
    norm = Normalise((0.5, 0.4, 0.3), (0.2, 0.1, 0.3))
    here = norm(ALL[name]((x,), 5, 100))[0]
    there = norm(ALL[name]((x.cuda(),), 5, 100))[0]
    assert torch.equal(here, there.cpu())
