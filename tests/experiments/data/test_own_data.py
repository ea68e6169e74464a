"""A user's own data set: every form of it is the same data; commands.txt has what is wrong."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.data.datasets import Data
from flwr_regs.experiments.data.own_data import fields_of
from flwr_regs.experiments.models import models
from flwr_regs.experiments.user_code import offer
from tests.conftest import ROOT, Items
from tests.docs.test_tutorials import blocks

X = np.random.default_rng(0).normal(size=(12, 3, 2))
Y = np.arange(12) % 3
PARTS = {"train_x": X[:8], "train_y": Y[:8], "test_x": X[8:], "test_y": Y[8:]}
TRAIN, TEST = (X[:8], Y[:8]), (X[8:], Y[8:])


def datasets(make: Any) -> tuple[Any, Any]:
    return Items(*TRAIN, make), Items(*TEST, make)


def tensors(*arrays: Any) -> TensorDataset:
    return TensorDataset(*map(torch.from_numpy, arrays))


@pytest.mark.parametrize(
    "form",
    [
        (*TRAIN, *TEST),
        [torch.from_numpy(part) for part in PARTS.values()],
        (TRAIN, TEST),
        Data(**PARTS),
        (tensors(*TRAIN), tensors(*TEST)),
        datasets(lambda x, y: (x, int(y))),
        datasets(lambda x, y: {"pixels": torch.from_numpy(x), "label": int(y)}),
        (X[:8], Y[:8].astype(np.uint8), *TEST),
        {**PARTS, "groups": Y[:8].astype(np.uint8), "coarse": Y[:8], "augment": "crop-flip"},
    ],
)
def test_every_form_is_the_same_data(form: Any) -> None:
    fields = fields_of(form, "x.py:load")
    for name, part in PARTS.items():
        assert fields[name].dtype == (np.float32 if name.endswith("x") else np.int64)
        np.testing.assert_array_equal(fields[name], part.astype(fields[name].dtype))
    if "groups" in fields:
        assert (fields["groups"].dtype, fields["groups"].tolist()) == (np.int64, [*Y[:8]])
        assert (fields["coarse"].dtype, fields["augment"]) == (np.int64, "crop-flip")


@pytest.mark.parametrize(
    ("given", "kept"), [(np.uint8, np.uint8), (np.uint16, np.int64), (">i4", np.int32)]
)
def test_inputs_are_float32_or_integers_that_torch_knows(given: Any, kept: Any) -> None:
    x = np.arange(12).reshape(6, 2).astype(given)
    inputs = fields_of((x, Y[:6], x, Y[:6]), "x.py:load")["train_x"]
    assert inputs.dtype == kept
    assert torch.from_numpy(inputs).tolist() == x.tolist()


def test_random_transforms_are_the_same_in_every_process() -> None:
    def noisy(x: Any, y: Any) -> Any:
        return x + torch.randn(1).numpy() + np.random.rand() + random.random(), y  # noqa: NPY002

    before = torch.get_rng_state().tolist(), random.getstate()
    a, b = (fields_of(datasets(noisy), "x.py:load")["train_x"] for _ in range(2))
    assert (a == b).all()
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


def test_own_pictures_may_be_augmented_and_other_inputs_not() -> None:
    pictures = np.random.default_rng(0).random((8, 3, 32, 32))
    given = {**PARTS, "train_x": pictures, "test_x": pictures[:4], "augment": "crop-24"}
    cut = data.load(offer(lambda: given))
    assert cut.test_x.shape == (4, 3, 24, 24)
    np.testing.assert_allclose(cut.test_x.reshape(4, -1).mean(1), 0, atol=1e-5)
    padded = data.load(offer(lambda: {**given, "augment": "crop-flip"}))
    assert padded.num_classes == 3
    again = data.load(offer(lambda: padded))  # a Data, with what it has counted
    np.testing.assert_array_equal(again.test_x, padded.test_x)


def test_the_pages_own_data_and_model_go_together(tmp_path: Path) -> None:
    (code,) = blocks(ROOT / "docs/data.md", "python")
    (tmp_path / "mine.py").write_text(code)
    loaded = data.load("mine.py:load", "", str(tmp_path))
    assert (len(loaded.train_y), len(loaded.test_y), loaded.groups.max()) == (800, 200, 9)
    models.check("mine.py:load", "mine.py:Net", 1, "", str(tmp_path))
