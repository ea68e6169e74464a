"""Augmentation: of training batches alone, drawn from torch's random state."""

from __future__ import annotations

import math

import pytest
import torch

from flwr_regs.experiments.data import augment


def test_a_crop_is_a_part_and_every_place_is_drawn() -> None:
    torch.manual_seed(0)
    x = torch.arange(6.0 * 5).reshape(1, 1, 6, 5).expand(2000, 2, 6, 5)
    crops = augment.cropped(x, 4, 3)
    corners = crops[:, 0, 0, 0]
    drawn, counts = corners.unique(return_counts=True)
    assert drawn.tolist() == [r * 5.0 + c for r in range(3) for c in range(3)]
    assert counts.min() > 150  # of 222 expected
    offset = torch.arange(4.0)[:, None] * 5 + torch.arange(3.0)
    assert torch.equal(crops, (corners[:, None, None] + offset)[:, None].expand(2000, 2, 4, 3))


def test_the_middle_of_a_picture_is_standardised_by_itself() -> None:
    x = torch.rand(3, 3, 32, 32) * 255
    part = x[:, :, 4:28, 4:28].flatten(1)
    want = (part - part.mean(1, keepdim=True)) / part.std(1, correction=0, keepdim=True)
    torch.testing.assert_close(augment.AUGMENTATIONS["crop-24"].test(x).flatten(1), want)
    dark = torch.zeros(1, 3, 4, 4)  # hardly any deviation: 1 / sqrt(n) instead
    dark[0, 0, 0, 0] = 0.048
    torch.testing.assert_close(augment.by_picture(dark), (dark - 0.001) * 48**0.5)


def test_rotation_is_about_the_middle_by_up_to_30_degrees() -> None:
    torch.manual_seed(0)
    x = torch.zeros(300, 1, 41, 61)  # a point 16 pixels above the middle
    x[:, :, 4, 30] = 1
    x[:, :, 20, 30] = 2
    rotated = augment.rotated(x)
    assert (rotated[:, 0, 20, 30] == 2).all()
    points = [(column - 30, 20 - row) for *_, row, column in (rotated == 1).nonzero().tolist()]
    assert [math.hypot(*point) for point in points] == pytest.approx([16] * len(points), abs=1)
    angles = [math.degrees(math.atan2(*point)) for point in points]
    assert -33 < min(angles) < -25
    assert 25 < max(angles) < 33


def test_a_cut_is_scaled_to_the_old_size_and_stays_within_the_picture() -> None:
    torch.manual_seed(0)
    ramp = torch.linspace(0, 1, 32).expand(400, 32, 32)
    cuts = augment.cut(torch.stack([ramp, ramp.mT], dim=1))
    assert cuts.shape == (400, 2, 32, 32)
    assert cuts.min() >= 0
    assert cuts.max() <= 1
    steps = cuts[:, 0].diff(dim=2)[:, 0, 3:-3], cuts[:, 1].diff(dim=1)[:, 3:-3, 0]
    for step in steps:  # the border has no more than half a pixel
        torch.testing.assert_close(step.amin(1), step.amax(1), rtol=0, atol=1e-5)
    width, height = (31 * step.mean(1) for step in steps)
    assert min(width.min(), height.min()) > 0  # never mirrored
    free = (width < 0.97) & (height < 0.97)
    area, ratio = (width * height)[free], (width / height)[free]
    assert 0.045 < area.min() < 0.1
    assert 0.74 < ratio.min() < 0.78
    assert 1.28 < ratio.max() < 1.35
    assert abs(area.mean() - 0.5) < 0.07


def test_equal_random_states_give_equal_batches() -> None:
    pictures = torch.rand(20, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in augment.AUGMENTATIONS:
        data = augment.Augmented(name, pictures, torch.arange(20))
        batches = []
        for seed in (3, 3, 4):
            torch.manual_seed(seed)
            inputs, labels = data[[2, 5, 7]]
            assert labels.tolist() == [2, 5, 7]
            batches.append(inputs)
        assert torch.equal(batches[0], batches[1])
        assert torch.equal(batches[0], batches[2]) == (name == "")
