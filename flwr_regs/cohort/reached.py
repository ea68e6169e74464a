"""The Python values that a model, a loss or a method can reach, and may change as it runs.

In a stack they are called once for all clients. So what counts, schedules or draws in Python would do so
for all of them together. Plain torch.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import is_
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flwr_regs.cohort.alike import TORCHS, alike

OLD = "_bit_generator"
"""The generator of numpy's RandomState."""
MOST = 10_000
"""Values that are looked at."""
LONG = 100
"""Entries of a container that are looked at."""
LARGE = 2**16
"""Numbers of an array, or entries of a container, that are copied, so that they can be put back."""
MANY = 2**10
"""Entries of a container that are all looked at where arrays are not; of a longer list, some are. Data sets
have tens of thousands, and each client looks."""
_LIBRARIES = {
    *("abc", "builtins", "collections", "dataclasses", "enum", "flwr", "functools", "logging"),
    *("numpy", "pandas", "scipy", "threading", "torch", "torchvision", "transformers", "types"),
    "typing",
}
"""Packages whose objects and functions are not looked into."""
_ATOMS = (int, float, complex, str, bytes, bool, type(None))
_PLAIN = (*_ATOMS, list, dict, set, deque)
_Restore = Callable[[], bool]
"""Puts a value back; returns whether it had changed."""


