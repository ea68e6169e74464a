"""Texts by user: Shakespeare by speaker, and Sentiment140 by account."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources import handwriting as writers
from flwr_regs.experiments.data.sources import tables
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
SEED_FOLDERS = ("", "sent140", "sentiment140", "sent140/data")


def shakespeare(data_dir: str, least: int = 2) -> Parts:
    """Return 80 characters and the one after them, for each character that a speaker says.

    Inputs are int32 ``(n, 80)``, places in `LETTERS`; what is before a speaker's first character is blank,
    as in LEAF. Groups are the speakers with at least `least` lines. The last fifth of a speaker's lines is
    for testing, so that tests are later in time (McMahan et al. 2017, Sec. 3).

    From LEAF's ``train/*.json`` and ``test/*.json``, or from a text in which a line ``NAME:`` after an
    empty one begins a speech: ``input.txt``, ``shakespeare.txt`` or the only ``*.txt``.
    """
    folders = ("", "shakespeare", "shakespeare/data")
    if leaf := files.found(data_dir, folders, "train/*.json", "test/*.json"):
        train, test = map(writers.users_of, leaf)
        return files.by_group(train, test, _windows_of)
    ((*every,),) = files.found(data_dir, folders, "*.txt") or [[]]
    texts = [p for p in every if p.name in ("input.txt", "shakespeare.txt")]
    texts = texts or (every if len(every) == 1 else [])
    if not texts:
        raise files.absent(
            "shakespeare",
            data_dir,
            "input.txt, a text with lines NAME:, or LEAF's train/*.json and test/*.json",
            "get one from Project Gutenberg or run LEAF's preprocess.sh",
        )
    spoken = {
        name: lines for name, lines in speeches(texts[0]).items() if len(lines) >= max(least, 2)
    }
    if not spoken:
        raise ValueError(
            f"{texts[0]} has no speaker with {least} lines; expected a line 'NAME:' after an empty "
            "line, and then what is said"
        )
    first, last = (
        {name: ["\n".join(files.cut(of, TRAINED)[part])] for name, of in spoken.items()}
        for part in (0, 1)
    )
    return files.by_group(first, last, windows)


def speeches(path: Path) -> dict[str, list[str]]:
    """Return speaker -> their lines, in order; the same name is the same speaker."""
    said: dict[str, list[str]] = {}
    speaker, before = "", ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        plain = line.strip()
        if plain.endswith(":") and not before and len(plain) > 1:
            speaker = plain[:-1]
        elif plain and speaker:
            said.setdefault(speaker, []).append(plain)
        before = plain
    return said


def windows(text: str) -> tuple[Array, Array]:
    """Return each character's (80 characters before it, place in `LETTERS`)."""
    codes = encoded(" " * WINDOW + text)
    views = np.lib.stride_tricks.sliding_window_view(codes[:-1], WINDOW)
    return views.astype(np.int32), codes[WINDOW:].astype(np.int64)


def encoded(text: str) -> Array:
    """Return the characters' places in `LETTERS`, int32."""
    return np.array([_PLACE.get(c, len(LETTERS)) for c in text], np.int32)


_PLACE = {c: i for i, c in enumerate(LETTERS)}


def _windows_of(x: Sequence[str], y: Sequence[str]) -> tuple[Array, Array]:
    """Return what LEAF's texts of 80 characters, and single ones, are."""
    if wrong := [t for t in x if len(t) != WINDOW]:
        raise ValueError(
            f"LEAF's Shakespeare has texts of {WINDOW} characters, not {len(wrong[0])}"
        )
    return encoded("".join(x)).reshape(-1, WINDOW), encoded("".join(y)).astype(np.int64)


