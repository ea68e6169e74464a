"""Plain values as JSON and arrays, and back to the bit: what a checkpoint is written in. No pickle.

JSON holds None, booleans, integers, finite floats, texts, lists, and dicts with texts as keys. Everything
else is an object with one key, its tag: ``{"$tuple": [...]}``. Arrays and bytes are in a safetensors file
beside, under the names that their tags hold.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from flwr_regs.wire.npy import PLAIN

Store = dict[str, np.ndarray]
"""The arrays and bytes of values, equal ones once: digest -> array."""


def to_json(value: Any, store: Store, where: str = "the value") -> Any:
    """Return a value as JSON can hold it; its arrays and bytes go to `store`.

    Raises TypeError naming the place of a value that cannot be kept, such as a function.
    """
    if isinstance(value, np.generic | np.ndarray):
        return _array(value, store, where)
    if value is None or isinstance(value, bool | int | str):
        return value if type(value) in (type(None), bool, int, str) else _refuse(value, where)
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, bytes):
        return {"$bytes": _stored(np.frombuffer(value, np.uint8), store)}
    if isinstance(value, list | tuple):
        items = [to_json(v, store, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, set | frozenset):
        items = [to_json(v, store, where) for v in value]
        items.sort(key=json.dumps)  # one order for equal sets
        return {f"${type(value).__name__}": items}
    if isinstance(value, Mapping):
        pairs = [(k, to_json(v, store, f"{where}[{k!r}]")) for k, v in value.items()]
        if all(type(k) is str and not k.startswith("$") for k, _ in pairs):
            return dict(pairs)
        return {"$dict": [[to_json(k, store, where), v] for k, v in pairs]}
    return _refuse(value, where)


def from_json(value: Any, arrays: dict[str, Any]) -> Any:
    """Return the value that :func:`to_json` returned as `value`; mappings come back as dicts.

    Raises ValueError for what it never returns.
    """
    if isinstance(value, list):
        return [from_json(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    tag = next((k for k in value if k.startswith("$")), None)
    if tag is None:
        return {k: from_json(v, arrays) for k, v in value.items()}
    if tag not in _TAGS or len(value) != 1:
        raise ValueError(f"{value!r:.80} is no value")
    try:
        return _TAGS[tag](value[tag], arrays)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{value!r:.80} is no value") from error


def _array(value: Any, store: Store, where: str) -> dict[str, Any]:
    if value.dtype not in PLAIN:  # which safetensors has
        _refuse(value, where)
    if isinstance(value, np.generic):
        return {"$scalar": _stored(value, store)}
    turned = value.flags.f_contiguous and not value.flags.c_contiguous  # sums depend on the order
    return {"$array": [_stored(value.T, store), "T"] if turned else [_stored(value, store)]}


def _stored(value: Any, store: Store) -> str:
    """Put an array into the store; return its name there."""
    array = np.asarray(value, order="C")
    digest = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=16)
    digest.update(array.reshape(-1).view(np.uint8).data)
    store[name := digest.hexdigest()] = array
    return name


def _read_array(parts: Any, arrays: dict[str, Any]) -> np.ndarray:
    name, *turned = parts
    array = np.array(arrays[name])
    return array.T if turned else array


_TAGS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "$float": lambda v, _: float(v),
    "$bytes": lambda v, arrays: arrays[v].tobytes(),
    "$tuple": lambda v, arrays: tuple(from_json(v, arrays)),
    "$set": lambda v, arrays: set(from_json(v, arrays)),
    "$frozenset": lambda v, arrays: frozenset(from_json(v, arrays)),
    "$dict": lambda v, arrays: {from_json(k, arrays): from_json(x, arrays) for k, x in v},
    "$array": _read_array,
    "$scalar": lambda v, arrays: arrays[v][()],
}


def _refuse(value: Any, where: str) -> Any:
    raise TypeError(
        f"{where} is {value!r:.80} of type {type(value).__name__}; only numbers, texts, bytes, arrays, and "
        "lists and dicts of these can be saved"
    )
