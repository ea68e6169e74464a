"""Readers: what each one returns of the same made files, in each format; and what they refuse."""

import os
import pickle
import re
import sys
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torchvision import datasets as torchvisions

from flwr_regs.experiments.data import catalogue
from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.data.augment import AUGMENTATIONS
from flwr_regs.experiments.data.losses import LOSSES
from flwr_regs.experiments.data.sources import pickles, texts
from tests.experiments.data.sources.made import Files


def nothing(files: Files) -> None:
    """Write no file: the data set needs none."""


CALTECH = methodcaller("listed", "office-caltech")
GLD_23K = methodcaller("landmarks", "mini_gld_train_split.csv", "mini_gld_test.csv")
GLD_160K = methodcaller("landmarks", "federated_train.csv", "test.csv")
GROUPS = methodcaller("image_folder", "ann", "bob")
MADE: list[tuple[str, Any, str]] = [
    ("digits", nothing, "497f557db34b9619"),
    ("synthetic(0.5, 0.5, clients=4)", nothing, ""),
    ("quadratics", nothing, ""),
    ("digits-domains", nothing, "497f557db34b9619"),
    ("mnist-domains", Files.idx, "1601f936b050ac32"),
    ("mnist", Files.idx, "c1aa8bed40c86639"),
    ("fashion-mnist", lambda f: f.idx("FashionMNIST"), "731880fa75260042"),
    ("emnist", lambda f: f.emnist("balanced"), "8199c1bd6a3ab18e"),
    ("emnist(split='letters')", lambda f: f.emnist("letters", 1), "6e6da2b97c220be7"),
    ("femnist", Files.femnist, "ca6a01d9d6e06e51"),
    ("femnist", Files.femnist_tff, "753fb82f58c9ed05"),
    ("femnist(writers=2)", Files.femnist_tff, "bd5049f682ff8361"),
    ("femnist", Files.femnist_hub, "5c71fab7edcbb590"),
    ("cifar10(augment='')", lambda f: f.cifar(10), "187dd10dddd59dff"),
    ("cifar10(augment='crop-24')", lambda f: f.cifar(10), ""),
    ("cifar100(augment='')", lambda f: f.cifar(100, "fine_label"), "1146b1231b1020c2"),
    ("shakespeare", Files.shakespeare, "c60de77751f93f50"),
    ("shakespeare", Files.shakespeare_leaf, "e777a9151bb42aa6"),
    ("sentiment140", Files.sentiment140, "1888c44e4c29b1d8"),
    ("sentiment140", Files.sentiment140_hub, "1888c44e4c29b1d8"),
    ("sentiment140(words=5, vectors='glove.txt')", Files.sentiment140, "9caacab2185ca94f"),
    ("sentiment140(least=1)", Files.sentiment140_leaf, "c85623aa2fa032c0"),
    ("stackoverflow(users=2, words=4)", Files.stackoverflow, "8fa7b756c82fcfec"),
    ("stackoverflow(users=0, words=3, length=3, most=1)", Files.stackoverflow, "b9d32de89302fe98"),
    ("digits-five", Files.digits_five, "72d3282abba58b8c"),
    ("digits-five(share=0.2)", Files.digits_five, "d26456a818ee5632"),
    ("office-caltech(size=20)", CALTECH, "b1a6e85105c3455f"),
    ("office-caltech(share=0.25, size=8)", CALTECH, "7fdc7b45f2367929"),
    ("domainnet(share=0.5, size=32)", lambda f: f.listed("domainnet"), "73b2fb3064fd081a"),
    ("gld-23k(size=40, most=4)", GLD_23K, "0ed5968753154734"),
    ("gld-160k(size=32)", GLD_160K, "d680c8f2b43e6fc0"),
    ("image-folder(size=8)", Files.image_folder, "5beb825597110eff"),
    ("image-folder(size=8, grey=True, groups=True)", GROUPS, "d703c1f3a6032162"),
]
"""Data set, what writes its files, and the arrays' hash; none where the last bit is the platform's."""


@pytest.mark.parametrize(("dataset", "write", "fingerprint"), MADE)
def test_a_reader_returns_what_the_catalogue_promises(
    dataset: str, write: Any, fingerprint: str, tmp_path: Path
) -> None:
    write(Files(tmp_path))
    got = data.load(dataset, str(tmp_path))
    kind, source = catalogue.kind_of(dataset), catalogue.SOURCES[dataset.partition("(")[0]]
    assert not fingerprint or got.hash == fingerprint
    assert got.test_x.shape == (len(got.test_y), *kind.shape)
    assert got.train_x.dtype == got.test_x.dtype == (np.int32 if kind.tokens else np.float32)
    assert got.num_classes <= (kind.classes or 2)
    assert not kind.tokens or got.train_x.max() < kind.tokens
    zeros, classes = data.two_examples(dataset, str(tmp_path))
    assert (zeros.shape, zeros.dtype) == ((2, *kind.shape), got.test_x.dtype)
    assert classes == (kind.classes or 2)  # a folder's, where it is a class
    changed = AUGMENTATIONS[got.augment].train(torch.from_numpy(got.train_x[:2]))
    assert changed.shape == zeros.shape
    assert got.loss in LOSSES
    assert bool(source.groups) >= (got.groups is not None)


