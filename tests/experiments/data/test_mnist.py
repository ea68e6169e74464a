"""MNIST's folder: what is missing or incomplete is downloaded, and a failed download breaks nothing."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest
from torchvision.datasets import mnist as torchvisions

from flwr_regs.experiments.data import datasets as data
from tests.experiments.data.sources import made


@pytest.fixture
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four files in MNIST's format."""
    folder = tmp_path_factory.mktemp("web")
    made.mnist(folder)
    return folder / "MNIST" / "raw"


class Web:
    """What torchvision downloads with: the files of a server, or the error of a failed connection."""

    def __init__(self, original: Path) -> None:
        self.original = original
        self.error: BaseException | None = None
        self.asked: list[str] = []

    def __call__(self, url: str, download_root: str, filename: str, md5: str) -> None:
        packed, target = Path(download_root, filename), Path(download_root, filename[:-3])
        if packed.is_file():  # as torchvision: it unpacks it
            target.write_bytes(gzip.decompress(packed.read_bytes()))
            return
        self.asked.append(target.name)
        if self.error and len(self.asked) > 2:
            target.write_bytes(b"half of it")
            raise self.error
        shutil.copy(self.original / target.name, target)


@pytest.fixture(autouse=True)
def web(monkeypatch: pytest.MonkeyPatch, original: Path) -> Web:
    data.load.cache_clear()
    made_web = Web(original)
    monkeypatch.setattr(torchvisions, "download_and_extract_archive", made_web)
    return made_web


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    return folder


def assert_read(root: Path) -> None:
    got = data.load("mnist", str(root))
    assert (got.train_x.shape, got.test_x.shape) == ((30, 1, 28, 28), (10, 1, 28, 28))
    assert got.num_classes == 10
    assert {p.name for p in root.iterdir()} == {"MNIST"}  # no temporary folder is left


def test_files_that_are_there_are_not_downloaded_and_packed_ones_unpacked(
    tmp_path: Path, web: Web, raw: Path
) -> None:
    for file in web.original.iterdir():
        (raw / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    assert_read(tmp_path)
    data.load.cache_clear()
    assert_read(tmp_path)
    assert not web.asked


IMAGES = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    "broken",
    [
        lambda raw: shutil.rmtree(raw),
        lambda raw: (raw / IMAGES).write_bytes((raw / IMAGES).read_bytes()[:-1]),
        lambda raw: (raw / IMAGES).write_bytes(b"<html>not found</html>"),
        lambda raw: (raw / "t10k-labels-idx1-ubyte").unlink(),
    ],
    ids=["empty", "cut", "a page", "one is missing"],
)
def test_what_is_missing_or_incomplete_is_downloaded(
    broken: Any, tmp_path: Path, web: Web, raw: Path
) -> None:
    shutil.copytree(web.original, raw, dirs_exist_ok=True)
    broken(raw)
    assert_read(tmp_path)
    assert {*web.asked} == {file.name for file in web.original.iterdir()}


@pytest.mark.parametrize("error", [RuntimeError("no route\nto host"), KeyboardInterrupt()])
def test_a_failed_download_leaves_nothing_behind_and_the_next_run_tries_again(
    error: BaseException, tmp_path: Path, web: Web, raw: Path
) -> None:
    (raw / IMAGES).write_bytes(b"kept")
    web.error = error
    with pytest.raises((OSError, KeyboardInterrupt)) as caught:
        data.load("mnist", str(tmp_path))
    if isinstance(caught.value, OSError):
        said = str(caught.value)
        assert f"not in {tmp_path}, and the download failed (Error downloading " in said
        assert "\n" not in said
    assert (raw / IMAGES).read_bytes() == b"kept"
    assert {p.name for p in tmp_path.iterdir()} == {"MNIST"}
    web.error = None
    assert_read(tmp_path)
