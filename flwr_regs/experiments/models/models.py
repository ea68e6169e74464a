"""The models of the comparison: the package's, sized by the data, and a user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flwr_regs.experiments import user_code
from flwr_regs.experiments.data.catalogue import kind_of
from flwr_regs.experiments.data.datasets import load, two_examples
from flwr_regs.experiments.models import body
from flwr_regs.experiments.models.architectures import NETS
from flwr_regs.experiments.models.quadratic import Quadratic


def build(
    dataset: str, kind: str, seed: int, data_dir: str = "", code_dir: str = "", projection: int = 0
) -> nn.Module:
    """Return a model for a data set, its weights drawn from `seed`; torch's random state does not change.

    Parameters
    ----------
    dataset, data_dir, code_dir : str
        As for :func:`flwr_regs.experiments.data.datasets.load`.
    kind : str
        A name of `NETS` in `flwr_regs.experiments.models.architectures`: a paper's model, sized by the
        data's inputs and classes. Or ``auto``: cnn-bn for domains, char-lstm for integers, the point of
        quadratics, cnn for images of at least 16 x 16, else mlp. Or a reference to a class or function that
        returns a module, called without arguments.
    projection : int
        If not 0, MOON's projection head before the output layer, with so many outputs: the layer
        ``projection``. A reference cannot have it.

    Raises
    ------
    ValueError
        The model does not take inputs of this shape, or a reference does not lead to a module.
    """
    if ":" in kind:
        if projection:
            raise ValueError(f"setting 'projection' does not go with your own model '{kind}'")
        return _own(kind, code_dir, seed)
    examples, classes = two_examples(dataset, data_dir, code_dir)
    shape, integers = examples.shape[1:], examples.dtype.kind in "iu"
    side = min(shape[1:]) if len(shape) == 3 else 0
    if kind == "auto":
        if dataset.partition("(")[0] == "quadratics":
            return Quadratic(shape[0] - 1)
        kind = "cnn" if side >= 16 else "char-lstm" if integers and len(shape) == 1 else "mlp"
        kind = "cnn-bn" if dataset.endswith("-domains") else kind
    net = NETS[kind]
    if net.smallest and side < net.smallest:
        raise ValueError(
            f"model '{kind}' needs images of shape (channels, height, width), at least {net.smallest} x "
            f"{net.smallest}; an input of dataset '{dataset}' has the shape {shape}"
        )
    if net.words != integers or (net.words and len(shape) != 1):
        wanted = "sequences of integers, shape (length,)" if net.words else "inputs of floats"
        hint = "" if net.words else "convert them, as in x / 255, or "
        raise ValueError(
            f"model '{kind}' needs {wanted}, but an input of dataset '{dataset}' has {examples.dtype} and "
            f"the shape {shape}: {hint}set model to another, or to your own, such as mine.py:Net"
        )
    size: list[Any] = [shape]
    if net.words:
        tokens = 0 if ":" in dataset else kind_of(dataset).tokens
        vectors = kind == "sentiment-lstm" and (":" in dataset or "vectors" in dataset)
        if vectors or not tokens:
            data = load(dataset, data_dir, code_dir)
            most = int(max(data.train_x.max(), data.test_x.max())) + 1
            tokens = tokens or max(data.num_classes, most)
        size = [tokens]
        if vectors and data.vectors is not None:
            size.append(torch.from_numpy(data.vectors.copy()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = body.model(net.make(*size), classes, projection)
    if side and kind not in ("logistic", "mlp"):
        return made.to(memory_format=torch.channels_last)  # 1.7 times faster on a CPU
    return made


def check(
    dataset: str, kind: str, seed: int, data_dir: str = "", code_dir: str = "", projection: int = 0
) -> nn.Module:
    """Return :func:`build`'s model, after it has turned two examples into an output for each class.

    Raises
    ------
    ValueError
        As :func:`build` and :func:`flwr_regs.experiments.data.datasets.load` do; or the model raises, or
        its output has another shape.
    """
    examples, classes = two_examples(dataset, data_dir, code_dir)
    model = build(dataset, kind, seed, data_dir, code_dir, projection)
    kind_of_input = f"shape {examples.shape[1:]} ({examples.dtype})"
    what = f"{len(examples)} examples of {kind_of_input} of dataset '{dataset}'"
    try:
        with user_code.seeded(seed), torch.no_grad():
            output = model.eval()(torch.from_numpy(examples))
    except Exception as error:
        raise ValueError(f"model '{kind}' fails on {what}: {user_code.said(error)}") from error
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else ()
    if len(shape) != 2 or shape[0] != len(examples) or shape[1] < classes:
        outcome = shape or f"a value of type {type(output).__name__}"
        raise ValueError(
            f"model '{kind}' turns {what} into {outcome}; expected a tensor of shape "
            f"{(len(examples), classes)}: an output for each of {classes} classes"
        )
    return model.train()


def _own(reference: str, folder: str, seed: int) -> nn.Module:
    named = user_code.load(reference, folder)
    if isinstance(named, nn.Module):
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
