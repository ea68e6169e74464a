"""What follows from a method's hooks, and so stands in no row of the registry.

Abilities say most of it. The rest is seen in a trial: two clients of a small model take two steps, and the
server's hooks get their uploads.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from flwr_regs.abilities import Folds, Personalises, Probes, Withholds
from flwr_regs.chain import Chain, layers_of
from flwr_regs.client.local_training import local_round
from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.train.task import Task
from flwr_regs.cohort.stacked_training import is_elementwise
from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.term import ServerContext, Slot, Term

Uploads = Mapping[int, Slot]


@dataclass(frozen=True)
class Properties:
    """What a method goes with.

    Attributes
    ----------
    stateless : bool
        A client keeps nothing between rounds, so that it may take part only once.
    streams : bool
        The server never holds the uploads of a whole cohort: there are none, or each is folded in.
    stacks : bool
        A cohort can run as one, under ``torch.func.vmap``: clients that run SGD by default then have an
        optimiser that treats each number alone, and the model does not come in a code.
    secure_aggregation : bool
        The server needs only sums over the clients: it reads no client's own update, upload or steps.
    central_dp : bool
        Clients send their update alone, and all weigh alike: clipping and noise cover it.
    robust : bool
        All that the server makes of the clients' uploads goes through the strategy's aggregator, so that a
        robust one covers it.
    """

    stateless: bool
    streams: bool
    stacks: bool
    secure_aggregation: bool
    central_dp: bool
    robust: bool


def properties(strategy: RegStrategy) -> Properties:
    """Return the properties of a strategy with its hyper-parameters.

    Its terms run on a perceptron whose layers are ``body``, ``norm`` (BatchNorm) and ``head``, and those
    that a term names.
    """
    chain, trial = strategy.term, _Trial(strategy.term)
    uploads = any(trial.uploads.values())
    held = [t for t in chain.terms if isinstance(t, Probes) or trial.uploads[t.name]]
    keeps = any(trial.kept.values()) or strategy.downlink == "delta"
    weighs = chain.weigher is not None or strategy.incomplete == "scale"
    optimizer = chain.client_optimizer(torch.optim.SGD)([nn.Parameter(torch.zeros(1))], lr=0.1)
    return Properties(
        stateless=not keeps
        and not any(isinstance(t, Withholds | Personalises) for t in chain.terms),
        streams=all(isinstance(t, Folds) and not isinstance(t, Probes) for t in held),
        stacks=is_elementwise(optimizer) and chain.coder("release") is None,
        secure_aggregation=not weighs and chain.coder("finish") is None and trial.needs_only_sums(),
        central_dp=not (weighs or uploads or chain.uploading or trial.reads_replies()),
        robust=not chain.unaggregated
        and all(chain.aggregates(t) for t in chain.terms if trial.uploads[t.name]),
    )


@dataclass(frozen=True)
class _Stats:
    """A reply's measures, as :class:`flwr_regs.term.ReplyStats`."""

    num_examples: float = 8.0
    num_steps: int = 2
    planned_steps: int = 2
    loss: float = 1.0
    norm: float = 1.0


class _Watched(dict[int, _Stats]):
    """The measures of replies, which notes that someone reads them."""

    read = False

    def __getitem__(self, pid: int) -> _Stats:
        self.read = True
        return super().__getitem__(pid)

    def values(self) -> Any:
        self.read = True
        return super().values()

    def items(self) -> Any:
        self.read = True
        return super().items()


