"""What a term's hooks must take and return: an error names the term and the hook."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import isfunction, signature
from typing import Any

import flwr_regs.abilities as abilities
from flwr_regs.term import Arrays, Slot, Term, overrides

LOG = logging.getLogger("flwr")
_CHECKED: set[type[Term]] = set()
"""The classes that the check below has passed."""
HOOKS = ("start", "loss", "correct", "finish", "init", "broadcast", "update", "release")
_HOMES: dict[str, type] = {**dict.fromkeys(HOOKS, Term), **abilities.ABILITY_OF}
"""The class that has each hook, and each method of an ability."""


def check_hooks(term: Term) -> None:
    """Raise TypeError for a field whose default hides a method of terms, or a hook with other arguments.

    Also for a term that has but a misspelt hook. Where it has other hooks, or an ability, its method of
    such a name may be a helper: it warns once.
    """
    kind = type(term)
    if kind in _CHECKED:
        return
    for home in dict.fromkeys(_HOMES.values()):
        for n, method in vars(home).items():
            hidden = isfunction(method) and not callable(getattr(kind, n, method))
            if hidden and (n in _HOMES or home in kind.__mro__):
                what = f"{kind.__name__}.{n} is {getattr(kind, n)!r:.80}, but '{n}' is a method of terms"
                raise TypeError(f"{what}: give the field another name")
    own_hooks = [hook for hook in _HOMES if overrides(kind, hook)]
    for hook in own_hooks:
        _, *names = signature(getattr(_HOMES[hook], hook)).parameters
        takes = signature(getattr(term, hook))
        try:
            takes.bind(*names)
        except TypeError:
            raise TypeError(
                f"{kind.__name__}.{hook} must take (self, {', '.join(names)}); behind self it takes {takes}"
            ) from None
    known = {name for home in {*_HOMES.values()} for name in dir(home)}
    public = [n for n in dir(kind) if n[:1] != "_" and isfunction(getattr(kind, n))]
    near = {n: difflib.get_close_matches(n, _HOMES, 1, 0.75) for n in public if n not in known}
    meant = "".join(f"; did you mean '{m}' with '{n}'?" for n, of in near.items() for m in of)
    what = "no hook and no ability, so it changes nothing"
    if own_hooks:
        what = "a method that the package does not call (begin a helper's name with _)"
    text = f"the term {kind.__name__} has {what}{meant}"
    if meant and not own_hooks:
        raise TypeError(text)
    _CHECKED.add(kind)
    if meant or (not own_hooks and kind is not Term):
        LOG.warning("%s", text)


def several(made: Any, term: Term, hook: str, names: Sequence[str]) -> Any:
    """Return what a hook made if it is as many values as it must return; TypeError else."""
    if isinstance(made, tuple) and len(made) == len(names):
        return made
    got = f"a tuple of {len(made)}" if isinstance(made, tuple) else f"a {type(made).__name__}"
    raise TypeError(f"{type(term).__name__}.{hook} must return ({', '.join(names)}), not {got}")


def checked_step(made: Any, term: Term, hook: str, given: Arrays) -> Any:
    """Return (server slot, step) that a hook made of the `given` step; TypeError, ValueError else."""
    what = "delta" if hook == "update" else "step"
    slot, step = several(made, term, hook, ("server slot", what))
    check_like(step, given, term, hook, what)
    return slot, step


@contextmanager
def unchanged(term: Term, hook: str, *given: Arrays) -> Iterator[None]:
    """Raise TypeError if a hook, in the block, replaces the arrays that it is given, or writes to them."""
    # torch counts the writes to a tensor; under vmap the count stands still
    before = [(of, n, a, getattr(a, "_version", None)) for of in given for n, a in of.items()]
    yield
    for arrays, name, array, version in before:
        if arrays.get(name) is not array or getattr(array, "_version", None) != version:
            must = f"{type(term).__name__}.{hook} must return new arrays"
            raise TypeError(f"{must}, but changes '{name}' of what it was given")


def mapping(made: Any, term: Term, method: str) -> Any:
    """Return what a method made if it is a mapping; TypeError else."""
    if isinstance(made, Mapping):
        return made
    must = f"{type(term).__name__}.{method} must return a dict"
    raise TypeError(f"{must}, not a {type(made).__name__}")


def several_names(made: Any, term: Term, method: str) -> set[str]:
    """Return the names that a method made; TypeError for one text, or anything but names."""
    if isinstance(made, Iterable) and not isinstance(made, str):
        return {*made}
    got = f"the text {made!r}" if isinstance(made, str) else f"a {type(made).__name__}"
    raise TypeError(f"{type(term).__name__}.{method} must return several names, not {got}")


def checked_slot(slot: Any, term: Term, hook: str) -> Slot:
    """Return a slot that travels, or is kept, if it has arrays or numbers by name; TypeError else."""
    must = f"{type(term).__name__}.{hook} must return slots of arrays or numbers by name, not"
    if not isinstance(slot, Mapping):
        raise TypeError(f"{must} a {type(slot).__name__}")
    for name, value in slot.items():
        if not isinstance(name, str):
            raise TypeError(f"{must} by {name!r:.80}")
        if not isinstance(value, int | float) and not hasattr(value, "dtype"):
            raise TypeError(f"{must} a {type(value).__name__} as '{name}'")
    return slot  # type: ignore[return-value]


def check_like(made: Any, given: Arrays, term: Term, hook: str, what: str) -> None:
    """Raise TypeError or ValueError unless `made` has an array in the shape of each that was `given`.

    In the place of a whole array, `finish` and `point` may return a number.
    """
    must = f"{type(term).__name__}.{hook} must return a {what} with"
    if not isinstance(made, Mapping) or not given.keys() <= made.keys():
        names = [*made] if isinstance(made, Mapping) else made
        raise TypeError(f"{must} an array for each of {[*given]}, not {names!r:.80}")
    for name, array in given.items():
        number = () if isinstance(made[name], int | float) else None
        shape, whole = getattr(made[name], "shape", number), array.shape
        fills = hook in ("finish", "point") and shape == ()
        in_stack = hook == "correct" and shape == whole[1:]  # a stack's array without its clients
        if shape != whole and not fills and not in_stack:
            got = None if shape is None else tuple(shape)
            raise ValueError(f"{must} '{name}' of shape {tuple(whole)}, not {got}")
        tensor = hasattr(array, "detach") and number is None and hook != "finish"
        if tensor and not hasattr(made[name], "detach"):
            raise TypeError(f"{must} '{name}' as a tensor, not as a {type(made[name]).__name__}")
