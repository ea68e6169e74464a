"""Pictures: each format gives the pixels and labels that were written, normalised as documented."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets as torchvisions

from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.data.sources import pictures
from tests.experiments.data.sources import made


def pixels(packed: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(packed)))


def test_fashion_mnist_is_standardised(tmp_path: Path) -> None:
    made.idx(tmp_path, "FashionMNIST", ("train", "t10k"))
    raw = (tmp_path / "FashionMNIST/raw/t10k-images-idx3-ubyte").read_bytes()
    want = np.frombuffer(raw[16:], np.uint8).reshape(10, 1, 28, 28) / 255
    got = data.load("fashion-mnist", str(tmp_path))
    np.testing.assert_allclose(got.test_x, (want - 0.2860) / 0.3530, rtol=1e-5, atol=1e-6)
    assert got.test_y.tolist() == list(range(10))


def test_emnist_is_upright_and_its_letters_begin_at_0(tmp_path: Path) -> None:
    made.idx(tmp_path, "EMNIST", ("emnist-letters-train", "emnist-letters-test"), 26, first=1)
    raw = (tmp_path / "EMNIST/raw/emnist-letters-test-images-idx3-ubyte").read_bytes()
    sideways = np.frombuffer(raw[16:], np.uint8).reshape(10, 28, 28)
    got = data.load("emnist(split='letters')", str(tmp_path))
    np.testing.assert_allclose(got.test_x[:, 0], sideways.swapaxes(1, 2) / 255, rtol=1e-6)
    assert got.test_y.tolist() == list(range(10))
    assert got.num_classes == 26


def test_cifar100_has_its_superclasses(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    made.cifar(tmp_path, 100)
    got = data.load("cifar100", str(tmp_path))
    assert got.coarse is not None
    # apple is fruit, aquarium_fish fish, beaver an aquatic mammal
    assert got.coarse[[0, 1, 4]].tolist() == [4, 1, 0]


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


class Hub(ModuleType):
    """What `datasets` offers, with tables that the test has written."""

    def __init__(self, folder: Path) -> None:
        super().__init__("datasets")
        self.folder, self.asked = folder, list[tuple[str, str]]()

    def load_dataset(self, name: str, split: str) -> Any:
        from pyarrow import parquet

        self.asked.append((name, split))
        (file,) = self.folder.glob(f"**/{split}*.parquet")

        class Loaded:
            to_pandas = staticmethod(parquet.read_table(file).to_pandas)

        return Loaded


def test_the_hub_gives_what_its_files_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    made.cifar(tmp_path, 100)
    hub = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    got, want = (data.load(f"cifar100({a})", str(tmp_path)) for a in ("hub=True", ""))
    np.testing.assert_array_equal(got.train_x, want.train_x)
    np.testing.assert_array_equal(got.test_y, want.test_y)
    assert hub.asked == [("uoft-cs/cifar100", "train"), ("uoft-cs/cifar100", "test")]


def test_without_flwr_datasets_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ImportError, match=r'needs flwr-datasets: pip install "flwr-datasets\[vision\]"'
    ):
        data.load("cifar10(hub=True)")


def test_a_table_without_labels_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for part in ("train", "test"):
        made.parquet(tmp_path / f"{part}.parquet", image=[made.png(32, 32)], class_=[0])
    with pytest.raises(ValueError, match="the columns image, class_; expected label or fine_label"):
        data.load("cifar10", str(tmp_path))


@pytest.mark.parametrize(("arguments", "channels"), [("size=16", 3), ("size=20, grey=True", 1)])
def test_a_folder_of_pictures(arguments: str, channels: int, tmp_path: Path) -> None:
    made.image_folder(tmp_path)
    got = data.load(f"image-folder({arguments})", str(tmp_path))
    assert got.train_y.tolist() == [0, 0, 0, 1, 1, 1]  # cat, dog
    assert got.train_x.shape[1] == channels
    assert 0 <= got.train_x.min() < got.train_x.max() <= 1
    assert got.groups is None


def test_a_folder_of_clients_pictures(tmp_path: Path) -> None:
    made.image_folder(tmp_path, groups=True)
    got = data.load("image-folder(groups=True, size=8)", str(tmp_path))
    assert got.groups is not None
    assert got.groups.tolist() == [0] * 6 + [1] * 6  # ann, bob
    assert got.train_y.tolist() == [0, 0, 0, 1, 1, 1] * 2