def test_cifar_is_the_same_from_torchvision_and_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path / "raw")
    rows = files.pixels(2, 3072)
    for name, _ in (*torchvisions.CIFAR10.train_list, *torchvisions.CIFAR10.test_list):
        files.pickled(f"cifar-10-batches-py/{name}", {"data": rows, "labels": [3, 4]})
    files.pickled("cifar-10-batches-py/batches.meta", {"label_names": ["a"] * 10})
    # the files' sums are torchvision's to check
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    got = data.load("cifar10(augment='')", str(tmp_path / "raw"))
    mean, std = np.array(catalogue.SOURCES["cifar10"].fixed["moments"])[:, :, None, None]
    want = (rows.reshape(2, 3, 32, 32) / 255 - mean) / std
    np.testing.assert_allclose(got.test_x, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(got.train_x, np.tile(want, (5, 1, 1, 1)), rtol=1e-4, atol=1e-5)
    assert got.train_y.tolist() == [3, 4] * 5

    def load_dataset(name: str, split: str) -> Any:
        (file,) = (tmp_path / "cifar100").glob(f"{split}*.parquet")
        assert name == "uoft-cs/cifar100"
        return SimpleNamespace(to_pandas=lambda: pd.read_parquet(file))

    Files(tmp_path).cifar(100, "fine_label")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    hub, local = (data.load(f"cifar100({a})", str(tmp_path)) for a in ("hub=True", ""))
    assert hub.hash == local.hash
    # apple is fruit, aquarium_fish fish, beaver an aquatic mammal
    assert hub.coarse[[0, 1, 4]].tolist() == [4, 1, 0]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'flwr-datasets: pip install "flwr-datasets>='):
        data.load("cifar10(hub=True)")


def test_shakespeare_predicts_each_character_of_a_speaker_in_order_of_time(tmp_path: Path) -> None:
    Files(tmp_path).shakespeare()
    got = data.load("shakespeare", str(tmp_path))
    said, tested, before = (
        "".join((*texts.LETTERS, "#")[i] for i in row)
        for row in (got.train_y, got.test_y, got.train_x[19])
    )
    # ALL has three lines of one speech; First Citizen five of two; Ghost has too few
    citizen = "Before we proceed any further,\nhear me speak. It is #3.\nYou are all resolved\n"
    assert said == f"Speak, speak:\nsay it{citizen}rather to die"
    assert np.bincount(got.groups).tolist() == [20, 90]
    assert tested == "again.than to famish?"  # the last fifth, at least one line
    assert before == (" " * 80 + "Speak, speak:\nsay i")[-80:]


def test_words_and_tweets_are_in_order_with_unknown_ones_and_ends(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.stackoverflow()
    got = data.load("stackoverflow(users=0, words=4, length=4)", str(tmp_path))
    the, how, to, run, other, begin, end = range(1, 8)
    assert got.train_y.tolist() == [how, to, run, end, the, other, end] * 2
    assert got.train_x[3].tolist() == [begin, how, to, run]
    files.sentiment140()
    got = data.load("sentiment140(words=5, vectors='glove.txt')", str(tmp_path))
    assert got.train_y.tolist() == [1, 0] * 8  # by day, though the file is sorted by mood
    # words of the training tweets by frequency, then alphabet: ',' day is ann bad | bob good
    assert got.train_x[:2, :6].tolist() == [[3, 1, 4, 1, 2, 5], [3, 1, 4, 6, 2, 5]]
    assert got.vectors[3:5].tolist() == [[-1, 0, 0.5], [1, 2, 3]]  # day, is


def test_a_pickle_of_arrays_is_read_as_it_was(tmp_path: Path) -> None:
    things = {
        "fortran": np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)),
        "texts": np.array(["a", "bc"]),
        "objects": np.array(["x", None], dtype=object),
        "plain": [np.float64(2.5), "text", None, b"bytes", ("tuple", 1)],
    }
    for protocol in (0, 2, pickle.HIGHEST_PROTOCOL):
        Files(tmp_path).pickled("x.pkl", things, protocol)
        got = pickles.read(tmp_path / "x.pkl")
        assert got["plain"] == things["plain"]
        for name in ("fortran", "texts", "objects"):
            assert got[name].dtype == things[name].dtype
            np.testing.assert_array_equal(got[name], things[name])


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(__file__).parent / "made-by-a-pickle"),)


