"""A user's own data set: what its function may return, as arrays, checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from flwr_regs.experiments import user_code

Array = np.ndarray[Any, Any]
NAMES = ("train_x", "train_y", "test_x", "test_y")
NUMBERS = {"groups": "train_y", "test_groups": "test_y", "coarse": "train_y"}
"""Whole numbers that a data set may have for each example -> the labels of these examples."""
EXPECTED = (
    "expected (train_x, train_y, test_x, test_y), ((train_x, train_y), (test_x, test_y)), two "
    "map-style datasets (train, test), or a dict with these four names and groups"
)


def fields_of(returned: Any, reference: str) -> dict[str, Any]:
    """Return the fields of `flwr_regs.experiments.data.datasets.Data` of what a user's function returned.

    Parameters
    ----------
    returned : tuple, mapping or Data
        Four arrays or tensors; or two pairs of them, one for training and one for testing; or two map-style
        data sets, whose items are pairs (input, label) or mappings with one input and one label (under a
        usual key, see `flwr_regs.client.train.batches.TARGET_KEYS`). Or a mapping with the four names, and
        any other field of `Data`, such as ``groups``; or a `Data`.
    reference : str
        What returned it; messages begin with it.

    Returns
    -------
    dict
        Inputs in float32 or integers, of any shape ``(n, ...)``; labels in int64, ``(n,)``; and what else
        was given.

    Raises
    ------
    ValueError
        It is something else; or a part is empty, its lengths or shapes differ, an input is not finite, a
        label or group is no integer from 0 on, a class has no training example, or a name is another.
    """
    try:
        return _checked(returned)
    except ValueError as error:
        raise ValueError(f"'{reference}': {error}") from error


def _checked(returned: Any) -> dict[str, Any]:
    given = returned
    if is_dataclass(returned) and not isinstance(returned, type):
        given = {field.name: getattr(returned, field.name) for field in fields(returned)}
    if isinstance(given, Mapping) and (missing := [name for name in NAMES if name not in given]):
        raise ValueError(f"it returned a mapping without '{missing[0]}'; {EXPECTED}")
    named = isinstance(given, Mapping)
    four = [given[name] for name in NAMES] if named else _four(given)
    x, y, test_x, test_y = parts = [_numpy(part) for part in four]
    for name, part in zip(NAMES, parts, strict=True):
        if name.endswith("x"):
            _check_inputs(name, part)
        else:
            _check_labels(name, part, None)
    for what, inputs, labels in (("train", x, y), ("test", test_x, test_y)):
        if len(inputs) != len(labels):
            raise ValueError(
                f"{what}_x has {len(inputs)} examples, but {what}_y has {len(labels)} labels"
            )
    if x.shape[1:] != test_x.shape[1:] or x.dtype.kind != test_x.dtype.kind:
        shapes = [f"{of.shape[1:]} and type {of.dtype}" for of in (x, test_x)]
        raise ValueError(
            f"an input of train_x has the shape {shapes[0]}, but one of test_x {shapes[1]}"
        )
    classes = int(max(y.max(), test_y.max())) + 1
    if gaps := sorted(set(range(min(classes, len(y) + 1))) - set(y.tolist())):
        raise ValueError(
            f"no training example has the label {gaps[0]}, but the largest label is {classes - 1}; "
            "expected labels from 0 on without gaps"
        )
    four = [_plain(x), y.astype(np.int64), _plain(test_x), test_y.astype(np.int64)]
    made = dict(zip(NAMES, four, strict=True))
    return {**made, **_further(given, made)} if named else made


def _further(given: Mapping[str, Any], four: Mapping[str, Array]) -> dict[str, Any]:
    """Return what a mapping has beside the four arrays, checked."""
    from flwr_regs.experiments.data.augment import AUGMENTATIONS  # these load torch
    from flwr_regs.experiments.data.losses import LOSSES

    legal: dict[str, Collection[str]] = {"augment": AUGMENTATIONS, "loss": LOSSES}
    more: dict[str, Any] = {}
    for key, value in given.items():
        if key in NAMES or value is None:
            continue
        if key in NUMBERS:
            more[key] = _numpy(value)
            _check_labels(key, more[key], len(four[NUMBERS[key]]))
            more[key] = more[key].astype(np.int64)
        elif key in legal:
            if value not in legal[key]:
                raise ValueError(
                    f"{key} must be one of {', '.join(map(repr, legal[key]))}, not {value!r}"
                )
            more[key] = value
        elif key == "vectors":
            more[key] = _plain(_numpy(value))
        else:
            every = ", ".join((*NAMES, *NUMBERS, *legal, "vectors"))
            raise ValueError(f"it returned a mapping with the key '{key}'; expected {every}")
    return more


def _four(returned: Any) -> Iterator[Any]:
    """Yield the four parts of what a user's function returned."""
    if isinstance(returned, list | tuple) and len(returned) == 4:
        yield from returned
        return
    if not isinstance(returned, list | tuple) or len(returned) != 2:
        raise ValueError(f"it returned a value of {_kind(returned)}; {EXPECTED}")
    for part, what in zip(returned, ("training", "test"), strict=True):
        if isinstance(part, list | tuple) and len(part) == 2:
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
    wrong = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))
    if len(wrong):
        raise ValueError(
            f"{name} has NaN or infinity in {len(wrong)} of {len(x)} examples, the first in {name}"
            f"[{wrong[0]}]"
        )


def _check_labels(name: str, y: Array, count: int | None) -> None:
    """Check that these are whole numbers from 0 on: labels, or one for each of `count` examples."""
    if y.dtype.kind not in "iu" or y.ndim != 1 or count not in (None, len(y)):
        each = "each example, shape (n,)" if count is None else f"each of {count} examples"
        raise ValueError(
            f"{name} has the shape {y.shape} and entries of type {y.dtype}; expected one integer from 0 "
            f"on for {each}"
        )
    if y.size and y.min() < 0:
        what = "label" if count is None else "number"
        raise ValueError(f"{name} has the {what} {y.min()}; expected integers from 0 on")


def _plain(x: Array) -> Array:
    """Return inputs in a type that torch knows: float32, or an integer type."""
    if x.dtype.kind == "f":
        return np.ascontiguousarray(x, dtype=np.float32)
    wide = x.dtype.kind == "u" and x.dtype.itemsize > 1
    return np.ascontiguousarray(x, dtype=np.int64 if wide else x.dtype.newbyteorder("="))


def _kind(value: Any) -> str:
    """Describe a value by its type, and its length or shape."""
    if isinstance(value, list | tuple):
        return f"type {type(value).__name__} and length {len(value)}"
    shape = getattr(value, "shape", None)
    also = f" and shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"type {type(value).__name__}{also}"
