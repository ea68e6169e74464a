"""The comparison's models: the layers of digits and MNIST to the bit, and any other shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flwr_regs.experiments import data, models


def relu(*layers: nn.Module) -> list[nn.Module]:
    """The layers, each with a ReLU behind it."""
    return [m for layer in layers for m in (layer, nn.ReLU())]


def conv(before: int, after: int, kernel: int) -> list[nn.Module]:
    return [*relu(nn.Conv2d(before, after, kernel, padding=kernel // 2)), nn.MaxPool2d(2)]


def conv_bn(before: int, after: int) -> list[nn.Module]:
    layer = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return [layer, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]


def dense_bn(inputs: int) -> list[nn.Module]:
    hidden = [nn.Linear(inputs, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU()]
    return [nn.Flatten(), *hidden, nn.Linear(128, 10)]


LAYERS: dict[tuple[str, str], Any] = {
    ("digits", "mlp"): lambda: [nn.Flatten(), *relu(nn.Linear(64, 64)), nn.Linear(64, 10)],
    ("mnist", "mlp"): lambda: [
        *(nn.Flatten(), *relu(nn.Linear(784, 200), nn.Linear(200, 200)), nn.Linear(200, 10)),
    ],
    ("digits", "cnn"): lambda: [
        *(*conv(1, 16, 3), *conv(16, 32, 3), nn.Flatten()),
        *(*relu(nn.Linear(128, 128)), nn.Linear(128, 10)),
    ],
    ("mnist", "cnn"): lambda: [
        *(*conv(1, 32, 5), *conv(32, 64, 5), nn.Flatten()),
        *(*relu(nn.Linear(3136, 512)), nn.Linear(512, 10)),
    ],
    ("digits", "cnn-bn"): lambda: [*conv_bn(1, 16), *conv_bn(16, 32), *dense_bn(128)],
    ("mnist", "cnn-bn"): lambda: [*conv_bn(1, 16), *conv_bn(16, 32), *dense_bn(1568)],
}
AUTO = {"digits": "mlp", "mnist": "cnn", "digits-domains": "cnn-bn", "mnist-domains": "cnn-bn"}


@pytest.mark.parametrize(("dataset", "kind"), LAYERS)
def test_the_packages_data_have_these_layers_and_weights(dataset: str, kind: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        want = nn.Sequential(*LAYERS[dataset, kind]())
    before = torch.get_rng_state()
    kinds = [kind, *(["auto"] if AUTO[dataset] == kind else [])]
    for named in kinds:
        got = models.check(dataset, named, 3)
        assert [type(m) for m in got] == [type(m) for m in want]
        assert got.training
        for (name, a), (other, b) in zip(
            got.state_dict().items(), want.state_dict().items(), strict=True
        ):
            assert (name, a.tolist()) == (other, b.tolist())
    assert torch.equal(torch.get_rng_state(), before)


def test_auto_is_one_kind_for_each_data_set() -> None:
    for dataset, kind in AUTO.items():
        auto, named = (models.build(dataset, k, 0).state_dict() for k in ("auto", kind))
        assert {n: a.shape for n, a in auto.items()} == {n: a.shape for n, a in named.items()}


@pytest.fixture
def shaped(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data set of given inputs, under the reference x.py:load."""

    def use(shape: tuple[int, ...], dtype: Any = np.float32, classes: int = 3) -> None:
        made = data.Data(*(np.ones((classes, *shape), dtype), np.arange(classes)) * 2)
        monkeypatch.setattr(data, "load", lambda *_: made)

    return use


@pytest.mark.parametrize(
    ("shape", "kinds", "auto"),
    [
        ((5,), ["mlp"], "mlp"),
        ((4, 7), ["mlp"], "mlp"),
        ((20, 20), ["mlp"], "mlp"),
        ((3, 8, 9), ["mlp", "cnn", "cnn-bn"], "mlp"),
        ((2, 15, 40), ["mlp", "cnn", "cnn-bn"], "mlp"),
        ((3, 16, 16), ["mlp", "cnn", "cnn-bn"], "cnn"),
        ((3, 32, 35), ["mlp", "cnn", "cnn-bn"], "cnn"),
        ((2, 3, 4, 5), ["mlp"], "mlp"),
    ],
)
def test_a_model_is_made_for_the_datas_shape(
    shape: tuple[int, ...], kinds: list[str], auto: str, shaped: Any
) -> None:
    shaped(shape)
    for kind in ("mlp", "cnn", "cnn-bn"):
        if kind not in kinds:
            with pytest.raises(
                ValueError, match=r"at least 8 x 8; an input of dataset 'x.py:load' has"
            ):
                models.check("x.py:load", kind, 0)
            continue
        assert models.check("x.py:load", kind, 0)(torch.zeros(2, *shape)).shape == (2, 3)
        built = models.build("x.py:load", kind, 0)
        names = built.state_dict().keys()
        if kind == "cnn":  # auto takes it where it is McMahan et al.'s
            assert (built[0].kernel_size == (5, 5)) == (auto == "cnn")
        assert (models.build("x.py:load", "auto", 0).state_dict().keys() == names) == (kind == auto)


@pytest.mark.parametrize("shape", [(3, 7, 32), (3, 32, 7), (28, 28, 3), (28, 28)])
def test_an_image_that_is_too_small_for_a_cnn_is_refused(shape: Any, shaped: Any) -> None:
    shaped(shape)
    with pytest.raises(
        ValueError, match=r"'cnn' needs images of shape \(channels, height, width\)"
    ):
        models.build("x.py:load", "cnn", 0)


def test_the_packages_models_refuse_integers(shaped: Any) -> None:
    shaped((1, 28, 28), np.uint8)
    with pytest.raises(
        ValueError, match=r"'mlp' needs inputs of floats.* has uint8.*as in x / 255"
    ):
        models.build("x.py:load", "mlp", 0)
