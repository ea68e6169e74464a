"""What the hooks of a term may read: arrays, slots, and a context on each side.

Plain Python over arrays: torch tensors on a client, numpy arrays on the server, batched tensors under
``torch.func.vmap``. Imports neither flwr nor torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Protocol

Arrays = dict[str, Any]  # parameter name -> array; trainable parameters only, never buffers
Slot = dict[str, Any]  # one of the four slots of one term: key -> array
ServerStep = tuple[Slot, Arrays]  # (server slot, step): what `update` and `release` return
Config = Mapping[str, Any]  # a message's config, or a part of it


def _absent(*_: Any, **__: Any) -> Any:
    raise RuntimeError(
        "this function of the context is there during a client's round; those of a batch, "
        "output_at and features_at, within a step"
    )


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
        ``"output of <layer>"``: the output of that layer of the model, by its name, ``(batch, d)``. Like
        `output`, differentiable in `loss`, and detached in `correct` and `evolve`.
    loss_fn : callable
        ``loss_fn(output, targets) -> scalar``, the client's own.
    output_at, features_at : callable
        ``(params) -> array``, within a step: output and features on the batch at other parameters;
        differentiable. They are for teachers, so in eval mode, and with the buffers and private
        entries of the round's start (within `train`: in the model's own mode and state).
        ``features_at(params, layer)`` is the output of a named layer.
    gradient_at : callable
        ``gradient_at(params) -> Arrays``, in `correct` and `evolve`: the gradient at other parameters of
        the whole local loss on the batch, with the corrections of the terms on this one's left. Same
        dropout mask as the step's own; BatchNorm's statistics stay as they are.
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
    optimizer_state : Arrays
        In `finish`, if a term `Carries`: the state of the client's optimiser.
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
    optimizer_state: Arrays = field(default_factory=dict)
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


def bounded(claims: Mapping[int, float], most: float) -> dict[int, float]:
    """Return what clients say of themselves, each within `most` times their median, up or down.

    Of an even number it is the lower median, so that of two clients the larger claim is bounded.
    """
    usual = median_low(claims.values())
    return {pid: min(max(v, usual / most), usual * most) for pid, v in claims.items()}


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
    selected : collection of int, optional
        In `update`: the clients that the aggregator kept, by partition id; None if it does not choose.
    max_scale : float
        How many times as much as others a client may count for what it says of itself: the strategy's
        setting. See :func:`flwr_regs.hook_contexts.bounded`.
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
    selected: Collection[int] | None = None
    max_scale: float = 10.0

    @property
    def counted(self) -> int:
        """How many of the replies count in what `fold` adds up."""
        return len(self.weights if self.selected is None else self.selected)
