"""What a card needs: files of its data sets, and whether they are there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from flwr_regs.experiments.data.sources.data_files import root
from flwr_regs.experiments.data.sources.readers import SOURCES, parsed

HASHES: dict[str, str] = {
    "digits": "497f557db34b9619",
    "digits-domains": "497f557db34b9619",  # each client makes its own domain of these
    "mnist": "316cc3db441172da",  # of the original files; the training images' MD5 is 6bbc9ace...
    "mnist-domains": "b2a0bcb1b26e3b91",
    "synthetic": "dc968f030161b028",
}
"""Data set -> the hash of the data that the package's cards were written with, where it is known.

The other data sets' original files were not at hand. The quadratics have none: their last bits are those of
the linear algebra library, and their arguments say all.
"""


def expected(dataset: str, own: Mapping[str, str]) -> str:
    """Return the hash that a data set should have: a card's `own`, or the package's; empty: not known."""
    return own.get(dataset, HASHES.get(dataset, ""))


def files(dataset: str) -> str:
    """Return in words which files a data set needs; empty: none, or it is a user's own."""
    if ":" in dataset or dataset.partition("(")[0] not in SOURCES:
        return ""
    words = parsed(dataset)[0].files
    return "" if words.startswith("none") else words


def present(dataset: str, data_dir: str = "") -> bool:
    """Return whether a data set's files seem to be in `data_dir`, by default in the cache.

    A user's own data set (``mine.py:load``) and what needs no files are always there.
    """
    patterns = re.findall(r"`([\w*/.-]*[*/.][\w*/.-]*)`", files(dataset))
    folder = root(data_dir)
    places = [folder, folder / dataset.partition("(")[0]]
    matches = (place.glob(p.rstrip("/")) for place in places for p in patterns)
    return not files(dataset) or any(next(each, None) for each in matches)
