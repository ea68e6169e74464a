"""A user's own data set: what its function may return, as arrays, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from flwr_regs.experiments import user_code

Array = np.ndarray[Any, Any]
NAMES = ("train_x", "train_y", "test_x", "test_y")
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
        return checked(_named(returned))
    except ValueError as error:
        raise ValueError(f"'{reference}': {error}") from error


def checked(given: Mapping[str, Any], classes: int = 0) -> dict[str, Any]:
    """Return the fields of a data set as :func:`fields_of` does, or raise what it raises.

    If it must have labels below `classes`, a class may lack training examples.
    """
    x, test_x = (_inputs(name, given[name]) for name in ("train_x", "test_x"))
    y = _whole_numbers("train_y", given["train_y"], len(x))
    test_y = _whole_numbers("test_y", given["test_y"], len(test_x))
    if x.shape[1:] != test_x.shape[1:] or x.dtype.kind != test_x.dtype.kind:
        shapes = [f"{of.shape[1:]} and type {of.dtype}" for of in (x, test_x)]
        one = f"an input of train_x has the shape {shapes[0]}"
        raise ValueError(f"{one}, but one of test_x {shapes[1]}")
    largest = int(max(y.max(), test_y.max()))
    where = "train_y" if y.max() == largest else "test_y"
    if classes:
        if largest >= classes:
            raise ValueError(f"{where} has the label {largest}; expected labels below {classes}")
    elif gaps := sorted({*range(min(largest, len(y)) + 1)} - {*y.tolist()}):
        none = f"no training example has the label {gaps[0]}, but the largest label is {largest}"
        raise ValueError(f"{none}, in {where}; expected labels from 0 on without gaps")
    counts = {"groups": len(y), "test_groups": len(test_y), "coarse": len(y)}
    more = {name: of for name, of in given.items() if name not in NAMES and of is not None}
    further = {name: _further(name, of, counts) for name, of in more.items()}
    return dict(zip(NAMES, (x, y, test_x, test_y), strict=True)) | further


def _further(name: str, value: Any, counts: Mapping[str, int]) -> Any:
    """Return what a mapping has beside the four arrays, checked."""
    if name in counts:
        return _whole_numbers(name, value, counts[name])
    if name == "vectors":
        return _inputs(name, value)
    from flwr_regs.experiments.data.augment import AUGMENTATIONS  # these load torch
    from flwr_regs.experiments.data.losses import LOSSES

    legal: dict[str, Collection[str]] = {"augment": AUGMENTATIONS, "loss": LOSSES}
    if name not in legal:
        every = ", ".join((*NAMES, *counts, *legal, "vectors"))
        raise ValueError(f"it returned a mapping with the key '{name}'; expected {every}")
    if not isinstance(value, str) or value not in legal[name]:  # an array may equal a text
        words = ", ".join(map(repr, legal[name]))
        raise ValueError(f"{name} must be one of {words}, not {value!r}")
    return value


def _named(returned: Any) -> Mapping[str, Any]:
    """Return by their names the parts of what a user's function returned."""
    if is_dataclass(returned) and not isinstance(returned, type):
        returned = {field.name: getattr(returned, field.name) for field in fields(returned)}
    if isinstance(returned, Mapping):
        if missing := [name for name in NAMES if name not in returned]:
            raise ValueError(f"it returned a mapping without '{missing[0]}'; {EXPECTED}")
        return returned
    if not isinstance(returned, list | tuple) or len(returned) not in (2, 4):
        raise ValueError(f"it returned a value of {_kind(returned)}; {EXPECTED}")
    if len(returned) == 2:
        train, test = returned
        returned = (*_pair(train, "training"), *_pair(test, "test"))
    return dict(zip(NAMES, returned, strict=True))


def _pair(part: Any, what: str) -> Any:
    """Return all inputs and labels of a pair of them, or of a map-style data set."""
    if isinstance(part, list | tuple) and len(part) == 2:
        return part
    array = isinstance(part, Mapping | list | tuple) or hasattr(part, "dtype")
    if array or not (hasattr(part, "__getitem__") and hasattr(part, "__len__")):
        raise ValueError(f"it returned a pair whose {what} part is of {_kind(part)}; {EXPECTED}")
    import torch
    from torch.utils.data import DataLoader

    from flwr_regs.client.train.batches import Keywords, Pairs

    inputs, labels = [], []
    try:
        with user_code.seeded(0):  # a random transform: the same in every process
            for x, y in Pairs(DataLoader(part, batch_size=256)):
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


def _inputs(name: str, value: Any) -> Array:
    """Return inputs in a type that torch knows, float32 or an integer type; ValueError for others."""
    x = _numpy(value)
    if x.dtype.kind not in "fiu":
        raise ValueError(f"{name} has entries of type {x.dtype}; expected floats or integers")
    if x.ndim == 0 or x.size == 0:
        raise ValueError(f"{name} has no examples: its shape is {x.shape}")
    wide = np.int64 if x.dtype.kind == "u" and x.dtype.itemsize > 1 else x.dtype.newbyteorder("=")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite
        x = np.ascontiguousarray(x, dtype=np.float32 if x.dtype.kind == "f" else wide)
    if len(wrong := np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))):
        many = f"{len(wrong)} of {len(x)} examples"
        raise ValueError(f"{name} has NaN or infinity in {many}, the first in {name}[{wrong[0]}]")
    return x


def _whole_numbers(name: str, value: Any, count: int) -> Array:
    """Return whole numbers from 0 on, one for each of `count` examples; ValueError for others."""
    y, expected = _numpy(value), f"expected one integer from 0 on for each of {count} examples"
    if y.dtype.kind not in "iu" or y.shape != (count,):
        has = f"{name} has the shape {y.shape} and entries of type {y.dtype}"
        raise ValueError(f"{has}; {expected}")
    if y.min() < 0:
        raise ValueError(f"{name} has the number {y.min()}; {expected}")
    return y.astype(np.int64)


def _kind(value: Any) -> str:
    """Describe a value by its type, and its length or shape."""
    if isinstance(value, list | tuple):
        return f"type {type(value).__name__} and length {len(value)}"
    shape = getattr(value, "shape", None)
    also = f" and shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"type {type(value).__name__}{also}"
