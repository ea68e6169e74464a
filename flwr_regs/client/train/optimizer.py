"""A client's optimiser, its own or the one that the round's config describes; its state; and clipping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flwr_regs.abilities import Carries, Personalises, Steers
from flwr_regs.chain import Chain
from flwr_regs.term import Arrays, ClientContext, Config, Slot, Term
from flwr_regs.wire.config import OPTIMIZER_KEYS

OptimizerFn = Callable[..., Optimizer]
Factory = OptimizerFn | None
"""A client's own optimiser; None: what the config describes."""


def check_factory(owner: str, optimizer: object) -> None:
    """Raise TypeError unless a client's `optimizer` can be called: an instance holds other parameters."""
    if optimizer is not None and not callable(optimizer):
        raise TypeError(
            f"{owner}: optimizer must be called as optimizer(params, lr=lr), as torch.optim.AdamW or "
            f"partial(torch.optim.SGD, momentum=0.9) are; not an instance of {type(optimizer).__name__}"
        )


@dataclass(frozen=True)
class KeptOptimizer(Term, Carries):
    """Keeps the state of a client's optimiser between rounds, as the client slot of this term.

    It stands in the client's chain alone, and is kept there as all client state is: what a round has made
    of it counts if the server used the round's reply.
    """

    name: ClassVar[str] = "optimizer"
    keeps_update: ClassVar[bool] = True

    def optimizer_start(self, ctx: ClientContext) -> Arrays:
        return ctx.client

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {}, dict(ctx.optimizer_state)