class Addresses:
    """Objects at addresses that the pickle says: read, they end the process, or worse."""

    def __reduce__(self) -> Any:
        return np.ndarray, ((1,), "O", b"A" * 8)


class Layout:
    """A dtype with an object that it does not admit."""

    def __reduce__(self) -> Any:
        field = {"a": (np.dtype("O"), 0)}
        return np.dtype, ("V8", False, True), (3, "|", None, ("a",), field, 8, 1, 0)


def test_a_pickle_that_calls_something_or_is_broken_is_refused(tmp_path: Path) -> None:
    inside = np.array([Evil()], dtype=object)
    named = "it names posix.mkdir"
    broken = (np.arange(99), -40, "")
    forged = (Addresses(), None, "not callable"), (Layout(), None, "it has the dtype 'V8'")
    for thing, end, why in ((Evil(), None, named), (inside, None, named), broken, *forged):
        (tmp_path / "x.pkl").write_bytes(pickle.dumps(thing)[:end])
        with pytest.raises(ValueError, match=f"x.pkl: .*{why}.*; expected a pickle of plain arr"):
            pickles.read(tmp_path / "x.pkl")
        assert not (Path(__file__).parent / "made-by-a-pickle").exists()


def relisted(first: str = "", label: str = "", drop: int = 0) -> Any:
    """Write DomainNet with another first picture or label, or with fewer pictures than labels."""

    def write(files: Files) -> None:
        files.listed("domainnet")
        paths, labels = pickles.read(files.folder / "DomainNet/real_test.pkl")
        paths, labels = [first or paths[0], *paths[1:]], [label or labels[0], *labels[1:]]
        files.pickled("DomainNet/real_test.pkl", (np.array(paths[drop:]), np.array(labels)))

    return write


def damaged(write: Any, name: str, old: bytes, new: bytes = b"") -> Any:
    """Write a data set, and then change bytes of one of its files."""

    def both(files: Files) -> None:
        write(files)
        path = files.folder / name
        path.write_bytes(re.sub(old, new, path.read_bytes()))

    return both


TFF, GLOVE = "fed_emnist_train.h5", "sentiment140(vectors='glove.txt')"
UNNAMED = damaged(Files.femnist_tff, TFF, b"pixels", b"pixelz")
CUT = damaged(Files.femnist_tff, TFF, rb"(?s).{9}\Z")
FEWER = damaged(Files.idx, "MNIST/raw/train-labels-idx1-ubyte", rb"(?s)\x1e(.*).\Z", b"\x1d\\1")
RAGGED = damaged(Files.sentiment140, "glove.txt", b" 0.5")


@pytest.mark.parametrize(
    ("dataset", "write", "message"),
    [
        ("femnist(writers=4)", Files.femnist_tff, "there are 3 users, but 4 are asked for"),
        ("sentiment140(vectors='x')", Files.sentiment140, "no file .*x with a word and its"),
        (GLOVE, RAGGED, "glove.txt: .*; expected a word and its vector"),
        ("digits-five(share=0.3)", Files.digits_five, "20 files such as MNIST/partitions/train_p"),
        ("domainnet(size=8)", relisted(label="cow"), "has the class 'cow'; expected bird"),
        ("domainnet(size=8)", relisted("../a.png"), "names '../a.png', which is outside of this"),
        ("domainnet(size=8)", relisted("/a.png"), "which is outside of this"),
        ("domainnet(size=8)", relisted("gone.png"), "of which 1 are missing, such as .*gone.png"),
        ("domainnet(size=8)", relisted(drop=1), "real_test.pkl: they have 9 and 10 entries"),
        ("cifar10", lambda f: f.cifar(10, "y"), "the columns img, y; expected label or fine_label"),
        ("cifar10", lambda f: f.cifar(10, "label", 3), "train-00000.*: row 3 has no 'img'"),
        ("mnist", FEWER, r"^dataset 'mnist' in /\S*: train_y has .*\(29,\).*each of 30 examples"),
        ("femnist", UNNAMED, f"{TFF}: KeyError: .*'pixels'.*; expected TFF's examples"),
        ("femnist", CUT, f"{TFF}: OSError: .*truncated.*; expected TFF's examples"),
    ],
)
def test_files_that_are_wrong_or_too_few_are_named(
    dataset: str, write: Any, message: str, tmp_path: Path
) -> None:
    write(Files(tmp_path))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data.load(dataset, str(tmp_path))


def test_missing_files_are_named_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.mnist.download_and_extract_archive", broken)
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", broken)
    for name, source in catalogue.SOURCES.items():
        if not source.files.startswith("none"):
            with pytest.raises(OSError, match=r"^[^\n]*data-dir[^\n]*$") as caught:
                data.load(name, str(tmp_path))
            assert f"needs {source.files.replace('`', '')}" in str(caught.value)
            assert f"data-dir, {tmp_path}; {source.how}" in str(caught.value)
