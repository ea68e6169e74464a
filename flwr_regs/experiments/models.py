"""The models of the comparison: the package's, sized by the data, and a user's own."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn

from flwr_regs.experiments import user_code
from flwr_regs.experiments.data import two_examples
from flwr_regs.experiments.quadratic import Quadratic

MODELS = {
    "auto": "cnn for images of at least 16 x 16, else mlp; cnn-bn for the data sets with domains; a point "
    "for quadratics",
    "mlp": "one hidden layer of 64; from 256 inputs on, two of 200 (McMahan et al. 2017's 2NN)",
    "cnn": "two convolutions and a hidden layer (McMahan et al. 2017); smaller below 16 x 16",
    "cnn-bn": "two convolutions and a hidden layer, with BatchNorm after each",
}
"""Name -> its meaning in one line. Any other model is a reference, such as ``mine.py:Net``."""


def build(dataset: str, kind: str, seed: int, data_dir: str = "", code_dir: str = "") -> nn.Module:
    """Return a model for a data set, its weights drawn from `seed`; torch's random state does not change.

    Parameters
    ----------
    dataset, data_dir, code_dir : str
        As for :func:`flwr_regs.experiments.data.load`.
    kind : str
        ``mlp``: one hidden layer of 64; from 256 inputs on two of 200 (McMahan et al. 2017's 2NN).
        ``cnn``: McMahan et al.'s, two 5 x 5 convolutions (32, 64) with pooling and a hidden layer of 512;
        for images smaller than 16 x 16 two 3 x 3 ones (16, 32) and 128. ``cnn-bn``: two 3 x 3 convolutions
        (16, 32) and a hidden layer of 128, with BatchNorm after each. ``auto``: cnn-bn for domains; the
        point of quadratics; else cnn for images of at least 16 x 16, and mlp for anything else. Or a
        reference to a class or function that returns a module, called without arguments.

    Raises
    ------
    ValueError
        The model does not take inputs of this shape, or a reference does not lead to a module.
    """
    if ":" in kind:
        return _own(kind, code_dir, seed)
    examples, classes = two_examples(dataset, data_dir, code_dir)
    shape = examples.shape[1:]
    if kind == "auto" and dataset.partition("(")[0] == "quadratics":
        return Quadratic(shape[0] - 1)
    side = min(shape[1:]) if len(shape) == 3 else 0
    if kind == "auto":
        kind = "cnn-bn" if dataset.endswith("-domains") else "cnn" if side >= 16 else "mlp"
    if kind != "mlp" and side < 8:
        raise ValueError(
            f"model '{kind}' needs images of shape (channels, height, width), at least 8 x 8; an input of "
            f"dataset '{dataset}' has the shape {shape}"
        )
    if examples.dtype.kind != "f":
        raise ValueError(
            f"model '{kind}' needs inputs of floats, but dataset '{dataset}' has {examples.dtype}: convert "
            "them, as in x / 255, or set model to your own, such as mine.py:Net"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "mlp":
            return _mlp(math.prod(shape), classes)
        channels, *sides = shape
        area = math.prod(edge // 4 for edge in sides)  # each of two poolings halves a side
        if kind == "cnn-bn":
            made = _cnn_bn(channels, area, classes)
        elif side < 16:
            made = _cnn(channels, 16, 32, 3, area, 128, classes)
        else:
            made = _cnn(channels, 32, 64, 5, area, 512, classes)
        return made.to(memory_format=torch.channels_last)  # 1.7 times faster on a CPU


def check(dataset: str, kind: str, seed: int, data_dir: str = "", code_dir: str = "") -> nn.Module:
    """Return :func:`build`'s model, after it has turned two examples into an output for each class.

    Raises
    ------
    ValueError
        As :func:`build` and :func:`flwr_regs.experiments.data.load` do; or the model raises, or its output
        has another shape.
    """
    examples, classes = two_examples(dataset, data_dir, code_dir)
    model = build(dataset, kind, seed, data_dir, code_dir)
    kind_of_input = f"shape {examples.shape[1:]} ({examples.dtype})"
    what = f"{len(examples)} examples of {kind_of_input} of dataset '{dataset}'"
    try:
        with user_code.seeded(seed), torch.no_grad():
            output = model.eval()(torch.from_numpy(examples))
    except Exception as error:
        raise ValueError(f"model '{kind}' fails on {what}: {user_code.said(error)}") from error
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else ()
    if len(shape) != 2 or shape[0] != len(examples) or shape[1] < classes:
        found = shape or f"a value of type {type(output).__name__}"
        raise ValueError(
            f"model '{kind}' turns {what} into {found}; expected a tensor of shape "
            f"{(len(examples), classes)}: an output for each of {classes} classes"
        )
    return model.train()


def _own(reference: str, folder: str, seed: int) -> nn.Module:
    found = user_code.load(reference, folder)
    if isinstance(found, nn.Module):
        raise ValueError(
            f"'{reference}' is a module already, with weights that no seed has drawn; expected its class, "
            "or a function that returns a new module"
        )
    model = user_code.call(reference, folder, seed)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"'{reference}' returned a value of type {type(model).__name__}; expected a torch.nn.Module"
        )
    if lazy := [n for n, p in model.named_parameters() if nn.parameter.is_lazy(p)]:
        raise ValueError(
            f"'{reference}' has the parameter '{lazy[0]}' without a size: give its layer the number of "
            "inputs"
        )
    return model


def _mlp(inputs: int, classes: int) -> nn.Module:
    widths = [inputs, *([64] if inputs < 256 else [200, 200])]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def _cnn_bn(channels: int, area: int, classes: int) -> nn.Module:
    """Two convolutions with pooling down to `area` pixels and a hidden layer, all with BatchNorm."""
    layers: list[nn.Module] = []
    for before, after in ((channels, 16), (16, 32)):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    layers += [nn.Flatten(), nn.Linear(32 * area, 128, bias=False)]
    layers += [nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, classes)]
    return nn.Sequential(*layers)


def _cnn(
    channels: int, first: int, second: int, kernel: int, area: int, hidden: int, classes: int
) -> nn.Module:
    """Two convolutions with pooling down to `area` pixels, and a hidden layer."""
    return nn.Sequential(
        nn.Conv2d(channels, first, kernel, padding=kernel // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, kernel, padding=kernel // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * area, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )
