"""A user's own data set: what its function may return, as arrays, checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from flwr_regs.experiments import user_code

Array = np.ndarray[Any, Any]
NUMBERS = {"groups": "train_y", "test_groups": "test_y", "coarse": "train_y"}
"""Whole numbers that a data set may have for each example -> the labels of these examples."""
NAMES = ("train_x", "train_y", "test_x", "test_y")
EXPECTED = (
    "expected (train_x, train_y, test_x, test_y), ((train_x, train_y), (test_x, test_y)), two "
    "map-style datasets (train, test), or a dict with these four names and groups"
)


def fields_of(found: Any, reference: str) -> dict[str, Any]:
    """Return the fields of :class:`flwr_regs.experiments.data.arrays.Data` of what a user's function returned.

    Parameters
    ----------
    found : tuple, mapping or Data
        What :func:`arrays` takes; or a mapping with the four names, and any other field of `Data`, such as
        ``groups``; or a `Data`.
    reference : str
        What returned it; messages begin with it.

    Raises ValueError as :func:`arrays` does, or for another name, or groups that do not fit their examples.
    """
    given = found
    if is_dataclass(found) and not isinstance(found, type):
        given = {field.name: getattr(found, field.name) for field in fields(found)}
    if not isinstance(given, Mapping):
        return dict(zip(NAMES, arrays(found, reference), strict=True))
    if missing := [name for name in NAMES if name not in given]:
        raise ValueError(f"'{reference}': it returned a mapping without '{missing[0]}'; {EXPECTED}")
    four = dict(zip(NAMES, arrays([given[name] for name in NAMES], reference), strict=True))
    try:
        return {**four, **_further(given, {key: len(four[of]) for key, of in NUMBERS.items()})}
    except ValueError as error:
        raise ValueError(f"'{reference}': {error}") from error


def _further(given: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return what a mapping has beside the four arrays, checked; `lengths` are those that are expected."""
    from flwr_regs.experiments.data.augment import AUGMENTATIONS  # these load torch
    from flwr_regs.experiments.data.losses import LOSSES

    legal: dict[str, Collection[str]] = {"augment": AUGMENTATIONS, "loss": LOSSES}
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key in NAMES or value is None:
            continue
        if key in NUMBERS:
            found[key] = _numbers(key, _numpy(value), lengths[key])
        elif key in legal:
            if value not in legal[key]:
                raise ValueError(
                    f"{key} must be one of {', '.join(map(repr, legal[key]))}, not {value!r}"
                )
            found[key] = value
        elif key == "vectors":
            found[key] = _plain(_numpy(value))
        else:
            every = ", ".join((*NAMES, *NUMBERS, *legal, "vectors"))
            raise ValueError(f"it returned a mapping with the key '{key}'; expected {every}")
    return found


def _numbers(name: str, of: Array, count: int) -> Array:
    """Return whole numbers from 0 on, one for each example."""
    if of.dtype.kind not in "iu" or of.shape != (count,) or of.min() < 0:
        raise ValueError(
            f"{name} has the shape {of.shape} and entries of type {of.dtype}; expected one integer from 0 "
            f"on for each of {count} examples"
        )
    return of.astype(np.int64)


def arrays(found: Any, reference: str) -> tuple[Array, Array, Array, Array]:
    """Return training inputs, training labels, test inputs and test labels.

    Parameters
    ----------
    found : tuple
        Four arrays or tensors; or two pairs of them, one for training and one for testing; or two map-style
        data sets, whose items are pairs (input, label) or mappings with one input and one label (under a
        usual key, see `flwr_regs.client.train.batches.TARGET_KEYS`).
    reference : str
        What returned it; messages begin with it.

    Returns
    -------
    tuple of numpy.ndarray
        Inputs in float32 or integers, of any shape ``(n, ...)``; labels in int64, ``(n,)``.

    Raises
    ------
    ValueError
        It is something else; or a part is empty, its lengths or shapes differ, an input is not finite, a
        label is no integer from 0 on, or a class has no training example.
    """
    try:
        parts = [_numpy(part) for part in _four(found)]
        for name, part in zip(NAMES, parts, strict=True):
            (_check_inputs if name.endswith("x") else _check_labels)(name, part)
        _check_together(*parts)
    except ValueError as error:
        raise ValueError(f"'{reference}': {error}") from error
    train_x, train_y, test_x, test_y = parts
    return _plain(train_x), train_y.astype(np.int64), _plain(test_x), test_y.astype(np.int64)


def _four(found: Any) -> Iterator[Any]:
    """Yield the four parts of what a user's function returned."""
    if isinstance(found, list | tuple) and len(found) == 4:
        yield from found
        return
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise ValueError(f"it returned a value of {_kind(found)}; {EXPECTED}")
    pairs = [isinstance(part, list | tuple) and len(part) == 2 for part in found]
    for part, pair, what in zip(found, pairs, ("training", "test"), strict=True):
        if pair:
            yield from part
        elif (
            isinstance(part, Mapping | list | tuple)
            or hasattr(part, "dtype")
            or not (hasattr(part, "__getitem__") and hasattr(part, "__len__"))
        ):
            raise ValueError(
                f"it returned a pair whose {what} part is of {_kind(part)}; {EXPECTED}"
            )
        else:
            yield from _collected(part, what)


def _collected(dataset: Any, what: str) -> tuple[Any, Any]:
    """Return all inputs and labels of a map-style data set."""
    import torch
    from torch.utils.data import DataLoader

    from flwr_regs.client.train.batches import Keywords, Pairs

    inputs, labels = [], []
    try:
        with user_code.seeded(0):  # a random transform: the same in every process
            for x, y in Pairs(DataLoader(dataset, batch_size=256)):
                if isinstance(x, Keywords):
                    raise ValueError(f"an item has several inputs {list(x)}; expected one")
                inputs.append(torch.as_tensor(x))
                labels.append(torch.as_tensor(y))
            if inputs:
                return torch.cat(inputs), torch.cat(labels)
    except Exception as error:  # a user's __getitem__ may raise anything
        raise ValueError(f"reading the {what} data failed: {user_code.said(error)}") from error
    raise ValueError(f"the {what} data has no examples")


def _numpy(part: Any) -> Array:
    if hasattr(part, "detach"):  # a tensor
        part = part.detach().cpu()
        part = part.float() if part.is_floating_point() else part  # numpy has no bfloat16
    try:
        return np.asarray(part)
    except ValueError as error:  # a list of lists of different lengths
        raise ValueError(f"a value of {_kind(part)} is no array: {error}") from error


def _check_inputs(name: str, x: Array) -> None:
    if x.dtype.kind not in "fiu":
        raise ValueError(f"{name} has entries of type {x.dtype}; expected floats or integers")
    if x.ndim == 0 or x.size == 0:
        raise ValueError(f"{name} has no examples: its shape is {x.shape}")
    if x.dtype.kind == "f":
        wrong = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))
        if len(wrong):
            raise ValueError(
                f"{name} has NaN or infinity in {len(wrong)} of {len(x)} examples, the first in {name}"
                f"[{wrong[0]}]"
            )


def _check_labels(name: str, y: Array) -> None:
    if y.dtype.kind not in "iu" or y.ndim != 1:
        raise ValueError(
            f"{name} has the shape {y.shape} and entries of type {y.dtype}; expected one integer from 0 on "
            "for each example, shape (n,)"
        )
    if len(y) and y.min() < 0:
        raise ValueError(f"{name} has the label {y.min()}; expected integers from 0 on")


def _check_together(train_x: Array, train_y: Array, test_x: Array, test_y: Array) -> None:
    for what, x, y in (("train", train_x, train_y), ("test", test_x, test_y)):
        if len(x) != len(y):
            raise ValueError(f"{what}_x has {len(x)} examples, but {what}_y has {len(y)} labels")
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype.kind != test_x.dtype.kind:
        shapes = [f"{x.shape[1:]} and type {x.dtype}" for x in (train_x, test_x)]
        raise ValueError(
            f"an input of train_x has the shape {shapes[0]}, but one of test_x {shapes[1]}"
        )
    classes = int(max(train_y.max(), test_y.max())) + 1
    if missing := sorted(set(range(min(classes, len(train_y) + 1))) - set(train_y.tolist())):
        raise ValueError(
            f"no training example has the label {missing[0]}, but the largest label is {classes - 1}; "
            "expected labels from 0 on without gaps"
        )


def _plain(x: Array) -> Array:
    """Return inputs in a type that torch knows: float32, or an integer type."""
    if x.dtype.kind == "f":
        return np.ascontiguousarray(x, dtype=np.float32)
    wide = x.dtype.kind == "u" and x.dtype.itemsize > 1
    return np.ascontiguousarray(x, dtype=np.int64 if wide else x.dtype.newbyteorder("="))


def _kind(found: Any) -> str:
    """Describe a value by its type, and its length or shape."""
    if isinstance(found, list | tuple):
        return f"type {type(found).__name__} and length {len(found)}"
    shape = getattr(found, "shape", None)
    also = f" and shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"type {type(found).__name__}{also}"
