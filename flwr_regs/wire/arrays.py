"""Arrays by name as they travel: names, bytes, digests, and the checks on arrival. No flwr, no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import safetensors.numpy

from flwr_regs.wire.keys import NOT_TRAINED_KEY
from flwr_regs.wire.parcel import Row
from flwr_regs.wire.text import named, quoted

NDArrays = dict[str, np.ndarray]
Arrays = Mapping[str, np.ndarray]

LARGEST = 1e15
"""The largest magnitude in a usable reply: sums of such values stay finite in any precision but half."""

PIECE = 1 << 14
"""Coordinates of a piece: in float64, a processor's cache holds those of many clients."""

OTHER_FROZEN = (
    "this client holds other frozen parameters than the others: build its model from the same pretrained "
    "weights, or give them in initial_arrays"
)


class ProtocolError(ValueError):
    """A message that the receiver cannot act on: wrong method, version, names, shapes or values."""


class ForeignStrategy(ProtocolError):
    """A message of a strategy that is not of this package, to a client that needs one."""


def plain_name(name: str) -> str:
    """Return a ``state_dict`` name without what ``torch.compile`` adds: no such names travel."""
    return name.replace("_orig_mod.", "")


def split_patterns(patterns: str | Sequence[str], what: str) -> tuple[str, ...]:
    """Return the single patterns of a text with commas, or of a sequence of such texts.

    Raises ValueError, with `what` the argument's name, for a pattern that is empty or no text.
    """
    texts = [patterns] if isinstance(patterns, str) else patterns
    if isinstance(texts, Sequence) and all(isinstance(t, str) for t in texts):
        names = [p.strip() for text in texts for p in text.split(",")]
        if all(names):
            return tuple(names)
    raise ValueError(f"{what} must be a string of names separated by commas, not {patterns!r}")


def matching(patterns: Sequence[str], names: Collection[str]) -> set[str]:
    """Return the names that any of the patterns matches; ValueError for a pattern that matches none."""
    matches = {p: {n for n in names if fnmatchcase(n, p)} for p in patterns}
    if idle := [pattern for pattern, matched in matches.items() if not matched]:
        what = f"the model's arrays {sorted(names)}"
        raise ValueError(f"the pattern '{idle[0]}' matches none of {what}")
    return set[str]().union(*matches.values())


def pack(arrays: Mapping[str, Any]) -> bytes:
    """Return the arrays (numpy, or torch on the CPU) as safetensors bytes."""
    # order="C": safetensors ignores strides and stores the buffer
    return safetensors.numpy.save({k: np.asarray(a, order="C") for k, a in arrays.items()})


def unpack(data: bytes) -> NDArrays:
    """Return what :func:`pack` packed, as writable arrays; raise ProtocolError for other bytes."""
    if not isinstance(data, bytes):
        raise ProtocolError(f"packed arrays are bytes, not {quoted(data, 40)}")
    try:
        return {k: a.copy() for k, a in safetensors.numpy.load(data).items()}
    except Exception as error:  # of the library's own kinds, or a dtype that numpy lacks
        raise ProtocolError(f"these bytes hold no packed arrays: {quoted(str(error))}") from error


