"""Augmentation: of training batches alone, drawn from seed, client and round, the same in all runners."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from flwr_regs import FedAvg, FedAvgClient, InProcessGrid, client_app
from flwr_regs.experiments.data import augment
from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.settings import Settings
from tests.experiments.data.sources import made
from tests.experiments.runs import examples_of

PICTURES = torch.rand(64, 3, 12, 10, generator=torch.Generator().manual_seed(0))


def test_a_crop_is_a_part_and_every_place_is_drawn() -> None:
    torch.manual_seed(0)
    x = torch.arange(6.0 * 5).reshape(1, 1, 6, 5).expand(2000, 2, 6, 5)
    got = augment.cropped(x, 4, 3)
    corners = got[:, 0, 0, 0]
    places = [r * 5.0 + c for r in range(3) for c in range(3)]
    found, counts = corners.unique(return_counts=True)
    assert found.tolist() == places
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


def settings(**given: Any) -> Settings:
    common = {
        "dataset": "cifar10",
        "methods": "FedAvg",
        "num-clients": 2,
        "partition": "iid",
        "model": "mlp",
    }
    return Settings.of({**common, **given})


@pytest.fixture
def cifar(tmp_path: Path) -> str:
    pytest.importorskip("pyarrow")
    made.cifar(tmp_path, 10)
    data.load.cache_clear()
    return str(tmp_path)


def test_held_out_examples_are_not_augmented(cifar: str) -> None:
    name = "crop-24"
    job = settings(
        **{"dataset": f"cifar10(augment='{name}')", "data-dir": cifar, "held-out-share": 0.4}
    )
    train, held_out = examples_of(job, 0)
    assert held_out is not None
    assert isinstance(train, augment.Augmented)
    assert not isinstance(held_out, augment.Augmented)
    whole = data.load(job.dataset, cifar)
    shared = client_data_of(job)
    rows, _ = shared.split(shared.parts[0])
    want = augment.AUGMENTATIONS[name].test(torch.from_numpy(whole.train_x[rows]))
    assert torch.equal(held_out.tensors[0], want)
    first, again = train[[0, 1]][0], train[[0, 1]][0]
    assert first.shape[1:] == want.shape[1:]
    assert not torch.equal(first, again)  # drawn anew for each batch
    assert torch.equal(train[[0, 1]][1], train.tensors[1][:2])  # the labels stay


def trained(name: str) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(3, 12, 3, 8, 8, generator=generator)
    y = torch.randint(4, (3, 12), generator=generator)

    def client_fn(context: Any) -> Any:
        pid = int(context.node_config["partition-id"])
        torch.manual_seed(99)  # torch's state before a round does not matter
        torch.rand(int(np.random.default_rng().integers(9)))
        rows = augment.Augmented(name, x[pid], y[pid])
        sampler = torch.utils.data.BatchSampler(
            torch.utils.data.RandomSampler(rows), 5, drop_last=False
        )
        loader = torch.utils.data.DataLoader(rows, batch_size=None, sampler=sampler)
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4))
        return FedAvgClient(model, loader)

    torch.manual_seed(1)
    start = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)).state_dict()
    result = FedAvg(fraction_evaluate=0.0, seed=3).start(
        grid=InProcessGrid(client_app(client_fn), 3),
        initial_arrays=ArrayRecord(start),
        num_rounds=2,
        train_config=ConfigRecord({"lr": 0.1, "local-epochs": 2}),
    )
    return result.arrays.to_numpy_ndarrays()


def test_two_runs_are_equal_to_the_bit() -> None:
    first, again, plain = (trained(name) for name in ("crop-flip", "crop-flip", ""))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(first, plain, strict=True))
