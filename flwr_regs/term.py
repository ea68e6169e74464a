"""The seam: a `Term` is one part of a federated optimisation method. chain.py composes several.

A method transforms gradients in two places, a client's step and the server's step, and defines what the
two sides send each other. This file is plain Python over arrays: torch tensors on a client, numpy arrays
on the server, batched tensors under ``torch.func.vmap``. It imports neither flwr nor torch.

State and messages live in four slots. Each is a plain ``dict`` of arrays, keyed by parameter name or by
any key that the term needs: the server keeps **server** between rounds; the server sends **broadcast** to
the clients beside the global model; a client sends **upload** beside its own model; a client keeps
**client** between rounds, and it may be missing (``{}``) at any time.

`Term` has the eight hooks of most methods. What few methods need is an ability: abilities.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, ClassVar, Protocol, Self

Arrays = dict[str, Any]  # parameter name -> array; trainable parameters only, never buffers
Slot = dict[str, Any]  # one of the four slots of one term: key -> array


class ParameterError(ValueError):
    """A hyper-parameter of a wrong type or out of range; the text names its method and what is expected."""

    def __init__(self, owner: str, name: str, expected: str, value: Any) -> None:
        super().__init__(owner, name, expected, value)

    def __str__(self) -> str:
        owner, name, expected, value = self.args
        return f"{owner}: {name} must be {expected}, not {value!r}"

    def of(self, owner: str) -> ParameterError:
        """Return the same error of another owner."""
        return ParameterError(owner, *self.args[1:])


@dataclass(frozen=True)
class Range:
    """The values that a hyper-parameter may have: finite numbers, in words and as a condition.

    Attributes
    ----------
    expected : str
        The words, as they stand in an error behind "must be".
    good : callable
        ``good(number) -> bool``.
    kind : type
        ``Real``, ``Integral`` or ``bool``. A bool is no number.
    """

    expected: str
    good: Callable[[Any], bool] = lambda _: True
    kind: type = Real

    def check(self, owner: str, name: str, value: Any, optional: bool = False) -> None:
        """Raise ParameterError if `value`, the parameter `name` of `owner`, is none of them.

        None passes if the parameter is `optional`.
        """
        if optional and value is None:
            return
        fits = isinstance(value, self.kind) and isinstance(value, bool) == (self.kind is bool)
        if not (fits and math.isfinite(value) and self.good(value)):
            raise ParameterError(owner, name, self.expected + ", or None" * optional, value)


NOT_NEGATIVE = Range("a number of at least 0", lambda v: v >= 0)
POSITIVE = Range("a positive number", lambda v: v > 0)
DECAY = Range("a number from 0 to below 1", lambda v: 0 <= v < 1)
SHARE = Range("a number from 0 to 1", lambda v: 0 <= v <= 1)
FRACTION = Range("a number above 0, up to 1", lambda v: 0 < v <= 1)
COUNT = Range("a whole number of at least 1", lambda v: v >= 1, Integral)
SWITCH = Range("True or False", kind=bool)


def _absent(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this context has no data: the function is there during a client's round")


@dataclass(frozen=True)
class ClientContext:
    """What a term may read during a client's round. Read-only.

    Attributes
    ----------
    start, lr : Arrays, float
        ``w_t`` and the client's learning rate η.
    num_steps : int
        ``s_k``, the local steps taken, in `finish`. Before that, those known beforehand: `budget_steps`.
    planned_steps, budget_steps : int
        E, the steps that the round asks for; and ``min(E, step budget)``, the same in every hook of a
        round. A time budget changes neither.
    momentum : float, optional
        m of the client's optimiser, in `correct` and `finish`: a constant gradient moves ``η/(1−m)`` a step
        in the long run. None if the optimiser has no such setting, or a user's own loop made it without
        ``loop.optimizer(...)``.
    broadcast, client : Slot
        The term's own slots; ``{}`` if there is none (first round, lost state).
    inputs, targets, output, start_output : Any
        The batch and the model's output on it. If a term needs ``"start_output"``: the global model's
        output on it, in eval mode. None outside a step.
    features, layers : Any, mapping
        If a term needs ``"features"``: the input of the output layer, ``(batch, d)``. If it needs
        ``"output of <layer>"``: the output of that layer of the model, by its name, ``(batch, d)``.
    loss_fn : callable
        ``loss_fn(output, targets) -> scalar``, the client's own.
    output_at, features_at : callable
        ``(params) -> array``: output and features on the batch at other parameters; differentiable. They
        are for teachers, so in eval mode, and with the buffers and private entries of the round's start
        (within `train`: in the model's own mode and state). ``features_at(params, layer)`` is the output of
        a named layer.
    gradient_at : callable
        ``gradient_at(params) -> Arrays``, in `correct`: the gradient at other parameters of the whole local
        loss on the batch, with the corrections of the terms on this one's left. Same dropout mask as the
        step's own; BatchNorm's statistics stay as they are.
    mean_loss, mean_gradient, mean_features : callable
        ``mean_loss(params) -> scalar`` and ``mean_gradient(params) -> Arrays``: the mean over the client's
        data of `loss_fn` and of its gradient; ``mean_features(params, batches=None) -> (d,)``, over all
        the data or its first batches. In eval mode, without the terms' share; at `start` itself with the
        buffers of ``w_t``.
    fisher : callable
        ``fisher(params, max_samples=None) -> Arrays``, the diagonal of the empirical Fisher information
        over the client's data.
    train : callable
        ``train(params, loss, steps, after=None) -> Arrays``: plain SGD with learning rate `lr` from
        `params`, arrays by any names, on the batches of this round in the same order;
        ``loss(params, ctx) -> scalar`` gets a context of the batch; ``after(params) -> params`` follows
        each step (a projection). For a second model beside the first; the steps after the round's own go
        on through the data.
    label_counts : Any
        If a term needs ``"label_counts"``: examples of each class in the client's data, ``(classes,)``.
        Before the first forward pass, classes after the client's last one are left out.
    client_id, batch_size : int
        The client's partition id (-1 if it has none), and the number of examples in its first batch (0 in
        `start`, which runs before).
    config : Mapping
        The message's config, plain values; the user's own keys begin with ``"user."``.
    delta_is_sent : bool
        In `finish`: no term on the right changes the delta there, so that this one's is what is sent.
    """

    start: Arrays
    lr: Any
    num_steps: Any
    planned_steps: Any = None
    budget_steps: Any = None
    momentum: float | None = None
    broadcast: Slot = field(default_factory=dict)
    client: Slot = field(default_factory=dict)
    inputs: Any = None
    targets: Any = None
    output: Any = None
    start_output: Any = None
    features: Any = None
    layers: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[[Any, Any], Any] = _absent
    output_at: Callable[[Arrays], Any] = _absent
    features_at: Callable[..., Any] = _absent
    gradient_at: Callable[[Arrays], Arrays] = _absent
    mean_loss: Callable[[Arrays], Any] = _absent
    mean_gradient: Callable[[Arrays], Arrays] = _absent
    mean_features: Callable[..., Any] = _absent
    fisher: Callable[..., Arrays] = _absent
    train: Callable[..., Arrays] = _absent
    label_counts: Any = None
    client_id: Any = -1
    batch_size: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    delta_is_sent: bool = False

    def __post_init__(self) -> None:
        for name in ("budget_steps", "planned_steps"):  # a round without a budget
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.num_steps)


def changed(ctx: ClientContext, **fields: Any) -> ClientContext:
    """Return a copy of a context with other fields: ``dataclasses.replace`` for what every step does."""
    new = object.__new__(type(ctx))
    vars(new).update(vars(ctx), **fields)
    return new


class ReplyStats(Protocol):
    """What the server measured of one client's reply.

    ``n_k``; ``s_k`` and E, the local steps taken and planned; the mean training loss that the client
    reports; ``‖v_k − w_t‖``, over all trained parameters as one vector. Reading the steps or the loss of a
    client that does not report them makes its reply unusable. Under ``privacy=`` these are withheld.
    """

    @property
    def num_examples(self) -> float: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def planned_steps(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def norm(self) -> float: ...


def mean_of_slots(values: Mapping[int, Slot]) -> Slot:
    """Return the plain mean over clients of one dict of arrays each."""
    keys = next(iter(values.values()), {})
    return {key: sum(v[key] for v in values.values()) / len(values) for key in keys}


@dataclass(frozen=True)
class ServerContext:
    """What a term may read on the server. Read-only.

    Attributes
    ----------
    round, lr : int, float
        The round t, counted from 1, and the clients' learning rate η in it. η is NaN if the train config
        has none, which it may leave out only if no term runs on clients and none `reads_lr`.
    params : Arrays
        ``w_t``, trainable parameters only.
    previous_step, previous_lr : Arrays, float
        The last global step ``w_t − w_{t−1}`` and the η of the round that made it; None in round 1.
    population : int
        N, the number of clients that the run knows.
    weights : Mapping of int to float
        ``p_k`` by partition id, over the replies that are used: they sum to 1. Empty before the replies.
    replies : Mapping of int to ReplyStats
        What was measured of each reply that is used, by partition id in ascending order.
    answers : Mapping of int to Slot
        In `update`: what the term's own `answer` sent in the round's first exchange, by partition id.
    aggregated : callable
        ``aggregated(values) -> Slot``: the mean of one dict of arrays a client, all of the same keys and
        shapes, each client alike; made by the strategy's `aggregator`. In `update`, Krum takes the clients
        that it selected by their updates; elsewhere it selects by `values`.
    robust : bool
        Whether the strategy's `aggregator` is another than `Mean`.
    """

    round: int
    lr: float
    params: Arrays = field(default_factory=dict)
    previous_step: Arrays | None = None
    previous_lr: float | None = None
    population: int = 0
    weights: Mapping[int, float] = field(default_factory=dict)
    replies: Mapping[int, ReplyStats] = field(default_factory=dict)
    answers: Mapping[int, Slot] = field(default_factory=dict)
    aggregated: Callable[[Mapping[int, Slot]], Slot] = mean_of_slots
    robust: bool = False


CLIENT_HOOKS = (
    *("start", "loss", "correct", "finish", "probe", "recover", "client_optimizer", "personal"),
    *("private", "frozen", "encode", "decode", "unused"),
)
"""The hooks and abilities that a client runs."""


@dataclass(frozen=True)
class Declared:
    """A frozen dataclass whose fields (int, float, bool or str) go into each round's config."""

    name: ClassVar[str]
    needs: ClassVar[Collection[str]] = frozenset()
    """What the term reads in every step, and what costs: "features", "output of <layer>", "start_output",
    "label_counts"."""
    keeps: ClassVar[str] = "if-used"
    """When the client slot of `finish` counts: "if-used" (the server used the reply), or "always"."""
    elementwise: ClassVar[bool] = False
    """True if `correct` may be evaluated on slices of some parameters, in one axis and without the others.
    `start`, and what slots hold under a parameter's name or ``<key>.<name>`` in its shape, is cut alike;
    all else is there whole. Such a term does not call `gradient_at`."""
    owns_step: ClassVar[bool] = False
    """True if `update` replaces the averaged delta by a server optimiser's step."""
    keeps_delta: ClassVar[bool] = False
    """True if `update` returns `delta` unchanged; an `update` that changes it stands right of the owner."""
    keeps_update: ClassVar[bool] = False
    """True if `finish` returns `delta` unchanged: what stands on the left then knows what is sent."""
    robust: ClassVar[bool] = False
    """True if what a client uploads reaches the server's slot and the other clients only through
    ``ctx.aggregated``, or as the client's own entry. A term that `Adds` need not say so."""
    reads_lr: ClassVar[bool] = True
    """False if no server hook reads ``ctx.lr``: then a term of the server alone needs no learning rate."""
    excludes: ClassVar[Collection[str]] = ()
    """Names of terms that are other versions of this one; a chain holds only one version. A mapping to the
    reason excludes terms for another reason."""
    averages: ClassVar[bool] = False
    """True if the method is judged by the mean of its last two global models: the history then has the
    metrics of that model too."""
    ranges: ClassVar[Mapping[str, Range]] = {}
    """Field -> the values that it may have, checked when the term is built; None too, if it is the default.
    A `__post_init__` of a term's own calls this one first."""
    server_only: ClassVar[bool] = True
    """Whether only the server runs it: no client hook is overridden. Its fields do not travel. Derived."""

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.name in self.ranges:
                value = getattr(self, f.name)
                self.ranges[f.name].check(type(self).__name__, f.name, value, f.default is None)

    def acts(self, hook: str) -> bool:
        """Return whether the term does anything in `hook`: by default, if its class overrides it.

        A term whose settings switch a hook off may say so here.
        """
        return _overrides(type(self), hook)

    def config(self) -> dict[str, Any]:
        """Return ``"<name>.<field>" -> value``, without the fields that are None."""
        pairs = {f"{self.name}.{f.name}": getattr(self, f.name) for f in fields(self)}
        return {} if self.server_only else {k: v for k, v in pairs.items() if v is not None}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build the term from a round's config; raise KeyError naming a missing key."""
        keys = {f.name: f"{cls.name}.{f.name}" for f in fields(cls)}
        optional = {f.name for f in fields(cls) if f.default is None}
        if missing := [key for f, key in keys.items() if key not in config and f not in optional]:
            raise KeyError(f"the round's config lacks {missing}, which term '{cls.name}' needs")
        return cls(**{f: config[key] for f, key in keys.items() if key in config})


