"""The four files of MNIST or Fashion-MNIST: read from a folder, or downloaded into it."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)


def read(data_dir: str, kind: str = "MNIST") -> list[Any]:
    """Return training images, labels, test images and labels, uint8 and int64 arrays.

    They are read from ``MNIST/raw`` in `data_dir` (default ``~/.cache/flwr_regs``), or from the folder of
    another `kind` of the same format, such as ``FashionMNIST/raw``. If a file is missing or incomplete,
    all are downloaded: into a temporary folder, from which they move when they are complete. A compressed
    file (``.gz``) that is there already is not downloaded again.

    Raises
    ------
    ImportError
        torchvision is not installed.
    OSError
        The files are not there, and none can be downloaded.
    """
    from torchvision import datasets

    made = getattr(datasets, kind)
    root = Path(data_dir or "~/.cache/flwr_regs").expanduser()
    raw = root / kind / "raw"
    if not _complete(raw):
        try:
            _download(root, made)
        except Exception as error:  # of torchvision, urllib, gzip or the disk
            why = next(iter(str(error).splitlines()), "").rstrip(": ") or type(error).__name__
            raise OSError(
                f"there is no complete {kind} in {raw}, and the download failed ({why}): put its files "
                f"{', '.join(FILES)} there, set data-dir to a folder that has them in {kind}/raw, or try "
                "again"
            ) from error
    parts: list[Any] = [made(root, train=t) for t in (True, False)]
    return [array for part in parts for array in (part.data.numpy(), part.targets.numpy())]


def _complete(raw: Path) -> bool:
    return all(_is_whole(raw / name) for name in FILES)


def _is_whole(path: Path) -> bool:
    """Return whether a file is in the idx format and as long as its header says."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08" or head[3] not in (1, 3):
            return False
        sizes = file.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        return False
    expected = 4 + len(sizes) + int(np.prod(struct.unpack(f">{head[3]}I", sizes), dtype=np.int64))
    return path.stat().st_size == expected


def _download(root: Path, kind: Any) -> None:
    raw = root / kind.__name__ / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix="MNIST-") as made:
        new = Path(made, kind.__name__, "raw")
        new.mkdir(parents=True)
        for packed in raw.glob("*.gz"):  # torchvision checks it, and only unpacks it
            shutil.copy(packed, new)
        kind(made, download=True)
        if not _complete(new):
            raise OSError("the files that came are not complete")
        for name in FILES:
            os.replace(new / name, raw / name)
