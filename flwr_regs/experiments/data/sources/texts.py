"""Texts by user: Shakespeare by speaker, Sentiment140 by account, and Stack Overflow by its users."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources.data_files import Array, Parts

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The characters of LEAF's Shakespeare; any other one is the class after them."""
WINDOW = 80
"""Characters before the one to predict: McMahan et al. (2017), Sec. 3; LEAF."""
TRAINED = 0.8
"""The first share of a speaker's lines trains: McMahan et al. (2017), Sec. 3."""
TWEET = 25
"""Words of a tweet: LEAF's."""
PADDING, UNKNOWN = 0, 1
"""The tokens of no word, and of a word outside of the vocabulary; words follow."""
WORD = re.compile(r"[\w']+|[.,!?;]")
SENT_FOLDERS = ("", "sent140", "sentiment140", "sent140/data")
CSV_FIELDS = ["sentiment", "id", "date", "query", "user", "text"]
LABELS = {"0": 0, "2": 0, "4": 1}
"""Sentiment -> label."""
SUCH_DATE = "Mon Apr 06 22:19:45 PDT 2009"
COUNTS = "stackoverflow.word_count"
"""TFF's file of ``word count`` lines, the most frequent word first."""


def shakespeare(data_dir: str, least: int) -> Parts:
    """Return 80 characters and the one after them, for each character that a speaker says.

    Inputs are int32 ``(n, 80)``, places in `LETTERS`; what is before a speaker's first character is blank,
    as in LEAF. Groups are the speakers with at least `least` lines. The last fifth of a speaker's lines is
    for testing, so that tests are later in time (McMahan et al. 2017, Sec. 3).

    From LEAF's ``train/*.json`` and ``test/*.json``, or from a text in which a line ``NAME:`` after an
    empty one begins a speech: ``input.txt``, ``shakespeare.txt`` or the only ``*.txt``.
    """
    folders = ("", "shakespeare", "shakespeare/data")
    if leaf := files.leaf(data_dir, folders):
        train, test = leaf
        return files.by_group(train, test, _windows_of)
    ((*every,),) = files.matching(data_dir, folders, "*.txt") or [[]]
    texts = [p for p in every if p.name in ("input.txt", "shakespeare.txt")]
    texts = texts or (every if len(every) == 1 else [])
    if not texts:
        raise files.Missing
    spoken = speeches(texts[0])
    enough = {name: lines for name, lines in spoken.items() if len(lines) >= max(least, 2)}
    if not enough:
        expected = "expected a line 'NAME:' after an empty line, and then what is said"
        raise ValueError(f"{texts[0]} has no speaker with {least} lines; {expected}")
    first, last = ({n: files.cut(of, TRAINED)[k] for n, of in enough.items()} for k in (0, 1))
    return files.by_group(first, last, lambda lines: windows("\n".join(lines)))


def speeches(path: Path) -> dict[str, list[str]]:
    """Return speaker -> their lines, in order; the same name is the same speaker."""
    said: dict[str, list[str]] = {}
    speaker = ""
    for part in re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace")):
        lines = [line.strip() for line in part.strip().splitlines()]
        if lines and re.fullmatch(".+:", lines[0]):
            speaker = lines.pop(0)[:-1]
        if speaker:
            said.setdefault(speaker, []).extend(lines)
    return said


def windows(text: str) -> tuple[Array, Array]:
    """Return each character's (80 characters before it, place in `LETTERS`)."""
    return _next(encoded(" " * WINDOW + text), WINDOW)


def _next(tokens: Array, length: int) -> tuple[Array, Array]:
    """Return each token behind the first `length` ones as (as many tokens before it, the token)."""
    views = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
    return views.astype(np.int32), tokens[length:]


def encoded(text: str) -> Array:
    """Return the characters' places in `LETTERS`, int32."""
    return np.array([_PLACE.get(c, len(LETTERS)) for c in text], np.int32)


_PLACE = {c: i for i, c in enumerate(LETTERS)}