class _Trial:
    """One round of two clients, by hand.

    `uploads` holds term name -> the clients' upload slots that are not empty, `kept` the same of client
    slots, `probes` client -> term name -> upload of the first exchange.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            body, norm, head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
            layers = {"body": body, "norm": norm, "act": nn.Tanh(), "head": head}
            model = nn.Sequential()
            for name, layer in layers.items():
                model.add_module(name, layer)
            for path in layers_of(chain.terms):
                _add_layer(model, path)
            data = [
                [(torch.randn(6, 4) + i, torch.arange(6) % 3) for _ in range(2)] for i in (0, 1)
            ]
        private = chain.private(list(model.state_dict()))
        start = {n: p.detach() for n, p in model.named_parameters() if n not in private}
        self.params = {n: p.numpy().copy() for n, p in start.items()}
        step = {n: np.full_like(p, 0.01) for n, p in self.params.items()}
        self.replies = _Watched({0: _Stats(), 1: _Stats()})
        self.ctx = ServerContext(2, 0.1, self.params, step, 0.1, 2, {0: 0.5, 1: 0.5}, self.replies)
        self.server = chain.init(self.params)
        down = {k: chain.broadcast(self.server, self.ctx) for k in (0, 1)}
        for k, slots in down.items():
            for name, own in chain.broadcast_to(k, self.server, self.ctx).items():
                slots[name] = {**slots[name], **own}
        contexts = {
            k: Measures(deepcopy(model), d, Task(), torch.device("cpu"), "head")
            .context(start, 0.1, num_steps=2, client_id=k, batch_size=6, broadcast=_tensors(down[k]))
            for k, d in enumerate(data)
        }  # fmt: skip
        probed = {k: chain.probe(ctx) for k, ctx in contexts.items()}
        self.probes = {k: _arrays(up) for k, (up, _) in probed.items() if up}
        self.answers = chain.answer(self.probes)
        for k, answer in self.answers.items():
            down[k] |= answer
        results = [
            local_round(
                deepcopy(model), chain, d, lr=0.1, steps=2, client_id=k, device="cpu", classifier="head",
                broadcast=_tensors(down[k]), client=probed[k][1],
            )
            for k, d in enumerate(data)
        ]  # fmt: skip
        self.deltas = {k: {n: a.numpy() for n, a in r.delta.items()} for k, r in enumerate(results)}
        sent = [_arrays(r.upload) for r in results]
        names = [t.name for t in chain.terms]
        self.uploads = {n: [s[n] for s in sent if s.get(n)] for n in names}
        self.kept = {n: [r.client[n] for r in results if r.client.get(n)] for n in names}

    def needs_only_sums(self) -> bool:
        """Whether the server's hooks give the same when each client's upload and update are the mean."""
        sent = [*self.uploads.values(), *([*p.values()] for p in self.probes.values())]
        kinds = {a.dtype for slots in sent for s in slots for a in s.values()}
        coded = any(kind not in (np.float32, np.float64) for kind in kinds)
        if coded or self.reads_replies():
            return False  # positions, or 16 bits, have no mean
        deltas = _unequal(self.deltas)
        for t in self.chain.terms:
            own = _unequal(self._sent(t))
            if own and not _same(
                self._updated(t, own, deltas),
                self._updated(t, _meaned(own), _meaned(deltas)),
            ):
                return False
            if isinstance(t, Probes):
                probes = _unequal({k: p[t.name] for k, p in self.probes.items()})
                each, of_mean = t.answer(deepcopy(probes)), t.answer(_meaned(probes))
                if not _same(each, of_mean) or not _same(each[0], each[1]):
                    return False
        return True

    def reads_replies(self) -> bool:
        """Whether a hook of the server reads what was measured of single replies."""
        self.replies.read = False
        for t in self.chain.terms:
            _, step = self._updated(t, self._sent(t), self.deltas)
            t.release(deepcopy(self.server[t.name]), step, self.ctx)
        return self.replies.read

    def _sent(self, term: Term) -> dict[int, Slot]:
        """Return a term's uploads by client; empty ones for a term that folds, but sends nothing."""
        empty: list[Slot] = [{}, {}] if isinstance(term, Folds) and term.acts("fold") else []
        return dict(enumerate(self.uploads[term.name] or empty))

    def _updated(self, term: Term, uploads: Uploads, deltas: Uploads) -> Any:
        """Return what a term's `update` makes of uploads, folded if the term folds."""
        given: Any = deepcopy(dict(uploads))
        if isinstance(term, Folds):
            given = {}
            for k, upload in uploads.items():
                given = term.fold(given, k, deltas[k], deepcopy(upload), 0.5, self.ctx)
        mean = _meaned(self.deltas)[0]
        answers = {k: answer.get(term.name, {}) for k, answer in self.answers.items()}
        ctx = replace(self.ctx, answers=answers)
        return term.update(deepcopy(self.server[term.name]), mean, given, ctx)


def _add_layer(model: nn.Module, path: str) -> None:
    """Put a layer of this name at the model's end, which changes nothing, if it has none."""
    *outer, last = path.split(".")
    for name in outer:
        if not hasattr(model, name):
            model.add_module(name, nn.Sequential())
        model = model.get_submodule(name)
    if not hasattr(model, last):
        model.add_module(last, nn.Identity())


def _tensors(slots: Mapping[str, Slot]) -> dict[str, Slot]:
    return {t: {k: torch.as_tensor(a) for k, a in s.items()} for t, s in slots.items()}


def _arrays(slots: Mapping[str, Slot]) -> dict[str, Slot]:
    return {t: {k: torch.as_tensor(a).numpy() for k, a in s.items()} for t, s in slots.items()}


def _unequal(slots: Uploads) -> dict[int, Slot]:
    """Return slots that differ between clients, also where theirs happen to be equal."""
    return {k: {key: a * (1 + k / 2) for key, a in s.items()} for k, s in slots.items()}


def _meaned(slots: Uploads) -> dict[int, Slot]:
    """Return the same clients, each with the mean of all slots."""
    mean = {key: sum(s[key] for s in slots.values()) / len(slots) for key in slots[min(slots)]}
    return {k: dict(mean) for k in slots}


def _same(a: Any, b: Any) -> bool:
    """Whether two nests of dicts, tuples and arrays are equal up to rounding."""
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(np.allclose(a, b, rtol=1e-4, atol=1e-6))
