"""What a card needs: files of its data sets, and whether they are there."""

from __future__ import annotations

import re
from collections.abc import Mapping

from flwr_regs.experiments.data.catalogue import SOURCES
from flwr_regs.experiments.data.sources.data_files import root


def expected(dataset: str, own: Mapping[str, str]) -> str:
    """Return the hash that a data set should have: a card's `own`, or the package's; empty: not known."""
    known = SOURCES[dataset].hash if dataset in SOURCES else ""
    return own.get(dataset, known)


def files(dataset: str) -> str:
    """Return in words which files a data set needs; empty: none, or it is a user's own."""
    source = SOURCES.get(dataset.partition("(")[0])
    return "" if source is None or source.files.startswith("none") else source.files


def present(dataset: str, data_dir: str = "") -> bool:
    """Return whether a data set's files seem to be in `data_dir`, by default in the cache.

    A user's own data set (``mine.py:load``) and what needs no files are always there.
    """
    patterns = re.findall(r"`([\w*/.-]*[*/.][\w*/.-]*)`", files(dataset))
    folder = root(data_dir)
    places = [folder, folder / dataset.partition("(")[0]]
    matches = (place.glob(p.rstrip("/")) for place in places for p in patterns)
    return not files(dataset) or any(next(each, None) for each in matches)