class ClientOptimizer:
    """The optimiser of a client's round: who has a say in it, and its state.

    Parameters
    ----------
    term : Chain
        The method.
    trained : dict[str, nn.Parameter]
        What it holds.
    ctx : ClientContext
        Of the round, before its first step.

    Attributes
    ----------
    missing : str, optional
        Why a loop may not make an optimiser itself; None if it may, and once it is made here.
    counts_on_sgd : str
        The sentence of a term that counts on steps of plain SGD, or "": see :class:`.Steers`.
    in_own_loop : bool
        Whether the loop is the user's, which may change the model beside its steps.
    steps : int
        How many steps the optimisers that were made here have taken. AMP's scaler leaves steps out.
    """

    def __init__(self, term: Chain, trained: dict[str, nn.Parameter], ctx: ClientContext) -> None:
        self._term, self._trained, self._ctx = term, trained, ctx
        self._carrying = term.able(Carries)
        self._made: Optimizer | None = None
        self._corrected: list[tuple[Tensor, Tensor, int]] = []
        self._at_step = 0  # the optimiser's, when these were corrected
        steering = [t for t in term.able(Steers) if t.acts("client_optimizer")]
        self.counts_on_sgd = next((t.counts_on_sgd for t in steering if t.counts_on_sgd), "")
        self._counts_on_rate = next((t.counts_on_rate for t in steering if t.counts_on_rate), "")
        self._watches = False  # whether it looks at the steps
        self.in_own_loop = False
        # each parameter's version and value after the last step
        self._left: list[tuple[int, Tensor]] = []
        self.missing: str | None = None
        self._counts: list[None] | None = None  # an element for each step; None before one is made
        if asked := [key for key in OPTIMIZER_KEYS if key in ctx.config]:
            self.missing = f"the config sets {asked}"
        elif self._carrying:
            self.missing = f"{[t.name for t in self._carrying]} keep or send its state"
        elif any(t.acts("client_optimizer") for t in term.terms):
            self.missing = "the method configures the client's optimiser"

    def made(self, make: Factory) -> Optimizer:
        """Return the optimiser: see :meth:`flwr_regs.client.LocalTraining.optimizer`."""
        self.missing = None
        given = over(list(self._trained.values()), optimizer_of(self._ctx.config, make))
        make = self._term.client_optimizer(given)
        made: Optimizer = make(list(self._trained.values()), lr=self._ctx.lr)
        if not hasattr(made, "step"):
            raise TypeError(f"optimizer must return an optimiser, not {type(made).__name__}")
        held = {id(p) for group in getattr(made, "param_groups", ()) for p in group["params"]}
        if held and held.isdisjoint(map(id, self._trained.values())):
            raise ValueError(
                "optimizer(params, lr=lr) must make a new optimiser of the parameters that it is "
                "given: this one holds none of those that the client trains"
            )
        check_direction(made, self._term)
        counts = [] if self._counts is None else self._counts
        with suppress(AttributeError):  # a class of the user's own may be no torch.optim.Optimizer
            made.register_step_post_hook(lambda *_: counts.append(None))
            self._counts = counts
        if self._carrying:
            others = [t.name for t in self._carrying if not isinstance(t, Steers)]
            if make is not given and others:
                why = "the method makes the client's optimiser anew for each round"
                raise ValueError(f"{others}: {why}: leave out keep_optimizer")
            if self._made is not None:
                names = [t.name for t in self._carrying]
                raise ValueError(f"{names} keep or send the state of one optimiser: make only one")
            if self._ctx.num_steps:
                load_state(made, self._trained, self._term.optimizer_start(self._ctx))
            self._made = made
        if refused := self._counts_on_rate:
            with suppress(AttributeError):
                made.register_step_pre_hook(partial(self._check_rate, refused))
        if refused := self.counts_on_sgd:
            with suppress(AttributeError):
                made.register_step_pre_hook(partial(self._check_step, refused, False))
                made.register_step_post_hook(partial(self._check_step, refused, True))
                self._watches = True
        return made

    def corrected(self) -> None:
        """Note the gradients as the method has corrected them: one, or all if a term counts on them."""
        grads = [(p, p.grad) for p in self._trained.values() if p.grad is not None]
        grads = grads if self._watches else grads[:1]
        self._corrected = [(p, grad, grad._version) for p, grad in grads]
        self._at_step = self.steps

    @property
    def steps(self) -> int:
        return len(self._counts or ())

    @property
    def only_adds(self) -> bool:
        """Whether since `corrected` a gradient was added to, and nothing else was done."""
        if not self._corrected or self._counts is None:
            return False
        p, grad, version = self._corrected[0]
        added = p.grad is grad and grad._version == version + 1
        return added and self.steps == self._at_step

    def _check_step(
        self, refused: str, after: bool, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> None:
        """Raise ValueError, the sentence `refused`, for a step that is not the rate times the gradient.

        It looks before the step; at the gradients `after` it, where a closure takes them within the step.
        """
        if not after:
            self.check_left()
        self._check_rate(refused.format("the loop changes the learning rate"), optimizer)
        in_closure = len(args) > 1 or bool(kwargs)
        changed = (p.grad is not grad or grad._version != at for p, grad, at in self._corrected)
        if after == in_closure and any(changed):
            what = "the loop changes the gradients after correct(), as clipping does"
            raise ValueError(refused.format(what))
        # a term's `point` moves the model between steps
        if after and self.in_own_loop and not self._term.overriding("point"):
            self._left = [(p._version, p.detach().clone()) for p in self._trained.values()]

    def _check_rate(self, refused: str, optimizer: Optimizer, *_: Any) -> None:
        """Raise ValueError, the sentence `refused`, for another learning rate than the round's."""
        if any(group["lr"] != self._ctx.lr for group in optimizer.param_groups):
            raise ValueError(refused)

    def check_left(self) -> None:
        """Raise ValueError if a term counts on plain SGD, and the loop has changed the model since."""
        left = zip(self._trained.values(), self._left, strict=False)
        if any(p._version != at and not torch.equal(p, v.to(p)) for p, (at, v) in left):
            raise ValueError(self.counts_on_sgd.format("the loop changes the model after a step"))

    def state(self) -> Arrays:
        """Return the state at the end, if a term carries it."""
        return {} if self._made is None else state_of(self._made, self._trained)


def check_direction(optimizer: Optimizer, term: Chain) -> None:
    """Raise ValueError for an optimiser that maximises what a term has made to be minimised."""
    if not any(group.get("maximize") for group in getattr(optimizer, "param_groups", ())):
        return
    for t in term.terms:
        if t.acts("loss") or t.acts("correct") or isinstance(t, Personalises):
            raise ValueError(
                f"what '{t.name}' adds is to be minimised, but the client's optimiser has maximize=True: "
                "minimise the negative loss instead"
            )


def state_of(optimizer: Optimizer, params: Mapping[str, Tensor]) -> Arrays:
    """Return an optimiser's state as arrays, by the keys of :class:`flwr_regs.abilities.Carries`.

    An entry that is a plain number has ``#`` behind its name. Raises ValueError for other state than arrays
    and numbers, such as LBFGS's lists.
    """
    state: Arrays = {}
    for name, p in params.items():
        for entry, value in optimizer.state.get(p, {}).items():
            if value is None:  # none yet, as SGD's momentum before its first step
                continue
            if not isinstance(value, Tensor | int | float):
                raise ValueError(
                    f"the state of {type(optimizer).__name__} has a {type(value).__name__} as '{entry}', "
                    "expected arrays and numbers: leave keep_optimizer out"
                )
            key = entry if isinstance(value, Tensor) else f"{entry}#"
            state[f"{key}.{name}"] = torch.as_tensor(value, device=p.device).detach().clone()
    steps = [value for key, value in state.items() if key.startswith("step.")]
    if steps and all(torch.equal(value, steps[0]) for value in steps):
        state = {k: v for k, v in state.items() if not k.startswith("step.")} | {"step": steps[0]}
    return state


def load_state(optimizer: Optimizer, params: Mapping[str, Tensor], state: Arrays) -> None:
    """Give a fresh optimiser the state of :func:`state_of`, copied; its own settings stay.

    Raises ValueError for a key that names no parameter.
    """
    for key, value in state.items():
        entry, _, name = key.partition(".")
        if key == "step":
            continue
        if name not in params:
            raise ValueError(f"the optimiser's state: '{key}' names no trained parameter")
        p = params[name]
        if entry.endswith("#"):
            optimizer.state[p][entry.removesuffix("#")] = value.item()
        elif value.ndim == 0 and entry == "step":  # torch counts on the CPU
            optimizer.state[p][entry] = value.clone()
        else:
            half = p.dtype == torch.bfloat16 and value.shape == p.shape  # it was kept as float32
            kind = p.dtype if half else value.dtype
            optimizer.state[p][entry] = value.to(p.device, kind, copy=True)
    if "step" in state:
        for p in [p for p in params.values() if p in optimizer.state]:
            optimizer.state[p]["step"] = state["step"].detach().cpu().clone()


def optimizer_of(config: Config, factory: Factory = None) -> OptimizerFn:
    """Return a client's factory ``make(params, lr=lr)``: its own, or what a checked config describes.

    Without either it is ``torch.optim.SGD``. Raises ValueError if there are both.
    """
    given = {key: config[key] for key in OPTIMIZER_KEYS if key in config}
    if factory is not None and given:
        raise ValueError(
            f"the train config sets {given}, but this client has an optimiser of its own, {factory!r:.200}"
            ": leave out these keys, or build the client (or call loop.optimizer) without one"
        )
    if factory is not None:
        return factory
    kind: OptimizerFn = getattr(torch.optim, given.pop("optimizer", "SGD"))
    return partial(kind, **{k.replace("-", "_"): v for k, v in given.items()}) if given else kind


class Trial(list[Tensor]):
    """The parameters of an optimiser that is made to be looked at alone: see `over`."""


def over(params: Sequence[Tensor], make: OptimizerFn) -> OptimizerFn:
    """Return a factory that, given a `Trial`, takes these parameters: what it makes may depend on them."""

    def made(given: Any, **settings: Any) -> Optimizer:
        return make([*params] if isinstance(given, Trial) else given, **settings)

    return update_wrapper(made, make, (), ())  # for its signature


def momentum_of(optimizer: Optimizer, lr: float) -> float | None:
    """Return m such that a constant gradient moves ``η/(1−m)`` a step in the long run; None if unknown.

    η is the round's learning rate `lr`; the optimiser may have another one. SGD's `dampening` counts: with
    the same value as its momentum, a step is η, so m is 0. Of several groups, the largest m counts.
    """
    each = list[float]()
    for group in getattr(optimizer, "param_groups", ()):
        own, damped = group["lr"], 1 - group.get("dampening", 0)
        if "momentum" in group and min(own, damped) > 0:
            each.append(float(1 - (1 - group["momentum"]) / damped * (lr / own)))
    return max(each, default=None)


def clip(params: Collection[nn.Parameter], norm: float) -> None:
    """Scale the gradients down so that all together, as one vector, have at most this norm.

    As ``torch.nn.utils.clip_grad_norm_``, but the norm of half-precision gradients is taken in float32,
    where their squares do not overflow.
    """
    total = total_norm([p.grad for p in params if p.grad is not None])
    nn.utils.clip_grads_with_norm_(params, norm, total)


def total_norm(grads: Sequence[Tensor], foreach: bool | None = None) -> Tensor:
    """Return the norm of gradients as one vector, in float32 at least; under vmap not by `foreach`."""
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
    return nn.utils.get_total_norm(wide, foreach=foreach)
