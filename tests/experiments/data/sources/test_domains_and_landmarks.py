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
from flwr_regs.experiments.data.sources import pickles
from tests.experiments.data.sources import made


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_a_pickle_of_arrays_is_read_as_it_was(protocol: int, tmp_path: Path) -> None:
    things = {
        "bytes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "texts": np.array(["a", "bc"]),
        "objects": np.array(["x", None], dtype=object),
        "plain": [np.float64(2.5), "text", None, b"bytes", ("tuple", 1)],
    }
    made.pickled(tmp_path / "x.pkl", things, protocol)
    got = pickles.read(tmp_path / "x.pkl")
    assert got["plain"] == things["plain"]
    for name in ("bytes", "fortran", "texts", "objects"):
        assert got[name].dtype == things[name].dtype
        np.testing.assert_array_equal(got[name], things[name])


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path(__file__).parent / "made-by-a-pickle"),)


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (pickle.dumps(Evil()), r" \(it names posix.mkdir"),
        (pickle.dumps(np.array([Evil()], dtype=object)), r" \(it names posix.mkdir"),
        (pickle.dumps(np.arange(100))[:-40], ""),
    ],
    ids=["alone", "inside", "broken"],
)
def test_a_pickle_that_calls_something_or_is_broken_is_refused(
    packed: bytes, why: str, tmp_path: Path
) -> None:
    (tmp_path / "x.pkl").write_bytes(packed)
    with pytest.raises(ValueError, match=f"x.pkl is not a pickle of plain arrays{why}"):
        pickles.read(tmp_path / "x.pkl")
    assert not (Path(__file__).parent / "made-by-a-pickle").exists()


def test_digits_five_are_fedbns(tmp_path: Path) -> None:
    made.digits_five(tmp_path / "data")
    got = data.load("digits-five", str(tmp_path))
    assert np.bincount(got.groups).tolist() == [12] * 5
    grey, labels = pickles.read(tmp_path / "data/MNIST/test.pkl")
    colour, _ = pickles.read(tmp_path / "data/MNIST_M/test.pkl")
    grey = np.repeat(grey[:, None], 3, axis=1)
    for rows, want in ((slice(10), grey), (slice(-10, None), colour.transpose(0, 3, 1, 2))):
        np.testing.assert_allclose(got.test_x[rows], want / 255 * 2 - 1, rtol=1e-4, atol=1e-5)
    assert got.test_y[:10].tolist() == labels.tolist()
    more = data.load("digits-five(share=0.2)", str(tmp_path))
    assert np.bincount(more.groups).tolist() == [24] * 5
    with pytest.raises(FileNotFoundError, match="20 files such as MNIST/partitions/train_part0"):
        data.load("digits-five(share=0.3)", str(tmp_path))
    with pytest.raises(ValueError, match=r"share must be from 0.1 to 1, not 0"):
        data.load("digits-five(share=0)", str(tmp_path))


def scaled(path: Path, size: int, box: tuple[int, int, int, int] | None = None) -> np.ndarray:
    """Return a picture, or a part of it, in [0, 1]."""
    with Image.open(path) as image:
        small = image.convert("RGB").crop(box or (0, 0, *image.size))
        pixels = np.asarray(small.resize((size, size), Image.Resampling.BILINEAR))
    return pixels.transpose(2, 0, 1) / 255


def test_domains_keep_a_share_of_the_smallest_ones_first_pictures(tmp_path: Path) -> None:
    made.listed(tmp_path, "office-caltech")
    got = data.load("office-caltech(size=20)", str(tmp_path))
    assert np.bincount(got.groups).tolist() == [10] * 4  # half of 20
    assert got.train_y[:10].tolist() == list(range(10))
    assert got.augment == "flip-rotate"
    few = data.load("office-caltech(share=0.25, size=8)", str(tmp_path))
    assert (len(few.train_y), len(few.test_y)) == (20, 40)  # all test pictures stay
    paths, _ = pickles.read(tmp_path / "office_caltech_10/webcam_test.pkl")
    np.testing.assert_allclose(got.test_x[33], scaled(tmp_path / str(paths[3]), 20), rtol=1e-6)


def test_a_list_with_a_wrong_entry_is_refused(tmp_path: Path) -> None:
    made.listed(tmp_path, "domainnet")
    file = tmp_path / "DomainNet/real_test.pkl"
    paths, labels = pickles.read(file)
    for first, label, message in (
        (paths[0], "cow", "has the class 'cow'; expected bird"),
        ("../secret.png", labels[0], "names '../secret.png', which is outside"),
        (str(tmp_path / paths[0]), labels[0], "which is outside of this"),
        (
            "gone.png",
            labels[0],
            "needs 10 pictures, of which 1 are missing, such as .*gone.png, in data-dir",
        ),
    ):
        made.pickled(file, (np.array([first, *paths[1:]]), np.array([label, *labels[1:]])))
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            data.load("domainnet(size=8, share=0.5)", str(tmp_path))
    made.pickled(file, (paths[1:], labels))
    with pytest.raises(ValueError, match=r"real_test.pkl does not hold two arrays of the same"):
        data.load("domainnet(size=8, share=0.5)", str(tmp_path))


def test_landmarks_by_photographer(tmp_path: Path) -> None:
    made.landmarks(tmp_path, "mini_gld_train_split.csv", "mini_gld_test.csv")
    got = data.load("gld-23k(size=40, most=4)", str(tmp_path))
    assert got.groups.tolist() == [1] * 4 + [0] * 3  # photographer 7's fifth picture is too many
    assert got.train_y.tolist() == [0, 1, 2, 0, 2, 0, 1]
    assert got.test_y.tolist() == [0, 2]
    assert got.test_groups is None
    picture = tmp_path / "images/abc1.jpg"  # 60 x 50
    for pixels, box in ((got.test_x[0], (3, 3, 57, 47)), (got.train_x[1], None)):
        want = 2 * scaled(picture, 40, box) - 1
        np.testing.assert_allclose(pixels, want, rtol=1e-4, atol=1e-5)
    (tmp_path / "images/abc2.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 of 7 pictures are missing .* images/abc2.jpg"):
        data.load("gld-23k(size=8, most=4)", str(tmp_path))
    (tmp_path / "mini_gld_test.csv").write_text("image_id\nabc1\n")
    with pytest.raises(ValueError, match="has the columns image_id; expected image_id, class"):
        data.load("gld-23k", str(tmp_path))
