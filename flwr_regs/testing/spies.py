"""Looks over a run's shoulder: what its hooks are given and return, and each client's round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, is_dataclass
from inspect import signature
from typing import Any
from unittest import mock

import numpy as np
import torch

from flwr_regs.abilities import ABILITIES
from flwr_regs.client import member
from flwr_regs.client.local_training import LocalResult, local_round
from flwr_regs.hook_checks import HOOKS
from flwr_regs.term import Term

CHECKED = (
    *HOOKS,
    *("evolve", "point", "optimizer_start", "probe", "personal", "encode", "unused", "recover"),
    *("weigh", "fold", "answer", "answer_in", "broadcast_to"),
)
"""The hooks, and methods of abilities, that must be pure."""
ARGUMENTS = {  # hook -> its arguments, as Term and the abilities have them
    hook: [*signature(getattr(kind, hook)).parameters][1:]
    for kind in (*ABILITIES, Term)
    for hook in CHECKED
    if hasattr(kind, hook)
}
HANDED_ON = {  # the arguments that a hook may return, or return parts of, without a copy
    "start": ("params", "ctx.start"),
    "loss": ("base",),
    "correct": ("grads",),
    "finish": ("delta", "ctx.client", "ctx.broadcast", "ctx.optimizer_state"),
    **dict.fromkeys(("broadcast", "broadcast_to"), ("server",)),
    "update": ("server", "delta", "uploads"),
    "release": ("server", "step"),
    "fold": ("acc", "upload"),
    "probe": ("ctx.client",),
    **dict.fromkeys(("answer", "answer_in"), ("probes",)),
    "personal": ("params", "ctx.start", "ctx.client"),
    "unused": ("before", "after"),
    "point": ("params",),
    "optimizer_start": ("ctx.broadcast", "ctx.client"),
}
Hook = Callable[..., Any]
Spy = Callable[[Term, str, Hook, tuple[Any, ...]], Any]


@contextmanager
def spied(terms: Sequence[Term], hooks: Iterable[str], spy: Spy) -> Iterator[None]:
    """Within this block ``spy(term, hook, original, arguments)`` runs in place of the terms' own hooks."""
    with ExitStack() as stack:
        for kind in {type(t) for t in terms}:
            for hook in hooks:
                original = getattr(kind, hook, None)
                if original is not None and original is not getattr(Term, hook, None):
                    spying = _as_hook(hook, original, spy)
                    stack.enter_context(mock.patch.object(kind, hook, spying))
        yield


def _as_hook(hook: str, original: Hook, spy: Spy) -> Hook:
    def method(self: Term, *args: Any, **kwargs: Any) -> Any:
        named = [kwargs[name] for name in ARGUMENTS[hook][len(args) :] if name in kwargs]
        return spy(self, hook, original, (*args, *named))

    return method


def impurities(faults: list[str]) -> Spy:
    """Return a spy that notes in `found` each hook that is not a pure function of its arguments."""

    def spy(term: Term, hook: str, original: Hook, args: tuple[Any, ...]) -> Any:
        who = f"'{term.name}' in `{hook}`"
        named = [*zip(ARGUMENTS[hook], args, strict=True)]
        leaves = dict(leaf for name, value in named for leaf in _leaves(value, name))
        inputs = {path: a for path, a in leaves.items() if isinstance(a, np.ndarray | torch.Tensor)}
        before = {path: _as_numpy(a).copy() for path, a in inputs.items()}
        again = (copy.deepcopy(args[0]), *args[1:]) if hook == "fold" else args
        out = original(term, *args)
        now = dict(leaf for name, value in named for leaf in _leaves(value, name))
        fixed = [p for p in {**leaves, **now} if not (hook == "fold" and _within(p, "acc"))]
        changed = [p for p in fixed if now.get(p) is not leaves.get(p)]  # an entry is another
        changed += [p for p in fixed if p in inputs and not _equal(inputs[p], before[p])]
        faults.extend(f"{who} changes {path} in place" for path in changed)
        results = dict(_leaves(out, "its result"))
        for path, a in results.items():
            for source, b in inputs.items():
                handed = any(_within(source, name) for name in HANDED_ON.get(hook, ()))
                if not handed and _share(a, b):
                    faults.append(f"{who}: {path} shares memory with {source}, expected a copy")
        if not changed:
            second = dict(_leaves(original(term, *again), "its result"))
            other = [p for p in results if p not in second or not _equal(results[p], second[p])]
            if other or second.keys() != results.keys():
                faults.append(
                    f"{who} gives another result the second time ({', '.join(other) or 'other entries'}):"
                    " it keeps something outside its slots, or draws random numbers"
                )
        return out

    return spy


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield what nested containers hold, with its place; functions are left out."""
    if isinstance(value, Mapping):
        parts = [(f"{path}[{k!r}]", v) for k, v in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    elif is_dataclass(value):
        shown = [f.name for f in fields(value) if not f.name.startswith("_")]
        parts = [(f"{path}.{name}", getattr(value, name)) for name in shown]
    else:
        if not callable(value):
            yield path, value
        return
    for place, part in parts:
        yield from _leaves(part, place)


def _within(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}[", f"{name}."))


def _as_numpy(value: Any) -> Any:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _equal(a: Any, b: Any) -> bool:
    a, b = _as_numpy(a), _as_numpy(b)
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f"))


def _share(a: Any, b: Any) -> bool:
    arrays = isinstance(a, np.ndarray | torch.Tensor)
    return arrays and bool(np.may_share_memory(_as_numpy(a), _as_numpy(b)))


@dataclass(frozen=True)
class LocalCall:
    """One client's round as the package's client ran it: the arguments of `local_round` and its result.

    `weights` are the model's ``state_dict`` before it; `settings` the keyword arguments.
    """

    term: Term
    weights: dict[str, torch.Tensor]
    data: Any
    settings: dict[str, Any]
    result: LocalResult

    @property
    def client(self) -> int:
        """The client's partition id."""
        return int(self.settings["client_id"])


@contextmanager
def recorded(calls: list[LocalCall]) -> Iterator[None]:
    """Within this block every round of a RegClient is noted in `calls`."""

    def spy(model: Any, term: Any, data: Any, **settings: Any) -> LocalResult:
        weights = {n: v.clone() for n, v in model.state_dict().items()}
        kept = copy.deepcopy({n: settings[n] for n in ("broadcast", "client")})
        result = local_round(model, term, data, **settings)
        calls.append(LocalCall(term, weights, data, {**settings, **kept}, result))
        return result

    with mock.patch.object(member, "local_round", spy):
        yield
