"""Data by writer, speaker, account and user: each format gives the same examples to the same groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.data.sources import texts
from tests.experiments.data.sources import made


def letters(row: np.ndarray) -> str:
    return "".join((*texts.LETTERS, "#")[i] for i in row)


def test_femnist_from_tffs_files(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    pixels = np.random.default_rng(0).random((3, 3, 28, 28), np.float32)
    label = np.array([61, 0, 5], np.int32)
    users = {f"f{i}": {"pixels": of, "label": label} for i, of in enumerate(pixels)}
    for part in ("train", "test"):
        made.hdf5(tmp_path / f"fed_emnist_{part}.h5", users)
    got = data.load("femnist", str(tmp_path))
    np.testing.assert_array_equal(got.train_x[3:6, 0], pixels[1])
    assert got.train_y.tolist() == [61, 0, 5] * 3
    two = data.load("femnist(writers=2)", str(tmp_path))
    assert two.groups.tolist() == two.test_groups.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(two.train_x, two.test_x)  # the same two writers
    with pytest.raises(ValueError, match="there are 3 users, but 4 are asked for"):
        data.load("femnist(writers=4)", str(tmp_path))


def test_femnist_from_the_hubs_parquet(tmp_path: Path) -> None:
    packed = [{"bytes": made.png(28, 28, 1), "path": None} for _ in range(20)]
    columns = {"image": packed, "writer_id": ["w1", "w0"] * 10, "character": [*range(20)]}
    made.parquet(tmp_path / "train-0.parquet", **columns)
    got = data.load("femnist", str(tmp_path))
    assert got.train_y.tolist() == [*range(1, 19, 2), *range(0, 18, 2)]  # w0 first
    assert got.test_y.tolist() == [19, 18]  # the last tenth of each


def test_a_file_that_is_not_leafs_is_named(tmp_path: Path) -> None:
    made.femnist(tmp_path)
    (tmp_path / "test/other.json").write_text('{"users": ["f0"]}')
    with pytest.raises(
        ValueError, match=r"other.json is not in LEAF's format .*expected \{\"users"
    ):
        data.load("femnist", str(tmp_path))


def test_shakespeare_predicts_each_character_of_a_speaker_in_order_of_time(tmp_path: Path) -> None:
    made.shakespeare(tmp_path)
    got = data.load("shakespeare", str(tmp_path))
    # ALL has three lines of one speech; First Citizen five of two; Ghost has too few
    every = "Speak, speak:\nsay it"
    citizen = "Before we proceed any further,\nhear me speak. It is #3.\nYou are all resolved\n"
    said = [letters(got.train_y[got.groups == g]) for g in (0, 1)]
    assert said == [every, citizen + "rather to die"]
    assert got.groups.max() == 1
    assert letters(got.test_y) == "again.than to famish?"  # the last fifth, at least one line
    assert letters(got.train_x[0]) == " " * 80
    assert letters(got.train_x[len(every) - 1]) == (" " * 80 + every)[-81:-1]


def test_leafs_shakespeare_has_its_own_windows(tmp_path: Path) -> None:
    made.shakespeare_leaf(tmp_path)
    got = data.load("shakespeare", str(tmp_path))
    assert letters(got.train_x[0]).strip() == "To be, or not to be."
    assert letters(got.train_y) == "ThTh"
    made.leaf(tmp_path / "test", {"HAMLET": (["short"], ["T"])})
    data.load.cache_clear()
    with pytest.raises(ValueError, match="texts of 80 characters, not 5"):
        data.load("shakespeare", str(tmp_path))


def test_sentiment140_by_account_and_time_with_word_vectors(tmp_path: Path) -> None:
    made.sentiment140(tmp_path)
    (tmp_path / "glove.txt").write_text("is 1 2 3\nunheard 4 5 6\nday -1 0 0.5\n")
    got = data.load("sentiment140(words=5, vectors='glove.txt')", str(tmp_path))
    assert got.groups.tolist() == [0] * 8 + [1] * 8  # cid has one tweet
    assert got.train_y.tolist() == [1, 0] * 8  # by day, though the file is sorted by mood
    assert got.test_y.tolist() == [1, 0, 1, 0]
    # words of the training tweets by frequency, then alphabet: ',' day is ann bad | bob good ... digits
    assert (got.train_x != 0).sum(1).tolist() == [6] * 16  # day, 0, is, good, ',', ann
    assert got.train_x[:2, :6].tolist() == [[3, 1, 4, 1, 2, 5], [3, 1, 4, 6, 2, 5]]
    want = np.zeros((7, 3))
    want[3], want[4] = [-1, 0, 0.5], [1, 2, 3]  # day, is
    np.testing.assert_array_equal(got.vectors, want)
    with pytest.raises(FileNotFoundError, match=r"no file .*other.txt with a word and its"):
        data.load("sentiment140(vectors='other.txt')", str(tmp_path))


def test_sentiment140s_formats_agree(tmp_path: Path) -> None:
    made.sentiment140(tmp_path)
    want = data.load("sentiment140", str(tmp_path))
    rows = texts.read_csv(tmp_path / "training.csv").astype({"sentiment": int})
    made.parquet(tmp_path / "hub/train-0.parquet", **rows.to_dict("list"))
    got = data.load("sentiment140", str(tmp_path / "hub"))
    np.testing.assert_array_equal(got.train_x, want.train_x)
    np.testing.assert_array_equal(got.test_y, want.test_y)
    for part in ("train", "test"):
        tweets = {u: ([["id", "date", "q", u, f"{u} is {part}"]], [1]) for u in ("ann", "bob")}
        made.leaf(tmp_path / "leaf" / part, tweets)
    own_split = data.load("sentiment140(least=1)", str(tmp_path / "leaf"))
    assert own_split.train_y.tolist() == own_split.test_y.tolist() == [1, 1]
    assert own_split.test_x[0].tolist()[:4] == [4, 2, 1, 0]  # ann, is, an unknown word, none


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"4","1","Mon Apr 06 22:19:45 PDT 2009","q","ann"', "of 5 fields; expected polarity"),
        ('"4","1","yesterday","q","ann","x"', "no date such as 'Mon Apr .*: time data .*yesterday"),
        ('"4","1","","q","ann","x"\n1,2,3,4,5,6,7', "training.csv is no table of tweets: .*line 2"),
    ],
)
def test_a_wrong_line_of_tweets_is_named(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "training.csv").write_text(line)
    with pytest.raises(ValueError, match=message):
        data.load("sentiment140", str(tmp_path))


def test_stackoverflow_predicts_each_word_and_the_end(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    made.stackoverflow(tmp_path)
    got = data.load("stackoverflow(users=0, words=4, length=4)", str(tmp_path))
    the, how, to, run, other, begin, end = 1, 2, 3, 4, 5, 6, 7
    assert got.train_y.tolist() == [how, to, run, end, the, other, end] * 2
    sentence = [0, 0, 0, begin, how, to, run]
    assert got.train_x[:4].tolist() == [sentence[i : i + 4] for i in range(4)]
    assert got.groups.tolist() == [0] * 7 + [1] * 7
    assert got.test_y.tolist() == [to, the, end]
    cut = data.load("stackoverflow(users=0, words=4, length=2, most=1)", str(tmp_path))
    assert cut.train_y.tolist() == [how, to] * 2  # no end: the sentence is longer
    fewer = data.load("stackoverflow(users=0, words=3, length=3, most=1)", str(tmp_path))
    assert fewer.train_y.tolist() == [how, to, 4] * 2  # "run" is any other word