def add(base: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return ``base + step`` in base's dtype; both ends use it, so both get the same bits."""
    new = np.asarray(base ^ step if base.dtype == np.bool_ else base + step)
    return new.astype(base.dtype, copy=False)


def pieces(size: int, width: int = PIECE) -> Iterator[slice]:
    """Yield the slices of a vector, at most `width` coordinates each, from first to last."""
    for start in range(0, size, width):
        yield slice(start, min(start + width, size))


def square_sum(array: np.ndarray) -> float:
    """Return the sum of an array's squares, added up in float64."""
    vector = array.reshape(-1)
    squares: list[float] = []
    for part in pieces(vector.size):
        wide = vector[part].astype(np.float64)
        squares.append(float(np.dot(wide, wide)))
    return sum(squares, 0.0)  # it rounds less than one by one, from Python 3.12 on


def digest(model: Arrays) -> str:
    """Return a fingerprint of names, shapes, dtypes and values."""
    h = hashlib.blake2b(digest_size=8)
    for name in sorted(model):
        a = np.asarray(model[name], order="C")
        h.update(f"{name}{a.dtype}{a.shape}".encode())
        h.update(a.reshape(-1).view(np.uint8).data)
    return h.hexdigest()


def in_code_order(arrays: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the named arrays in the order in which both ends code them."""
    return {name: arrays[name] for name in sorted(names)}


def statistics(names: Iterable[str]) -> list[str]:
    """Return the names of BatchNorm's statistics among `names`."""
    return sorted(n for n in names if n.rpartition(".")[2] in ("running_mean", "running_var"))


def untrainable(model: Arrays) -> frozenset[str]:
    """Return the names that no client trains, as far as names and dtypes show."""
    return frozenset([*(n for n, a in model.items() if a.dtype.kind != "f"), *statistics(model)])


def tie(arrays: NDArrays, tied: Mapping[str, str]) -> NDArrays:
    """Return `arrays`, with tied weights also under their other names.

    `tied` maps such a name to the one under which the weight is trained and coded.
    """
    return {**arrays, **{n: arrays[first] for n, first in tied.items() if first in arrays}}


def listed(buffers: Collection[str], tied: Mapping[str, str]) -> list[str]:
    """Return the arrays that a client does not train as they travel, for :func:`not_trained`."""
    return [f"{name}={tied[name]}" if name in tied else name for name in sorted(buffers)]


def not_trained(value: Any, model: Arrays) -> tuple[frozenset[str], dict[str, str]]:
    """Return (the arrays that a client does not train, its tied weights: other name -> trained name).

    `value` lists names, and ``"<other name>=<trained name>"`` for a tied weight; None: what names and
    dtypes show. Raises ProtocolError for anything else, and unless both names have one shape and dtype.
    """
    if value is None:
        return untrainable(model), {}
    listing = isinstance(value, list) and len(value) <= len(model)
    entries: list[Any] = value if listing else [None]
    tied: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, str) and entry not in model:
            other, _, tied[other] = entry.partition("=")
    buffers = frozenset(tied) | {e for e in entries if e in model}
    twice = {name: model[name] for pair in tied.items() for name in pair if name in model}
    kinds = {name: (array.shape, array.dtype) for name, array in twice.items()}
    alike = all(
        other in kinds and first not in buffers and kinds[other] == kinds.get(first)
        for other, first in tied.items()
    )
    if len(buffers) != len(entries) or not alike:
        must = "list arrays of the model, tied ones as 'other=trained' of the same shape"
        raise ProtocolError(f"'{NOT_TRAINED_KEY}' must {must}, but is {quoted(value)}")
    return buffers, tied


def check_arrays(
    arrays: Mapping[str, Any], expected: Mapping[str, Any], what: str, largest: float | None = None
) -> None:
    """Raise ProtocolError naming the first array whose name, shape or dtype is not as expected.

    Arrays are numpy or torch; `arrays` and `expected` must be of the same kind. With `largest`, numpy
    arrays are checked as by :func:`check_finite`, too; constants of `expected` may stay.
    """
    if isinstance(arrays, Row) and largest and arrays.is_usable(expected, largest):
        return
    if arrays.keys() != expected.keys():
        lacks = named(expected.keys() - arrays.keys())
        differ = f"missing {lacks}, unexpected {named(arrays.keys() - expected.keys())}"
        raise ProtocolError(f"{what}: arrays do not match the model by name: {differ}")
    for name, want in expected.items():
        got = arrays[name]
        shapes = tuple(got.shape), tuple(want.shape)
        for kind, is_, must in (("shape", *shapes), ("dtype", got.dtype, want.dtype)):
            if is_ != must:
                raise ProtocolError(f"{what}: array '{name}' has {kind} {is_}, expected {must}")
        if largest is not None:
            check_finite({name: got}, what, {name: want}, largest)


def check_finite(
    arrays: Arrays, what: str, base: Arrays | None = None, largest: float = np.inf
) -> None:
    """Raise ProtocolError naming the first array that holds NaN, infinity, or a value beyond ±`largest`.

    Integers too. A constant of `base`, such as an infinite attention mask in a buffer, may stay.
    """
    if isinstance(arrays, Row) and arrays.stack.largest < largest:
        return
    with np.errstate(all="ignore"):
        for name, a in arrays.items():
            if _within(a, largest):
                continue
            hint = "; try a smaller learning rate" * (largest < np.inf)
            constant = a == base[name] if base and name in base else np.False_
            finite = (constant | np.isfinite(a)).all()
            if not finite or not (constant | (np.abs(a.astype(np.float64)) <= largest)).all():
                wrong = f"values beyond ±{largest:g}" if finite else "NaN or infinity"
                raise ProtocolError(f"{what}: array '{name}' holds {wrong}{hint}")


def all_finite(a: np.ndarray) -> bool:
    """Return whether an array holds neither NaN nor infinity."""
    with np.errstate(all="ignore"):
        return _within(a, np.inf)


def _within(a: np.ndarray, largest: float) -> bool:
    """Whether all of an array is finite and from −`largest` to `largest`."""
    if not a.size:
        return True
    low, high = float(a.min()), float(a.max())  # NaN if one is
    return -largest <= low <= high <= largest and math.isfinite(low) and math.isfinite(high)
