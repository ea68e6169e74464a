"""MNIST's folder: what is missing or incomplete is downloaded, and a failed download breaks nothing."""

import gzip
import shutil
from pathlib import Path
from typing import Any

import pytest
from torchvision.datasets import mnist as torchvisions

from flwr_regs.experiments.data import datasets as data
from tests.experiments.data.sources.made import Files

IMAGES = "train-images-idx3-ubyte"


class Web:
    """What torchvision downloads with: the files of a server, or the error of a failed connection."""

    def __init__(self, folder: Path) -> None:
        Files(folder).idx()
        self.original = folder / "MNIST" / "raw"
        self.error: BaseException | None = None
        self.asked: set[str] = set()

    def __call__(self, url: str, download_root: str, filename: str, md5: str) -> None:
        packed, target = Path(download_root, filename), Path(download_root, filename[:-3])
        if packed.is_file():  # as torchvision: it unpacks it
            target.write_bytes(gzip.decompress(packed.read_bytes()))
            return
        self.asked.add(target.name)
        if self.error and len(self.asked) > 2:
            target.write_bytes(b"half of it")
            raise self.error
        shutil.copy(self.original / target.name, target)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Web:
    made = Web(tmp_path_factory.mktemp("web"))
    monkeypatch.setattr(torchvisions, "download_and_extract_archive", made)
    return made


def assert_read(root: Path) -> None:
    data.load.cache_clear()
    got = data.load("mnist", str(root))
    assert (got.train_x.shape, got.test_x.shape) == ((30, 1, 28, 28), (10, 1, 28, 28))
    assert {p.name for p in root.iterdir()} == {"MNIST"}  # no temporary folder is left


@pytest.mark.parametrize(
    ("change", "downloaded"),
    [
        (lambda raw: None, False),
        (lambda raw: [pack(file) for file in [*raw.iterdir()]], False),
        (lambda raw: shutil.rmtree(raw), True),
        (lambda raw: (raw / IMAGES).write_bytes((raw / IMAGES).read_bytes()[:-1]), True),
        (lambda raw: (raw / IMAGES).write_bytes(b"<html>not found</html>"), True),
        (lambda raw: (raw / "t10k-labels-idx1-ubyte").unlink(), True),
    ],
    ids=["whole", "packed", "empty", "cut", "a page", "one is missing"],
)
def test_what_is_missing_or_incomplete_is_downloaded(
    change: Any, downloaded: bool, tmp_path: Path, web: Web
) -> None:
    raw = tmp_path / "MNIST" / "raw"
    shutil.copytree(web.original, raw)
    change(raw)
    assert_read(tmp_path)
    assert_read(tmp_path)
    assert web.asked == ({file.name for file in web.original.iterdir()} if downloaded else set())


def pack(file: Path) -> None:
    file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()


@pytest.mark.parametrize("error", [RuntimeError("no route\nto host"), KeyboardInterrupt()])
def test_a_failed_download_leaves_nothing_behind_and_the_next_run_tries_again(
    error: BaseException, tmp_path: Path, web: Web
) -> None:
    kept = tmp_path / "MNIST" / "raw" / IMAGES
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"kept")
    web.error = error
    with pytest.raises((OSError, KeyboardInterrupt)) as caught:
        data.load("mnist", str(tmp_path))
    said = str(caught.value)
    why = f"{kept}: AssertionError; expected a whole idx file, and the download failed: Error "
    assert not said or why in said
    assert "\n" not in said
    assert kept.read_bytes() == b"kept"
    assert {p.name for p in tmp_path.iterdir()} == {"MNIST"}
    web.error = None
    assert_read(tmp_path)
