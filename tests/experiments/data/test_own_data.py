"""A user's own data set: every form of it is the same data, and what is wrong is said in one sentence."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.data.datasets import Data
from flwr_regs.experiments.data.own_data import fields_of
from flwr_regs.experiments.user_code import offer

X = np.random.default_rng(0).normal(size=(12, 3, 2))
Y = np.arange(12) % 3
PARTS = (X[:8], Y[:8], X[8:], Y[8:])


class Items(Dataset[Any]):
    """A map-style data set of the items that `make` returns for an input and a label."""

    def __init__(self, x: Any, y: Any, make: Any) -> None:
        self.x, self.y, self.make = x, y, make

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.make(self.x[i], self.y[i])


def datasets(make: Any) -> tuple[Any, Any]:
    return Items(*PARTS[:2], make), Items(*PARTS[2:], make)


FORMS = {
    "four arrays": PARTS,
    "tensors": tuple(map(torch.from_numpy, PARTS)),
    "pairs": (PARTS[:2], PARTS[2:]),
    "Data": data.Data(*PARTS),
    "tensor data sets": tuple(
        TensorDataset(torch.from_numpy(x), torch.from_numpy(y)) for x, y in (PARTS[:2], PARTS[2:])
    ),
    "pairs of array and int": datasets(lambda x, y: (x, int(y))),
    "mappings": datasets(lambda x, y: {"pixels": torch.from_numpy(x), "label": int(y)}),
    "small and unsigned": (X[:8].astype(np.float64), Y[:8].astype(np.uint8), *PARTS[2:]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_data(form: str) -> None:
    got = data.load(offer(lambda: FORMS[form]))
    for name, want in zip(("train_x", "train_y", "test_x", "test_y"), PARTS, strict=True):
        array = getattr(got, name)
        assert array.dtype == (np.float32 if name.endswith("x") else np.int64)
        np.testing.assert_array_equal(array, want.astype(array.dtype))
    assert got.num_classes == 3


@pytest.mark.parametrize(
    ("given", "kept"), [(np.uint8, np.uint8), (np.uint16, np.int64), (">i4", np.int32)]
)
def test_inputs_are_float32_or_integers_that_torch_knows(given: Any, kept: Any) -> None:
    x = np.arange(12).reshape(6, 2).astype(given)
    got = fields_of((x, Y[:6], x, Y[:6]), "x.py:load")["train_x"]
    assert got.dtype == kept
    assert torch.from_numpy(got).tolist() == x.tolist()


def test_random_transforms_are_the_same_in_every_process() -> None:
    def noisy(x: Any, y: Any) -> Any:
        return x + torch.randn(1).numpy() + np.random.rand() + random.random(), y  # noqa: NPY002

    before = torch.get_rng_state().tolist(), random.getstate()
    a, b = (fields_of(datasets(noisy), "x.py:load")["train_x"] for _ in range(2))
    assert (a == b).all()
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


def changed(part: int, value: Any) -> tuple[Any, ...]:
    return tuple(value if i == part else old for i, old in enumerate(PARTS))


def failing(x: Any, y: Any) -> Any:
    raise KeyError("no such image")


NAN, LOW, LABELS = X[:8].copy(), Y[8:].copy(), Y[:8].copy()
NAN[[3, 5], 0, 1] = np.nan, np.inf
LOW[1] = -1
LABELS[LABELS == 1] = 4
WRONG: list[tuple[str, Any, str]] = [
    ("None", None, "it returned a value of type NoneType; expected (train_x, train_y, test_x, test_y), "),
    ("two arrays", (X, Y), "it returned a pair whose training part is of type ndarray and shape (12,"),
    ("column", changed(1, Y[:8, None]), "train_y has the shape (8, 1) and entries of type int64; expected"),
    ("a mapping", {"train": 1, "test": 2}, "it returned a mapping without 'train_x'; expected"),
    ("one is no set", (PARTS[:2], 3), "it returned a pair whose test part is of type int; expected"),
    ("lengths", changed(1, Y[:7]), "train_x has 8 examples, but train_y has 7 labels"),
    ("empty", changed(0, X[:0]), "train_x has no examples: its shape is (0, 3, 2)"),
    ("empty set", (TensorDataset(), PARTS[2:]), "reading the training data failed"),
    ("shapes", changed(2, X[8:, :2]), "an input of train_x has the shape (3, 2) and type float64, but"),
    ("ragged", changed(0, [[1], [1, 2]]), "a value of type list and length 2 is no array: setting an"),
    ("NaN", changed(0, NAN), "train_x has NaN or infinity in 2 of 8 examples, the first in train_x[3]"),
    ("float labels", changed(1, Y[:8] * 1.0), "train_y has the shape (8,) and entries of type float64"),
    ("negative", changed(3, LOW), "test_y has the label -1; expected integers from 0 on"),
    ("a gap", changed(1, LABELS), "no training example has the label 1, but the largest label is 4"),
    ("no label", datasets(lambda x, y: {"a": x, "b": x}), "no entry for its targets, such as 'label'"),
    ("two inputs", datasets(lambda x, y: {"a": x, "b": x, "y": y}), "several inputs ['a', 'b']; expected"),
]  # fmt: skip


@pytest.mark.parametrize(("returned", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_what_is_wrong_is_said_in_one_sentence(returned: Any, message: str) -> None:
    with pytest.raises(ValueError, match=r"^'x\.py:load': ") as caught:
        fields_of(returned, "x.py:load")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_in_a_users_item_names_his_line() -> None:
    line = failing.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=rf"KeyError: 'no such image' \({__file__}, line {line}\)"):
        fields_of(datasets(failing), "x.py:load")


GROUPED = {
    **dict(zip(("train_x", "train_y", "test_x", "test_y"), PARTS, strict=True)),
    "groups": np.arange(8) % 3,
}


@pytest.mark.parametrize("kind", [dict, Data], ids=["dict", "Data"])
def test_a_mapping_may_have_groups_and_the_rest_of_a_data_set(kind: Any) -> None:
    given = kind(**GROUPED, coarse=np.zeros(8, np.uint8), augment="crop-flip")
    got = Data(**fields_of(given, "x.py:load"))
    assert (got.groups.dtype, got.groups.tolist()) == (np.int64, GROUPED["groups"].tolist())
    assert (got.coarse.dtype, got.augment, got.loss) == (np.int64, "crop-flip", "")
    assert got.test_groups is None
    np.testing.assert_array_equal(got.test_x, fields_of(PARTS, "x.py:load")["test_x"])


def test_own_pictures_may_be_augmented_and_other_inputs_not() -> None:
    pictures = np.random.default_rng(0).random((8, 3, 32, 32))
    given = {**GROUPED, "train_x": pictures, "test_x": pictures[:4], "augment": "crop-24"}
    got = data.load(offer(lambda: given))
    assert got.test_x.shape == (4, 3, 24, 24)
    np.testing.assert_allclose(got.test_x.reshape(4, -1).mean(1), 0, atol=1e-5)
    padded = data.load(offer(lambda: {**given, "augment": "crop-flip"}))
    assert padded.num_classes == 3
    again = data.load(offer(lambda: padded))  # a Data, with what it has counted
    np.testing.assert_array_equal(again.test_x, padded.test_x)
    with pytest.raises(ValueError, match=r"needs pictures as floats .* of shape \(8, 3, 2\)"):
        data.load(offer(lambda: {**GROUPED, "augment": "crop-flip"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": [1]}, "with the key 'group'; expected train_x"),
        ({"groups": [0, 1]}, r"groups has the shape \(2,\) .*one integer from 0 on for each of 8"),
        ({"groups": np.full(8, 0.5)}, "groups has .*entries of type float64"),
        ({"groups": np.full(8, -1)}, "groups has the number -1; expected integers from 0 on"),
        ({"augment": "mixup"}, "augment must be one of '', 'crop-flip', .*, not 'mixup'"),
        ({"loss": "hinge"}, "loss must be one of '', 'half-square', not 'hinge'"),
        ({"train_y": None}, "expected one integer"),
    ],
)
def test_a_mapping_that_is_no_data_set_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"'x.py:load': .*{message}"):
        fields_of({**GROUPED, **change}, "x.py:load")