def sentiment140(
    data_dir: str,
    users: int = 0,
    least: int = 10,
    words: int = 10000,
    vectors: str = "",
    hub: bool = False,
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
    enough = {user for user in train if len(train[user]) + len(test.get(user, ())) >= least}
    if not enough:
        raise ValueError(f"sentiment140 has no account with {least} tweets: set least=1")
    chosen = files.drawn(enough, users)
    counts = Counter(word for user in chosen for text, _ in train[user] for word in _split(text))
    place = {
        word: i + 2
        for i, (word, _) in enumerate(sorted(counts.items(), key=lambda c: (-c[1], c[0]))[:words])
    }
    first, last = ({u: [part[u]] for u in chosen if u in part} for part in (train, test))
    parts = files.by_group(first, last, lambda tweets: _tokens(tweets, place))
    if vectors:
        parts["vectors"] = _vectors(files.root(data_dir) / vectors, place, words + 2)
    return parts


Tweets = dict[str, list[tuple[str, int]]]
"""Account -> (text, label) of its tweets, in order of time."""


def _tweets(data_dir: str, hub: bool) -> tuple[Tweets, Tweets]:
    leaf = files.found(data_dir, SEED_FOLDERS, "train/*.json", "test/*.json")
    if leaf and not hub:
        train, test = (
            {
                user: [(row[-1], int(y)) for row, y in zip(*of, strict=True)]
                for user, of in writers.users_of(part).items()
            }
            for part in leaf
        )
        return train, test
    parquet = files.found(data_dir, SEED_FOLDERS, "train*.parquet")
    raw = files.found(data_dir, SEED_FOLDERS, "training*.csv")
    if hub:
        rows = _of_table(tables.downloaded("stanfordnlp/sentiment140", "train"))
    elif raw:
        rows = _of_csv(raw[0][0])
    elif parquet:
        rows = _of_table(tables.read(parquet[0]))
    else:
        raise files.absent(
            "sentiment140",
            data_dir,
            "training.1600000.processed.noemoticon.csv, train*.parquet, or LEAF's train/*.json and "
            "test/*.json",
            "get one from Go et al., the hub's stanfordnlp/sentiment140 or LEAF, or say "
            "sentiment140(hub=True)",
        )
    tweets: dict[str, list[tuple[tuple[int, int, int, str], str, int]]] = {}
    for user, date, text, polarity in rows:
        tweets.setdefault(user, []).append((_time(date), text, int(polarity == 4)))
    parts: tuple[Tweets, Tweets] = {}, {}
    for user, own in tweets.items():
        ordered = [(text, label) for _, text, label in sorted(own)]
        parts[0][user], parts[1][user] = map(list, files.cut(ordered, TRAINED))
    return parts


def _of_csv(path: Path) -> Iterator[tuple[str, str, str, int]]:
    """Yield (account, date, text, polarity) of polarity, id, date, query, account, text."""
    with path.open(encoding="latin-1", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if len(row) != 6:
                raise ValueError(
                    f"{path}, line {number} has {len(row)} fields; expected polarity, id, date, query, "
                    "user, text"
                )
            yield row[4], row[2], row[5], int(row[0])


def _of_table(table: Any) -> Iterator[tuple[str, str, str, int]]:
    columns = [tables.column(table, name) for name in ("user", "date", "text", "sentiment")]
    yield from zip(*columns, strict=True)


def _time(date: str) -> tuple[int, int, int, str]:
    """Return when, so that it sorts: of ``Mon Apr 06 22:19:45 PDT 2009``."""
    try:
        _, month, day, clock, _, year = date.split()
        return int(year), _MONTHS.index(month), int(day), clock
    except ValueError as error:
        raise ValueError(
            f"a tweet's date is '{date}'; expected one such as 'Mon Apr 06 22:19:45 PDT 2009'"
        ) from error


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _split(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _tokens(tweets: list[tuple[str, int]], place: dict[str, int]) -> tuple[Array, Array]:
    x = np.full((len(tweets), TWEET), PADDING, np.int32)
    for i, (text, _) in enumerate(tweets):
        tokens = [place.get(word, UNKNOWN) for word in _split(text)[:TWEET]]
        x[i, : len(tokens)] = tokens
    return x, np.array([label for _, label in tweets], np.int64)


def _vectors(path: Path, place: dict[str, int], tokens: int) -> Array:
    """Return the vectors of the vocabulary, float32 ``(tokens, dimension)``."""
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {path} with a word and its vector in a line, such as glove.6B.300d.txt"
        )
    out: Array | None = None
    with path.open(encoding="utf-8") as file:
        for line in file:
            word, *numbers = line.rstrip("\n").split(" ")
            if out is None:
                out = np.zeros((tokens, len(numbers)), np.float32)
            if word in place:
                out[place[word]] = np.array(numbers, np.float32)
    if out is None:
        raise ValueError(f"{path} is empty")
    return out
