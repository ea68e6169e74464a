"""FedBN's domains, their pickles, and TFF's landmarks."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.data.sources import digit_domains as fedbn
from flwr_regs.experiments.data.sources import pickles
from tests.experiments.data.sources import made


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
@pytest.mark.parametrize(
    "thing",
    [
        (np.arange(24, dtype=np.uint8).reshape(2, 3, 4), np.array([1, 2])),
        {"train": np.ones((3, 2), np.float32), "names": np.array(["a", "bc"])},
        [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.float64(2.5), "text", None, b"bytes"],
        (["a/b.png"], np.array(["x", None], dtype=object)),
    ],
    ids=["pair", "dict", "list", "objects"],
)
def test_a_pickle_of_arrays_is_read_as_it_was(thing: Any, protocol: int, tmp_path: Path) -> None:
    made.pickled(tmp_path / "x.pkl", thing, protocol)
    got = pickles.read(tmp_path / "x.pkl")
    assert type(got) is type(thing)
    for a, b in zip(
        *(list(t.values() if isinstance(t, dict) else t) for t in (got, thing)), strict=True
    ):
        assert type(a) is type(b) or isinstance(a, np.generic)
        np.testing.assert_array_equal(a, b)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(__file__).parent / "made-by-a-pickle"),)


@pytest.mark.parametrize("where", ["alone", "inside"])
def test_a_pickle_that_calls_something_is_refused(where: str, tmp_path: Path) -> None:
    thing = Evil() if where == "alone" else np.array([Evil()], dtype=object)
    made.pickled(tmp_path / "x.pkl", thing)
    with pytest.raises(
        ValueError, match=r"x.pkl is not a pickle of plain arrays \(it names posix.mkdir"
    ):
        pickles.read(tmp_path / "x.pkl")
    assert not (Path(__file__).parent / "made-by-a-pickle").exists()


def test_a_broken_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(np.arange(100))[:-40])
    with pytest.raises(ValueError, match=r"x.pkl is not a pickle of plain arrays"):
        pickles.read(tmp_path / "x.pkl")


def test_digits_five_are_fedbns(tmp_path: Path) -> None:
    made.digits_five(tmp_path / "data")
    got = data.load("digits-five", str(tmp_path))
    assert got.groups is not None
    assert np.bincount(got.groups).tolist() == [12] * 5
    grey, labels = pickles.read(tmp_path / "data/MNIST/test.pkl")
    want = np.repeat(grey[:, None], 3, axis=1) / 255 * 2 - 1
    np.testing.assert_allclose(got.test_x[:10], want, rtol=1e-4, atol=1e-5)
    assert got.test_y[:10].tolist() == labels.tolist()
    colour, _ = pickles.read(tmp_path / "data/MNIST_M/test.pkl")
    want = colour.transpose(0, 3, 1, 2) / 255 * 2 - 1
    np.testing.assert_allclose(got.test_x[-10:], want, rtol=1e-4, atol=1e-5)
    more = data.load("digits-five(share=0.2)", str(tmp_path))
    assert more.groups is not None
    assert np.bincount(more.groups).tolist() == [24] * 5
    with pytest.raises(
        FileNotFoundError, match="needs 20 files such as MNIST/partitions/train_part0"
    ):
        data.load("digits-five(share=0.3)", str(tmp_path))
    with pytest.raises(ValueError, match=r"share must be from 0.1 to 1, not 0"):
        data.load("digits-five(share=0)", str(tmp_path))


def test_domains_keep_a_share_of_the_smallest_ones_first_pictures(tmp_path: Path) -> None:
    made.listed(tmp_path, "office_caltech_10", fedbn.OFFICE, fedbn.OFFICE_CLASSES)
    got = data.load("office-caltech(size=20)", str(tmp_path))
    assert got.groups is not None
    assert np.bincount(got.groups).tolist() == [10] * 4  # half of 20
    assert got.train_y[:10].tolist() == list(range(10))
    assert len(got.test_y) == 40
    assert got.augment == "flip-rotate"
    few = data.load("office-caltech(share=0.25, size=8)", str(tmp_path))
    assert (len(few.train_y), len(few.test_y)) == (20, 40)  # all test pictures stay
    paths, _ = pickles.read(tmp_path / "office_caltech_10/webcam_test.pkl")
    with Image.open(tmp_path / str(paths[3])) as image:
        scaled = np.asarray(image.convert("RGB").resize((20, 20), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(got.test_x[33], scaled.transpose(2, 0, 1) / 255, rtol=1e-6)


def test_a_list_with_a_wrong_entry_is_refused(tmp_path: Path) -> None:
    made.listed(tmp_path, "DomainNet", fedbn.DOMAINNET, fedbn.DOMAINNET_CLASSES)
    paths, labels = pickles.read(tmp_path / "DomainNet/real_test.pkl")
    for pair, error, message in (
        ((paths, np.array(["cow", *labels[1:]])), ValueError, "has the class 'cow'; expected bird"),
        (
            (["../secret.png", *paths[1:]], labels),
            ValueError,
            "names '../secret.png', which is outside",
        ),
        (([str(tmp_path / paths[0]), *paths[1:]], labels), ValueError, "which is outside of this"),
        (
            (["gone.png", *paths[1:]], labels),
            FileNotFoundError,
            "1 of 10 pictures of a domain are missing",
        ),
        (
            (paths[1:], labels),
            ValueError,
            "real_test.pkl does not hold two arrays of the same length",
        ),
    ):
        made.pickled(tmp_path / "DomainNet/real_test.pkl", pair)
        with pytest.raises(error, match=message):
            data.load("domainnet(size=8, share=0.5)", str(tmp_path))


def test_landmarks_by_photographer(tmp_path: Path) -> None:
    made.landmarks(tmp_path, "mini_gld_train_split.csv", "mini_gld_test.csv")
    got = data.load("gld-23k(size=40, most=4)", str(tmp_path))
    assert got.groups is not None
    assert got.groups.tolist() == [
        1,
        1,
        1,
        1,
        0,
        0,
        0,
    ]  # photographer 7's fifth picture is too many
    assert got.train_y.tolist() == [0, 1, 2, 0, 2, 0, 1]
    assert got.test_y.tolist() == [0, 2]
    assert got.test_groups is None
    assert -1 <= got.train_x.min() < got.train_x.max() <= 1
    with Image.open(tmp_path / "images/abc1.jpg") as image:  # 60 x 50
        middle = image.crop((3, 3, 57, 47)).resize((40, 40), Image.Resampling.BILINEAR)
    want = np.asarray(middle).transpose(2, 0, 1) / 127.5 - 1
    np.testing.assert_allclose(got.test_x[0], want, rtol=1e-4, atol=1e-5)
    with Image.open(tmp_path / "images/abc1.jpg") as image:  # whole, where it trains
        whole = image.resize((40, 40), Image.Resampling.BILINEAR)
    want = np.asarray(whole).transpose(2, 0, 1) / 127.5 - 1
    np.testing.assert_allclose(got.train_x[1], want, rtol=1e-4, atol=1e-5)
    (tmp_path / "images/abc2.jpg").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"1 of 7 pictures are missing in .* images/abc2.jpg"
    ):
        data.load("gld-23k(size=8, most=4)", str(tmp_path))


def test_a_table_without_its_columns_is_refused(tmp_path: Path) -> None:
    made.landmarks(tmp_path, "federated_train.csv", "test.csv")
    (tmp_path / "federated_train.csv").write_text("image_id,class\nabc1,0\n")
    with pytest.raises(
        ValueError, match="columns image_id, class; expected user_id, image_id, class"
    ):
        data.load("gld-160k", str(tmp_path))