@dataclass(frozen=True)
class Term(Declared):
    """One ingredient of a method. Every hook is the identity by default.

    Hooks are pure: they change no input and return no view of one. They call no ``.item()`` and do not
    branch on an array's value. So one file serves a Flower client, a user's own loop and a cohort stacked
    under ``torch.func.vmap``. Server hooks use only operators on arrays.
    """

    name: ClassVar[str] = "identity"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "server_only" not in vars(cls):
            cls.server_only = not any(_overrides(cls, hook) for hook in CLIENT_HOOKS)

    # on a client

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        """Return the parameters from which the local steps start, given ``w_t``."""
        return params

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        """Return the local objective on a batch, given the plain loss `base` (a scalar)."""
        return base

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        """Return the corrected gradients, after backward and before the client's optimiser."""
        return grads

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        """Return (``v_k − w_t`` to be sent, upload slot, client slot) after the last local step."""
        return delta, {}, {}

    # on the server

    def init(self, params: Arrays) -> Slot:
        """Return the server slot before round 1; again if the first replies show that less is trained."""
        return {}

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        """Return what every client of the round receives beside the global model."""
        return {}

    def update(
        self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        """Return (server slot, step), given ``Σ ω_k (v_k − w_t)`` and the uploads by partition id.

        A term that folds gets what `fold` made in place of the uploads.
        """
        return server, delta

    def release(self, server: Slot, step: Arrays, ctx: ServerContext) -> tuple[Slot, Arrays]:
        """Return (server slot, the step that is made and sent); runs after every term's `update`."""
        return server, step


def _overrides(kind: type, hook: str) -> bool:
    return hasattr(kind, hook) and getattr(kind, hook) is not getattr(Term, hook, None)
