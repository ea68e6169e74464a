"""Augmentation: of training batches alone, drawn from torch's random state."""

from __future__ import annotations

import math

import pytest
import torch

from flwr_regs.experiments.data import augment


def test_a_crop_is_a_part_and_every_place_is_drawn() -> None:
    torch.manual_seed(0)
    x = torch.arange(6.0 * 5).reshape(1, 1, 6, 5).expand(2000, 2, 6, 5)
    got = augment.cropped(x, 4, 3)
    corners = got[:, 0, 0, 0]
    places = [r * 5.0 + c for r in range(3) for c in range(3)]
    drawn, counts = corners.unique(return_counts=True)
    assert drawn.tolist() == places
    assert counts.min() > 150  # of 222 expected
    offset = torch.arange(4.0)[:, None] * 5 + torch.arange(3.0)
    assert torch.equal(got, (corners[:, None, None] + offset)[:, None].expand(2000, 2, 4, 3))


def test_the_middle_of_a_picture_is_standardised_by_itself() -> None:
    x = torch.rand(3, 3, 32, 32) * 255
    got = augment.AUGMENTATIONS["crop-24"].test(x)
    part = x[:, :, 4:28, 4:28]
    want = (part - part.mean((1, 2, 3), keepdim=True)) / part.std(
        (1, 2, 3), correction=0, keepdim=True
    )
    torch.testing.assert_close(got, want)
    plain = augment.by_picture(torch.full((1, 3, 4, 4), 7.0))  # no deviation: 1 / sqrt(n) instead
    assert torch.equal(plain, torch.zeros(1, 3, 4, 4))
    dark = torch.zeros(1, 3, 4, 4)
    dark[0, 0, 0, 0] = 0.048
    torch.testing.assert_close(augment.by_picture(dark), (dark - 0.001) * 48**0.5)


def test_rotation_is_about_the_middle_by_up_to_30_degrees() -> None:
    torch.manual_seed(0)
    x = torch.zeros(300, 1, 41, 61)  # a point 16 pixels above the middle
    x[:, :, 4, 30] = 1
    x[:, :, 20, 30] = 2
    got = augment.rotated(x)
    assert (got[:, 0, 20, 30] == 2).all()
    angles = []
    for picture in got[:, 0]:
        for row, column in (picture == 1).nonzero().tolist():
            angles.append(math.degrees(math.atan2(column - 30, 20 - row)))
            assert math.hypot(column - 30, row - 20) == pytest.approx(16, abs=1)
    assert -33 < min(angles) < -25
    assert 25 < max(angles) < 33


def test_a_cut_is_scaled_to_the_old_size_and_stays_within_the_picture() -> None:
    torch.manual_seed(0)
    ramp = torch.linspace(0, 1, 32).expand(400, 1, 32, 32).contiguous()
    got = augment.cut(ramp)
    assert got.shape == ramp.shape
    assert got.min() >= 0
    assert got.max() <= 1
    widths = (got[:, 0, 0, -1] - got[:, 0, 0, 0]) * 32 / 31
    assert widths.min() < 0.35  # of 5 % of the area: 0.19 to 0.26
    assert widths.max() > 0.9
    assert (got.diff(dim=3) >= -1e-6).all()  # never mirrored
    torch.manual_seed(0)
    both = torch.stack([ramp[:, 0], ramp[:, 0].mT], dim=1)
    across, down = augment.cut(both).unbind(1)
    steps = across.diff(dim=2)[:, 0, 3:-3], down.diff(dim=1)[:, 3:-3, 0]
    width, height = (31 * step.mean(1) for step in steps)
    for step in steps:  # the border has no more than half a pixel
        torch.testing.assert_close(step.amin(1), step.amax(1), rtol=0, atol=1e-5)
    free = (width < 0.97) & (height < 0.97)
    area, ratio = (width * height)[free], (width / height)[free]
    assert 0.045 < area.min() < 0.1
    assert 0.74 < ratio.min() < 0.78
    assert 1.28 < ratio.max() < 1.35
    assert abs(area.mean() - 0.5) < 0.07


@pytest.mark.parametrize("name", augment.AUGMENTATIONS)
def test_equal_random_states_give_equal_batches(name: str) -> None:
    pictures = torch.rand(20, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    data = augment.Augmented(name, pictures, torch.arange(20))
    batches = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        batches.append(data[[2, 5, 7]])
    assert all(labels.tolist() == [2, 5, 7] for _, labels in batches)
    first, again, other = (x for x, _ in batches)
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (name == "")
