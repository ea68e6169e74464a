"""The models of the comparison: the package's, sized by the data, and a user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flwr_regs.experiments import user_code
from flwr_regs.experiments.data.catalogue import kind_of
from flwr_regs.experiments.data.datasets import load, two_examples
from flwr_regs.experiments.models import layers
from flwr_regs.experiments.models.architectures import chosen


def build(
    dataset: str, kind: str, seed: int, data_dir: str = "", code_dir: str = "", projection: int = 0
) -> nn.Module:
    """Return a model for a data set, its weights drawn from `seed`; torch's random state does not change.

    Parameters
    ----------
    dataset, data_dir, code_dir : str
        As for :func:`flwr_regs.experiments.data.datasets.load`.
    kind : str
        ``auto``, or a paper's model, sized by the data's inputs and classes: a name of `MODELS` in
        `flwr_regs.experiments.models.architectures`. Or a reference to a class or function that returns a
        module, called without arguments.
    projection : int
        If not 0, MOON's projection head before the output layer, with so many outputs: the layer
        ``projection``. A reference cannot have it.

    Raises
    ------
    ValueError
        The model does not take inputs of this shape, or a reference does not lead to a module.
    """
    if ":" in kind:
        return _own(kind, code_dir, seed)
    examples, classes = two_examples(dataset, data_dir, code_dir)
    net = chosen(dataset, kind, examples)
    shape = examples.shape[1:]
    if net is None:
        return layers.Quadratic(shape[0] - 1)
    size: list[Any] = [shape]
    if net.words:
        tokens = 0 if ":" in dataset else kind_of(dataset).tokens
        vectors = net.name == "sentiment-lstm" and (":" in dataset or "vectors" in dataset)
        if vectors or not tokens:
            data = load(dataset, data_dir, code_dir)
            most = int(max(data.train_x.max(), data.test_x.max())) + 1
            tokens = tokens or max(data.num_classes, most)
        size = [tokens]
        if vectors and data.vectors is not None:
            size.append(torch.from_numpy(data.vectors.copy()))
    with user_code.seeded(seed):
        made = layers.model(net.make(*size), classes, projection)
    if len(shape) == 3 and net.family != "dense":
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
    each = f"shape {examples.shape[1:]} ({examples.dtype}) of dataset '{dataset}'"
    what = f"{len(examples)} examples of {each}"
    try:
        with user_code.seeded(seed), torch.no_grad():
            output = model.eval()(torch.from_numpy(examples))
    except Exception as error:
        raise ValueError(f"model '{kind}' fails on {what}: {user_code.said(error)}") from error
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else ()
    if len(shape) != 2 or shape[0] != len(examples) or shape[1] < classes:
        outcome = shape or f"a value of type {type(output).__name__}"
        expected = f"{(len(examples), classes)}: an output for each of {classes} classes"
        made = f"model '{kind}' turns {what} into {outcome}"
        raise ValueError(f"{made}; expected a tensor of shape {expected}")
    return model.train()


def _own(reference: str, folder: str, seed: int) -> nn.Module:
    if isinstance(user_code.load(reference, folder), nn.Module):
        drawn = "is a module already, with weights that no seed has drawn"
        expected = "expected its class, or a function that returns a new module"
        raise ValueError(f"'{reference}' {drawn}; {expected}")
    model = user_code.call(reference, folder, seed)
    if not isinstance(model, nn.Module):
        raise ValueError(f"'{reference}' returned a {type(model).__name__}, not a torch.nn.Module")
    if lazy := [n for n, p in model.named_parameters() if nn.parameter.is_lazy(p)]:
        sized = "without a size: give its layer the number of inputs"
        raise ValueError(f"'{reference}' has the parameter '{lazy[0]}' {sized}")
    return model
