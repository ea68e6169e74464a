"""All data sets: what a reader returns is what the catalogue promises, and errors say what to do."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from flwr_regs.experiments.data import catalogue
from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.data.augment import AUGMENTATIONS
from flwr_regs.experiments.data.losses import LOSSES
from flwr_regs.experiments.models import models
from tests.experiments.data.sources.made import MADE, NEEDS

DOCS = Path(__file__).parents[4] / "docs"


def written(dataset: str, folder: Path) -> str:
    """Write a data set's records and return their folder; skip where a package is missing."""
    if need := NEEDS.get(dataset.partition("(")[0]):
        pytest.importorskip(need)
    MADE[dataset](folder)
    return str(folder)


@pytest.mark.parametrize("dataset", MADE)
def test_a_reader_returns_what_the_catalogue_promises(dataset: str, tmp_path: Path) -> None:
    got = data.load(dataset, written(dataset, tmp_path))
    kind, n = catalogue.kind_of(dataset), len(got.train_y)
    assert got.test_x.shape == (len(got.test_y), *kind.shape)
    assert len(got.train_x) == n
    assert got.train_x.dtype == got.test_x.dtype == (np.int32 if kind.tokens else np.float32)
    assert got.train_y.dtype == got.test_y.dtype == np.int64
    assert got.train_y.min() >= 0
    assert got.num_classes <= kind.classes
    if kind.tokens:
        assert 0 <= got.train_x.min() <= got.train_x.max() < kind.tokens
    else:
        assert np.isfinite(got.train_x).all()
        assert np.isfinite(got.test_x).all()
    zeros, classes = data.two_examples(dataset, str(tmp_path))
    assert zeros.shape == (2, *kind.shape)
    assert (zeros.dtype, classes) == (got.test_x.dtype, kind.classes)
    change = AUGMENTATIONS[got.augment]
    batch = torch.from_numpy(got.train_x[:3])
    assert change.train(batch).shape == (3, *kind.shape)
    assert change.test(batch).shape == (3, *kind.shape)
    assert got.loss in LOSSES
    source = catalogue.SOURCES[catalogue.parsed(dataset)[0]]
    assert bool(source.groups) >= (got.groups is not None)
    if got.groups is not None:
        tested = [] if got.test_groups is None else got.test_groups.tolist()
        every = {*got.groups.tolist(), *tested}
        assert every == {*range(len(every))}


@pytest.mark.parametrize(
    "dataset",
    [name for name, source in catalogue.SOURCES.items() if not source.files.startswith("none")],
)
def test_missing_files_are_named_with_their_place(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", broken)
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", broken)
    with pytest.raises(OSError, match="data-dir") as caught:
        data.load(dataset, str(tmp_path))
    said = str(caught.value)
    assert str(tmp_path) in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("synthetik", "no data set 'synthetik'; did you mean 'synthetic'"),
        ("synthetic(1, gamma=2)", r"synthetic\(...\) with literals .*alpha=1.0, beta=1.0"),
        ("synthetic(1, alpha=2)", r"synthetic\(...\) with literals"),
        ("synthetic(1, 2, 3, 4, True, 6)", r"synthetic\(...\) with literals"),
        ("synthetic(alpha=beta)", r"synthetic\(...\) with literals"),
        ("synthetic(1)(2)", r"synthetic\(...\) with literals"),
        ("synthetic(", r"synthetic\(...\) with literals"),
        ("synthetic(alpha='much')", "alpha must be like its default 1.0, not 'much'"),
        ("synthetic(clients=True)", "clients must be like its default 30, not True"),
        ("femnist(writers=-1)", "writers must be at least 0, not -1"),
        ("digits(3)", "digits takes no arguments"),
        ("emnist(split='all')", "split must be one of 'byclass', .*, not 'all'"),
    ],
)
def test_a_wrong_name_or_argument_is_refused(dataset: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        catalogue.parsed(dataset)


def test_arguments_are_given_by_place_or_name() -> None:
    name, given = catalogue.parsed("synthetic(2, beta=0.5)")
    assert (name, given["alpha"], given["beta"], given["clients"]) == ("synthetic", 2.0, 0.5, 30)
    with pytest.raises(ValueError, match="needs clients >= 1"):
        data.load("synthetic(clients=0)")


def test_the_pages_own_data_and_model_go_together(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "data.md").read_text(), re.M | re.S)
    (tmp_path / "mine.py").write_text(code)
    got = data.load("mine.py:load", "", str(tmp_path))
    assert got.groups is not None
    assert (len(got.train_y), len(got.test_y), got.groups.max()) == (800, 200, 9)
    models.check("mine.py:load", "mine.py:Net", 1, "", str(tmp_path))