class Reached:
    """What can be reached from some values: attributes, containers, closures, globals, generators.

    Parameters
    ----------
    roots : iterable
        Models, losses, factories, terms. The values of a model's tensors are not among what is reached.
    model : nn.Module, optional
        One whose buffers are put back by whoever calls it.
    copies : bool
        False: of arrays nothing is kept, so they cannot be put back.
    """

    def __init__(
        self, roots: Iterable[Any], model: nn.Module | None = None, copies: bool = True
    ) -> None:
        self._copies = copies
        self._mine = set(map(id, () if model is None else model.modules()))
        self._seen: dict[int, Any] = {}
        self._restores: list[_Restore] = []
        waiting = deque(roots)
        while waiting and len(self._seen) < MOST:
            value = waiting.popleft()
            if isinstance(value, _ATOMS) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value  # else another value may get its id
            waiting.extend(self._note(value))

    def restore(self) -> bool:
        """Put all back as it was; return whether anything had changed."""
        changed = [back() for back in self._restores]
        return any(changed)

    def _note(self, value: Any) -> Iterator[Any]:
        """Note how a value can be put back; yield what it holds."""
        if isinstance(value, nn.Module):
            yield from self._module(value)
        elif isinstance(value, FunctionType):
            yield from self._function(value)
        elif isinstance(value, MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, dict | list | deque | set):
            if len(value) <= (LARGE if self._copies else MANY):
                yield from self._container(value)
            elif not self._copies:
                copy = value.copy() if isinstance(value, list) and len(value) <= LARGE else None
                self._restores.append(partial(_reset_long, value, len(value), copy))
        elif isinstance(value, tuple | frozenset):
            yield from value if len(value) <= LONG else ()
        elif isinstance(value, Tensor | np.ndarray):
            self._array(value)
        elif isinstance(value, random.Random):
            self._restores.append(partial(_again, value.getstate, value.setstate, value.getstate()))
        elif isinstance(value, torch.Generator):
            self._restores.append(partial(_drawn, value, value.get_state()))
        elif isinstance(value, np.random.Generator | np.random.RandomState):
            bits: Any = getattr(value, "bit_generator", None) or getattr(value, OLD)
            self._restores.append(partial(_reset, bits, bits.state))
        elif isinstance(value, type):
            if not _of_library(value):
                yield from self._class(value)
        elif not _is_closed(type(value)):
            if isinstance(held := getattr(value, "__dict__", None), dict):
                yield from self._dict(held, list(held))
            yield type(value)

    def _module(self, module: nn.Module) -> Iterator[Any]:
        held = vars(module)
        yield from self._dict(held, [n for n in held if n not in TORCHS], skipped=TORCHS)
        if id(module) not in self._mine:
            buffers = module._buffers
            yield from self._dict(buffers, list(buffers))
        yield from module._modules.values()
        yield from [h for n, hooks in held.items() if n.endswith("_hooks") for h in hooks.values()]
        yield type(module)

    def _function(self, function: FunctionType) -> Iterator[Any]:
        if function.__module__ and function.__module__.partition(".")[0] in _LIBRARIES:
            return
        for cell in function.__closure__ or ():
            try:
                before = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._restores.append(partial(_refill_cell, cell, before))
            yield before
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        names = [n for n in _names(function.__code__) if n in function.__globals__]
        yield from self._dict(function.__globals__, names, whole=False)

    def _dict(
        self, held: dict[Any, Any], keys: list[Any], skipped: Iterable[Any] = (), whole: bool = True
    ) -> Iterator[Any]:
        """Note a dict, or some of its keys only; whoever calls it for all of them leaves some out."""
        before = {key: held[key] for key in keys}
        self._restores.append(partial(_refill, held, before, skipped, whole))
        yield from before.values()

    def _container(self, value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            entries = list(self._dict(value, list(value)))
        else:
            self._restores.append(partial(_refilled, value, value.copy()))
            entries = list(value)
        yield from entries if len(entries) <= LONG else ()

    def _class(self, kind: type) -> Iterator[Any]:
        """Note the values that a class has for all its objects; yield them, its functions and its bases."""
        held = vars(kind)
        values = {n: v for n, v in held.items() if not n.startswith("_") and isinstance(v, _PLAIN)}
        self._restores.append(partial(_reset_class, kind, values))
        yield from values.values()
        yield from [f for f in held.values() if isinstance(f, FunctionType)]
        yield from kind.__bases__

    def _array(self, value: Any) -> None:
        size = value.numel() if isinstance(value, Tensor) else value.size
        if isinstance(value, nn.Parameter) or not size:
            return
        if isinstance(value, Tensor):
            copy = value.detach().clone() if self._copies and size <= LARGE else None
            self._restores.append(partial(_overwritten, value, value._version, copy))
        elif self._copies and size <= LARGE and value.dtype != object:
            self._restores.append(partial(_rewritten, value, value.copy()))


def _of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _LIBRARIES or kind.__module__.startswith(
        "flwr_regs"
    )


def _is_closed(kind: type) -> bool:
    """Whether the attributes of such objects are not looked at; those of data sets and samplers are."""
    return _of_library(kind) and not kind.__module__.startswith(
        ("torch.utils.data.", "torchvision.")
    )


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function may look up, those in it too."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    try:
        return bool(alike(one) == alike(other))
    except Exception:  # of whatever compares so
        return False


def _refill(held: dict[Any, Any], before: dict[Any, Any], skipped: Any, whole: bool) -> bool:
    if held.keys() == before.keys() and all(map(is_, held.values(), before.values())):
        return False  # quick: there may be many
    mine = [k for k in held if k not in skipped] if whole else [k for k in before if k in held]
    if len(mine) == len(before) and all(k in before and _same(held[k], before[k]) for k in mine):
        return False
    for key in mine:
        if key not in before:
            del held[key]
    held.update(before)
    return True


def _reset_class(kind: type, before: dict[str, Any]) -> bool:
    changed = [n for n, v in before.items() if not _same(vars(kind).get(n), v)]
    for n in changed:
        setattr(kind, n, before[n])
    return bool(changed)


def _refilled(value: Any, before: Any) -> bool:
    if len(value) == len(before):
        if isinstance(value, set):  # in no order
            same = value == before
        else:  # the first is quick: there may be many
            same = all(map(is_, value, before)) or all(map(_same, value, before))
        if same:
            return False
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(before)
    return True


def _reset_long(value: Any, length: int, before: list[Any] | None) -> bool:
    some = slice(None, None, max(length // LONG, 1))
    if len(value) == length and (before is None or all(map(is_, value[some], before[some]))):
        return False
    if before is not None:
        value[:] = before
    return True


def _refill_cell(cell: Any, before: Any) -> bool:
    changed = not _same(cell.cell_contents, before)
    cell.cell_contents = before
    return changed


def _overwritten(tensor: Tensor, version: int, before: Tensor | None) -> bool:
    if tensor._version == version:
        return False
    if before is not None:
        with torch.no_grad():
            tensor.copy_(before)
    return True


def _rewritten(array: np.ndarray, before: np.ndarray) -> bool:
    if np.array_equal(array, before, equal_nan=array.dtype.kind in "fc"):
        return False
    array[...] = before
    return True


def _again(get: Callable[[], Any], put: Callable[[Any], None], before: Any) -> bool:
    if get() == before:
        return False
    put(before)
    return True


def _drawn(generator: torch.Generator, before: Tensor) -> bool:
    if torch.equal(generator.get_state(), before):
        return False
    generator.set_state(before)
    return True


def _reset(bits: Any, before: Any) -> bool:
    if pickle.dumps(bits.state) == pickle.dumps(before):
        return False
    bits.state = before
    return True