def _windows_of(pair: tuple[Sequence[str], Sequence[str]]) -> tuple[Array, Array]:
    """Return what LEAF's texts of 80 characters, and single ones, are."""
    x, y = pair
    if wrong := [len(text) for text in x if len(text) != WINDOW]:
        raise ValueError(f"LEAF's Shakespeare has texts of {WINDOW} characters, not {wrong[0]}")
    return encoded("".join(x)).reshape(-1, WINDOW), encoded("".join(y))


def sentiment140(
    data_dir: str, users: int, least: int, words: int, vectors: str, hub: bool
) -> Parts:
    """Return tweets (Go et al. 2009) as 25 words each, label 1 if it is happy; groups are accounts.

    Parameters
    ----------
    users : int
        So many accounts, drawn from seed 0 (Wang et al. 2023, Sec. VI: 500); 0: all.
    least : int
        Only accounts with so many tweets.
    words : int
        The vocabulary: the most frequent words of the training tweets. Inputs are int32 ``(n, 25)``: 0
        after the last word, 1 a word outside of the vocabulary, and the words from 2 on.
    vectors : str
        A file in the data-dir with a word and its vector in a line, such as ``glove.6B.300d.txt``.
        ``vectors`` then has those of the vocabulary; what the file lacks is zero.
    hub : bool
        Download it with flwr-datasets.

    The last fifth of an account's tweets, by date, is for testing. From ``training*.csv`` as Go et al.
    ship it, the hub's ``train*.parquet``, or LEAF's ``train/*.json`` and ``test/*.json`` with their own
    split.
    """
    train, test = _tweets(data_dir, hub)
    sizes = pd.concat([train, test])["user"].value_counts()
    enough = {*sizes.index[sizes >= least]} & {*train["user"]}
    if not enough:
        raise ValueError(f"sentiment140 has no account with {least} tweets: set least=1")
    chosen = files.drawn(enough, users)
    train, test = (part[part["user"].isin(chosen)] for part in (train, test))
    counts = Counter(word for text in train["text"] for word in _split(text))
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[:words]
    place = {word: i for i, word in enumerate(frequent, start=2)}

    def tokens(tweets: pd.DataFrame) -> tuple[Array, Array]:
        x = np.full((len(tweets), TWEET), PADDING, np.int32)
        for row, text in zip(x, tweets["text"], strict=True):
            known = [place.get(word, UNKNOWN) for word in _split(text)[:TWEET]]
            row[: len(known)] = known
        return x, tweets["label"].to_numpy()

    parts = files.by_group(dict([*train.groupby("user")]), dict([*test.groupby("user")]), tokens)
    if vectors:
        parts["vectors"] = _vectors(files.root(data_dir) / vectors, place, words + 2)
    return parts


