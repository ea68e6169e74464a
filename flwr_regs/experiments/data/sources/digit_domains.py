"""Three data sets in domains, as FedBN ships them (Li et al. 2021); a group is a domain.

They are those of github.com/med-air/FedBN. The lists and the digits are pickles, which are read without
executing what they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources import pickles
from flwr_regs.experiments.data.sources.data_files import Array, Parts

Names = Sequence[str]
PARTS_OF_DIGITS = 10


def digits_five(data_dir: str, domains: Names, share: float) -> Parts:
    """Return five sets of real digits, 28 x 28 in colour, in [-1, 1]; groups are the domains.

    As FedBN's ``fed_digits.py``: the first `share`, in tenths, of the 7,438 training images that each
    domain has in ``DOMAIN/partitions/train_part*.pkl``, and all of ``DOMAIN/test.pkl``.
    """
    tenths = round(share * PARTS_OF_DIGITS)
    if not 1 <= tenths <= PARTS_OF_DIGITS:
        raise ValueError(f"share must be from 0.1 to 1, not {share}")
    parts = [*(f"partitions/train_part{k}.pkl" for k in range(tenths)), "test.pkl"]
    names = [f"{domain}/{part}" for domain in domains for part in parts]
    found = files.one_of_each(data_dir, ("", "digit_dataset", "data"), *names)
    paths = np.reshape(np.array(found, object), (len(domains), len(parts)))

    def read(paths: Sequence[Path]) -> tuple[Array, Array]:
        images, labels = zip(*map(_digits, paths), strict=True)
        return np.concatenate(images), np.concatenate(labels)

    return files.by_group(dict(enumerate(paths[:, :-1])), dict(enumerate(paths[:, -1:])), read)


def _digits(path: Path) -> tuple[Array, Array]:
    """Return the images of a pickle (images, labels) in [-1, 1]."""
    images, labels = _pair(path)
    if images.ndim not in (3, 4) or images.dtype != np.uint8:
        has = f"{path} has images of shape {images.shape} and type {images.dtype}"
        raise ValueError(f"{has}; expected bytes of shape (n, height, width[, 3])")
    whole = labels.reshape(-1).astype(np.int64)
    if (whole != labels.reshape(-1)).any():
        raise ValueError(f"{path} has labels that are no whole numbers")
    return files.pictures(images, "RGB", 28) * 2 - 1, whole


def listed(
    data_dir: str, within: str, domains: Names, classes: Names, share: float, size: int
) -> Parts:
    """Return Office-Caltech10 or ten classes of DomainNet in [0, 1]; groups are the domains.

    As FedBN's ``fed_office.py`` and ``fed_domainnet.py``, from ``WITHIN/DOMAIN_train.pkl`` and
    ``…_test.pkl``, each (paths, class names): scaled to 256 x 256; of each domain, as many training images
    as `share` of those of the smallest one, from the first on; all test images. Training batches are
    flipped and rotated by up to 30 degrees. A test image of 256 x 256 takes 0.8 MB.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share}")
    needed = [f"{within}/{domain}_{part}.pkl" for domain in domains for part in ("train", "test")]
    found = files.one_of_each(data_dir, ("", "data", ".."), *needed)
    folder, pairs = found[0].parents[1], [*map(_pair, found)]
    fewest = int(min(len(paths) for paths, _ in pairs[::2]) * share)
    if fewest == 0:
        raise ValueError(f"share={share} of the smallest domain's training images is none")
    train = [(paths[:fewest], names[:fewest]) for paths, names in pairs[::2]]

    def read(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        if unknown := sorted({*map(str, pair[1])} - {*classes}):
            expected = f"expected {', '.join(classes)}"
            raise ValueError(f"a list of {within} has the class '{unknown[0]}'; {expected}")
        where = [files.inside(folder, str(path)) for path in pair[0]]
        labels = np.array([classes.index(str(label)) for label in pair[1]])
        return files.pictures(where, "RGB", size), labels

    groups = dict(enumerate(train)), dict(enumerate(pairs[1::2]))
    return {**files.by_group(*groups, read), "augment": "flip-rotate"}


def _pair(path: Path) -> tuple[Any, Any]:
    """Return the two arrays of a pickle, of the same length."""
    pair = pickles.read(path)
    with files.reading(path, "two arrays of the same length"):
        first, last = map(np.asarray, pair)
        if len(first) != len(last):
            raise ValueError(f"they have {len(first)} and {len(last)} entries")
    return first, last
