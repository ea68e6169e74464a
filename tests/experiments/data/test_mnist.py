"""MNIST's folder: what is missing or incomplete is downloaded, and a failed download breaks nothing."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import mnist as torchvisions

from flwr_regs.experiments.data import datasets as data


def contents() -> dict[str, bytes]:
    """The four files in MNIST's format, with 30 and 10 images."""
    rng, files = np.random.default_rng(0), {}
    for part, count in (("train", 30), ("t10k", 10)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        head = struct.pack(">HBB3I", 0, 8, 3, count, 28, 28)
        files[f"{part}-images-idx3-ubyte"] = head + images.tobytes()
        labels = np.arange(count, dtype=np.uint8) % 10
        files[f"{part}-labels-idx1-ubyte"] = struct.pack(">HBBI", 0, 8, 1, count) + labels.tobytes()
    return files


class Web:
    """What torchvision downloads with: the files of a server, or the error of a failed connection."""

    def __init__(self, error: BaseException | None = None, stop_after: int = 0) -> None:
        self.error, self.stop_after = error, stop_after
        self.asked: list[str] = []

    def __call__(self, url: str, download_root: str, filename: str, md5: str) -> None:
        name, packed = filename.removesuffix(".gz"), Path(download_root, filename)
        if packed.is_file():  # as torchvision: it unpacks it
            Path(download_root, name).write_bytes(gzip.decompress(packed.read_bytes()))
            return
        self.asked.append(name)
        if self.error and len(self.asked) > self.stop_after:
            Path(download_root, name).write_bytes(b"half of it")
            raise self.error
        Path(download_root, name).write_bytes(contents()[name])


@pytest.fixture(autouse=True)
def web(monkeypatch: pytest.MonkeyPatch) -> Web:
    data.load.cache_clear()
    return connect(monkeypatch, Web())


def connect(monkeypatch: pytest.MonkeyPatch, web: Web) -> Web:
    monkeypatch.setattr(torchvisions, "download_and_extract_archive", web)
    return web


def raw(root: Path) -> Path:
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fill(folder: Path, **changed: bytes) -> None:
    for name, content in contents().items():
        (folder / name).write_bytes(changed.get(name[:5], content))


def assert_read(root: Path) -> None:
    got = data.load("mnist", str(root))
    assert (got.train_x.shape, got.test_x.shape) == ((30, 1, 28, 28), (10, 1, 28, 28))
    assert got.num_classes == 10
    assert {p.name for p in root.iterdir()} == {"MNIST"}  # no temporary folder is left


def test_files_that_are_there_are_not_downloaded(tmp_path: Path, web: Web) -> None:
    fill(raw(tmp_path))
    assert_read(tmp_path)
    assert not web.asked


@pytest.mark.parametrize(
    "broken",
    [
        lambda folder: None,
        lambda folder: fill(folder, train=b""),
        lambda folder: fill(folder, train=contents()["train-images-idx3-ubyte"][:-1]),
        lambda folder: fill(folder, train=b"<html>not found</html>"),
        lambda folder: (fill(folder), (folder / "t10k-labels-idx1-ubyte").unlink()),
    ],
    ids=["empty", "a file of length 0", "cut", "a page", "one is missing"],
)
def test_what_is_missing_or_incomplete_is_downloaded(broken: Any, tmp_path: Path, web: Web) -> None:
    broken(raw(tmp_path))
    assert_read(tmp_path)
    assert set(web.asked) == {*contents()}
    data.load.cache_clear()
    assert_read(tmp_path)
    assert len(web.asked) == 4


def test_packed_files_are_unpacked_without_a_download(tmp_path: Path, web: Web) -> None:
    for name, content in contents().items():
        (raw(tmp_path) / f"{name}.gz").write_bytes(gzip.compress(content))
    assert_read(tmp_path)
    assert not web.asked


@pytest.mark.parametrize(
    "error", [RuntimeError("no route\nto host"), EOFError(), KeyboardInterrupt()]
)
def test_a_failed_download_leaves_nothing_behind_and_the_next_run_tries_again(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(raw(tmp_path), train=b"kept")
    connect(monkeypatch, Web(error, stop_after=2))
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else OSError
    with pytest.raises(expected) as caught:
        data.load("mnist", str(tmp_path))
    if expected is OSError:
        said = str(caught.value)
        assert "set data-dir to a folder that has them" in said
        assert str(tmp_path) in said
        assert "\n" not in said
    assert (raw(tmp_path) / "train-images-idx3-ubyte").read_bytes() == b"kept"
    assert {p.name for p in tmp_path.iterdir()} == {"MNIST"}
    connect(monkeypatch, Web())
    assert_read(tmp_path)