def _split(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _tweets(data_dir: str, hub: bool) -> list[pd.DataFrame]:
    """Return the training and the test tweets: user, text and label, a user's in order of time."""
    folders = () if hub else SENT_FOLDERS
    if leaf := files.leaf(data_dir, folders):
        return [*map(_of_users, leaf)]
    name: Any = "stanfordnlp/sentiment140"
    if raw := files.matching(data_dir, folders, "training*.csv"):
        name = raw[0][0]
        tweets = read_csv(name)
    else:
        (tweets,) = files.tables(data_dir, folders, name, train="train*.parquet")
    columns = {of: files.column(tweets, of) for of in ("user", "date", "text", "sentiment")}
    with files.reading(name, f"dates such as '{SUCH_DATE}', and sentiments {', '.join(LABELS)}"):
        labels = [LABELS[str(sentiment)] for sentiment in columns["sentiment"]]
        tweets = pd.DataFrame({**columns, "time": _times(columns["date"]), "label": labels})
    tweets = tweets.sort_values(["time", "text", "label"])
    of_user = tweets.groupby("user")
    size, rank = of_user["text"].transform("size"), of_user.cumcount()
    train = rank < (size * TRAINED).astype(int).clip(1, (size - 1).clip(1))
    return [tweets[train], tweets[~train]]


def _of_users(users: files.Users) -> pd.DataFrame:
    """Return the tweets as LEAF has them."""
    with files.reading("LEAF's tweets", "fields that end in the text, and a label 0 or 1, of each"):
        pairs = [(user, *pair) for user, of in users.items() for pair in zip(*of, strict=True)]
        rows = [(user, row[-1], int(label)) for user, row, label in pairs]
    return pd.DataFrame(rows, columns=["user", "text", "label"])


def read_csv(path: Path) -> pd.DataFrame:
    """Return the tweets as Go et al. ship them."""
    with files.reading(path, f"lines with the fields {', '.join(CSV_FIELDS)}"):
        rows = pd.read_csv(path, header=None, dtype=str, keep_default_na=False, encoding="latin-1")
        return rows.set_axis(CSV_FIELDS, axis=1)


def _times(dates: Sequence[str]) -> pd.Series:
    """Return when, on the clock of each date, which is such as `SUCH_DATE`."""
    plain = pd.Series(dates).str.replace(r" [A-Z]+ (?=\d+$)", " ", regex=True)
    return pd.to_datetime(plain, format="%a %b %d %H:%M:%S %Y")


def _vectors(path: Path, place: dict[str, int], tokens: int) -> Array:
    """Return the vectors of the vocabulary, float32 ``(tokens, dimension)``."""
    if not path.is_file():
        such = "with a word and its vector in a line, such as glove.6B.300d.txt"
        raise FileNotFoundError(f"there is no file {path} {such}")
    out = np.zeros((tokens, 0), np.float32)
    layout = "a word and its vector in each line, all of one length"
    with files.reading(path, layout), path.open(encoding="utf-8") as file:
        for line in file:
            word, *numbers = line.rstrip("\n").split(" ")
            if not out.size:
                out = np.zeros((tokens, len(numbers)), np.float32)
            if word in place:
                out[place[word]] = np.array(numbers, np.float32)
    if not out.size:
        raise ValueError(f"{path} is empty")
    return out


def stackoverflow(data_dir: str, users: int, words: int, length: int, most: int) -> Parts:
    """Return the words before each word of a sentence and the word itself; groups are the users.

    From the HDF5 files that TFF ships. As in the Field Guide's code (Wang et al. 2021, App. B): the first
    `length` words of a sentence, the `words` most frequent ones as vocabulary, at most `most` sentences of
    a user. Tokens: 0 padding, then the words, then any other word, the beginning and the end of a sentence.
    There, a sentence is one example with a target for each word; here, each word to predict is one example:
    inputs int32 ``(n, length)``, padded in front, labels the next token.

    Parameters
    ----------
    users : int
        So many users of ``stackoverflow_train.h5``, drawn from seed 0; 0: all 342,477.

    Tests are on what the same users wrote later, ``stackoverflow_test.h5``.
    """
    names = "stackoverflow_train.h5", "stackoverflow_test.h5", COUNTS
    train, test, counts = files.one_of_each(data_dir, ("", "stackoverflow"), *names)
    place = _vocabulary(counts, words)
    other, begin, end = words + 1, words + 2, words + 3

    def convert(columns: tuple[Any]) -> tuple[Array, Array]:
        pairs = [(np.zeros((0, length), np.int32), np.zeros(0, np.int64))]
        for sentence in columns[0][:most]:
            text = sentence.decode() if isinstance(sentence, bytes) else str(sentence)
            known = [place.get(word, other) for word in text.split()]
            tokens = [*[PADDING] * (length - 1), begin, *[*known, end][:length]]
            pairs.append(_next(np.array(tokens), length))
        x, y = map(np.concatenate, zip(*pairs, strict=True))
        return x, y

    first, last = files.hdf5(train, test, users, "tokens")
    return files.by_group(first, last, convert)


def _vocabulary(path: Path, words: int) -> dict[str, int]:
    """Return word -> token, from 1 on."""
    with path.open(encoding="utf-8") as file:
        lines = [line.strip() for line in islice(file, words)]
    if wrong := [line for line in lines if not re.fullmatch(r".+ \d+", line)]:
        raise ValueError(f"{path}: {wrong[0]!r} is not a word and its count")
    return {line.rpartition(" ")[0]: token for token, line in enumerate(lines, 1)}
