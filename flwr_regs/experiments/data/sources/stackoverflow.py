"""Stack Overflow by user, from the HDF5 files that TFF ships: the next word of a sentence."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.data.sources import data_files as files
from flwr_regs.experiments.data.sources.data_files import Array, Parts

FOLDERS = ("", "stackoverflow")
COUNTS = "stackoverflow.word_count"
"""TFF's file of ``word count`` lines, the most frequent word first."""
PADDING = 0


def stackoverflow(data_dir: str, users: int, words: int, length: int, most: int) -> Parts:
    """Return the words before each word of a sentence and the word itself; groups are the users.

    As in the Field Guide's code (Wang et al. 2021, App. B): the first `length` words of a sentence, the
    `words` most frequent ones as vocabulary, at most `most` sentences of a user. Tokens: 0 padding, then
    the words, then any other word, the beginning and the end of a sentence. There, a sentence is one
    example with a target for each word; here, each word to predict is one example: inputs int32 ``(n,
    length)``, padded in front, labels the next token.

    Parameters
    ----------
    users : int
        So many users of ``stackoverflow_train.h5``, drawn from seed 0; 0: all 342,477.

    Tests are on what the same users wrote later, ``stackoverflow_test.h5``.
    """
    names = "stackoverflow_train.h5", "stackoverflow_test.h5", COUNTS
    paths = files.matching(data_dir, FOLDERS, *names)
    if paths is None:
        raise files.Missing
    (train,), (test,), (counts,) = paths
    vocabulary = _vocabulary(counts, words)
    chosen = files.drawn(files.hdf5(train), users)
    first, last = (files.hdf5(path, chosen) for path in (train, test))

    def convert(columns: Any) -> tuple[Array, Array]:
        return _examples(columns["tokens"][:most], vocabulary, words, length)

    return files.by_group(first, last, convert)


def _vocabulary(path: Path, words: int) -> dict[str, int]:
    """Return word -> token, from 1 on."""
    place: dict[str, int] = {}
    with path.open(encoding="utf-8") as file:
        for line in islice(file, words):
            word, _, count = line.strip().rpartition(" ")
            if not word or not count.isdigit():
                raise ValueError(
                    f"{path} has the line {line.strip()!r}; expected a word and its count"
                )
            place[word] = len(place) + 1
    return place


def _examples(
    sentences: Any, vocabulary: dict[str, int], words: int, length: int
) -> tuple[Array, Array]:
    other, begin, end = words + 1, words + 2, words + 3
    x: list[list[int]] = []
    y: list[int] = []
    for sentence in sentences:
        text = sentence.decode() if isinstance(sentence, bytes) else str(sentence)
        tokens = [begin, *(vocabulary.get(word, other) for word in text.split()[:length])]
        if len(tokens) <= length:
            tokens.append(end)
        for i in range(1, len(tokens)):
            x.append([PADDING] * (length - i) + tokens[:i])
            y.append(tokens[i])
    return np.array(x, np.int32).reshape(-1, length), np.array(y, np.int64)
