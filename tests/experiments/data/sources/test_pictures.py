"""Pictures: each format gives the pixels and labels that were written, normalised as documented."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from torchvision import datasets as torchvisions

from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.data.sources import pictures
from tests.experiments.data.sources import made


def images_of(path: Path) -> np.ndarray:
    return np.frombuffer(path.read_bytes()[16:], np.uint8).reshape(-1, 28, 28) / 255


def test_fashion_mnist_is_standardised(tmp_path: Path) -> None:
    made.mnist(tmp_path, "FashionMNIST")
    want = images_of(tmp_path / "FashionMNIST/raw/t10k-images-idx3-ubyte")
    got = data.load("fashion-mnist", str(tmp_path))
    np.testing.assert_allclose(got.test_x[:, 0], (want - 0.2860) / 0.3530, rtol=1e-5, atol=1e-6)
    assert got.test_y.tolist() == list(range(10))


def test_emnist_is_upright_and_its_letters_begin_at_0(tmp_path: Path) -> None:
    made.emnist(tmp_path, "letters", 26, first=1)
    sideways = images_of(tmp_path / "EMNIST/raw/emnist-letters-test-images-idx3-ubyte")
    got = data.load("emnist(split='letters')", str(tmp_path))
    np.testing.assert_allclose(got.test_x[:, 0], sideways.swapaxes(1, 2), rtol=1e-6)
    assert got.test_y.tolist() == list(range(10))
    assert got.num_classes == 26


def test_torchvisions_raw_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = np.random.default_rng(0).integers(0, 256, (2, 3072), dtype=np.uint8)
    for name, _ in (*torchvisions.CIFAR10.train_list, *torchvisions.CIFAR10.test_list):
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [3, 4]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a"] * 10}))
    # the files' sums are torchvision's to check
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    got = data.load("cifar10(augment='')", str(tmp_path))
    mean, std = (np.array(of)[:, None, None] for of in pictures.CIFAR[10])
    want = (rows.reshape(2, 3, 32, 32) / 255 - mean) / std
    np.testing.assert_allclose(got.test_x, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.train_x, np.tile(want, (5, 1, 1, 1)), rtol=1e-4, atol=1e-5)
    assert got.train_y.tolist() == [3, 4] * 5


def test_the_hub_gives_what_its_files_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made.cifar(tmp_path, 100)

    def load_dataset(name: str, split: str) -> Any:
        (file,) = (tmp_path / "cifar100").glob(f"{split}*.parquet")
        assert name == "uoft-cs/cifar100"
        return SimpleNamespace(to_pandas=lambda: pd.read_parquet(file))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    got, want = (data.load(f"cifar100({a})", str(tmp_path)) for a in ("hub=True", ""))
    np.testing.assert_array_equal(got.train_x, want.train_x)
    np.testing.assert_array_equal(got.test_y, want.test_y)
    # apple is fruit, aquarium_fish fish, beaver an aquatic mammal
    assert got.coarse[[0, 1, 4]].tolist() == [4, 1, 0]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'flwr-datasets: pip install "flwr-datasets\[vision\]"'):
        data.load("cifar10(hub=True)")


def test_a_table_without_labels_is_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        made.parquet(tmp_path / f"{part}.parquet", image=[made.png(32, 32)], class_=[0])
    with pytest.raises(ValueError, match="the columns image, class_; expected label or fine_label"):
        data.load("cifar10", str(tmp_path))


@pytest.mark.parametrize("groups", [False, True])
def test_a_folder_of_pictures(groups: bool, tmp_path: Path) -> None:
    made.image_folder(tmp_path, groups)
    got = data.load(f"image-folder(size=8, grey={groups}, groups={groups})", str(tmp_path))
    assert got.train_y.tolist() == [0, 0, 0, 1, 1, 1] * (1 + groups)  # cat, dog
    assert got.train_x.shape[1:] == (1 if groups else 3, 8, 8)
    assert 0 <= got.train_x.min() < got.train_x.max() <= 1
    assert (got.groups.tolist() if groups else got.groups) == (
        [0] * 6 + [1] * 6 if groups else None  # ann, bob
    )
