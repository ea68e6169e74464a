"""A client's optimiser, its own or the one that the round's config describes; its state; and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import optimizer as of_torch

from flwr_regs.chain import Chain
from flwr_regs.term import Slot, Term
from flwr_regs.wire.config import OPTIMIZER_KEYS

OptimizerFn = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class KeptOptimizer(Term):
    """Keeps the state of a client's optimiser between rounds, as the client slot of this term.

    It stands in the client's chain alone, and is kept there as all client state is: what a round has made
    of it counts if the server used the round's reply. `LocalTraining` fills the slot and reads it.
    """

    name: ClassVar[str] = "optimizer"
    server_only: ClassVar[bool] = False
    keeps: ClassVar[str] = "if-used"


class ClientOptimizer:
    """The optimiser of a client's round: who has a say in it, and the state that it keeps.

    Parameters
    ----------
    term : Chain
        The method.
    trained : dict[str, nn.Parameter]
        What it holds.
    config, client : mapping
        The round's config, and the client slot.

    Attributes
    ----------
    missing : str, optional
        Why a loop may not make an optimiser itself; None if it may, and once it is made here.
    """

    def __init__(
        self,
        term: Chain,
        trained: Mapping[str, nn.Parameter],
        config: Mapping[str, Any],
        client: Slot,
    ) -> None:
        self._term, self._trained, self._config, self._client = term, trained, config, client
        self._keeps = any(isinstance(t, KeptOptimizer) for t in term.terms)
        self._made: torch.optim.Optimizer | None = None
        self.missing: str | None = None
        if asked := [key for key in OPTIMIZER_KEYS if key in config]:
            self.missing = f"the config sets {asked}"
        elif self._keeps:
            self.missing = "the client keeps its optimiser's state"
        elif any(t.acts("client_optimizer") for t in term.terms):
            self.missing = "the method has a say in the client's optimiser"

    def made(self, make: OptimizerFn | None, lr: float) -> torch.optim.Optimizer:
        """Return the optimiser: see :meth:`flwr_regs.client.LocalTraining.optimizer`."""
        self.missing = None
        own = optimizer_of(self._config, make)
        make = self._term.client_optimizer(own)
        made: torch.optim.Optimizer = make(list(self._trained.values()), lr=lr)
        if self._keeps:
            if make is not own:
                raise ValueError(
                    "keep_optimizer: the method makes the client's optimiser anew for each round: leave "
                    "keep_optimizer out"
                )
            load_state(made, self._trained, self._client.get(KeptOptimizer.name, {}))
            self._made = made
        return made

    def kept(self) -> Slot:
        """Return the entry of the client slot, if the state is kept."""
        if self._made is None:
            return {}
        return {KeptOptimizer.name: state_of(self._made, self._trained)}


def state_of(optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]) -> Slot:
    """Return an optimiser's state as arrays: ``"<parameter>|<key>"``, with ``#`` behind a plain number.

    Raises ValueError for other state than arrays and numbers, such as LBFGS's lists.
    """
    out: Slot = {}
    for name, p in params.items():
        for key, value in optimizer.state.get(p, {}).items():
            if value is None:  # none yet, as SGD's momentum before its first step
                continue
            if not isinstance(value, torch.Tensor | int | float):
                raise ValueError(
                    f"keep_optimizer: {type(optimizer).__name__} has a {type(value).__name__} as '{key}', "
                    "expected arrays and numbers: leave keep_optimizer out"
                )
            mark = "" if isinstance(value, torch.Tensor) else "#"
            out[f"{name}|{key}{mark}"] = torch.as_tensor(value).detach().clone()
    return out


def load_state(
    optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], slot: Slot
) -> None:
    """Give a fresh optimiser the state of :func:`state_of`, copied; its own settings stay."""
    for entry, value in slot.items():
        name, _, key = entry.rpartition("|")
        if (p := params.get(name)) is None:
            continue
        if key.endswith("#"):
            optimizer.state[p][key.removesuffix("#")] = value.item()
        elif value.ndim == 0 and key == "step":  # torch counts on the CPU
            optimizer.state[p][key] = value.clone()
        else:
            half = p.dtype == torch.bfloat16 and value.shape == p.shape  # it was kept as float32
            kind = p.dtype if half else value.dtype
            optimizer.state[p][key] = value.to(p.device, kind, copy=True)


def optimizer_of(config: Mapping[str, Any], own: OptimizerFn | None = None) -> OptimizerFn:
    """Return a client's factory ``make(params, lr=lr)``: its own, or what a checked config describes.

    Without either it is ``torch.optim.SGD``. Raises ValueError if there are both.
    """
    given = {key: config[key] for key in OPTIMIZER_KEYS if key in config}
    if own is not None and given:
        raise ValueError(
            f"the train config sets {given}, but this client has an optimiser of its own, {own!r:.200}: "
            "leave out these keys, or build the client (or call loop.optimizer) without one"
        )
    if own is not None:
        return own
    kind: OptimizerFn = getattr(torch.optim, given.pop("optimizer", "SGD"))
    return partial(kind, **{k.replace("-", "_"): v for k, v in given.items()}) if given else kind


def steps_alone(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the loop may compute the gradients before it calls ``step()``: as in a closure, to the bit.

    So it is with these classes of torch, but for a step that is wrapped, or hooks that run before it.
    Others get a closure, which LBFGS calls more than once.
    """
    usual = type(optimizer) in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", True)
    hooks = hooks or getattr(of_torch, "_global_optimizer_pre_hooks", True)
    return usual and "step" not in vars(optimizer) and not hooks and torch.is_grad_enabled()


def momentum_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Return m such that a constant gradient moves ``η/(1−m)`` a step in the long run; None if unknown.

    SGD's `dampening` counts: with the same value as its momentum, a step is η, so m is 0.
    """
    group = optimizer.param_groups[0]
    if "momentum" not in group or not (damped := 1 - group.get("dampening", 0)) > 0:
        return None
    return float(1 - (1 - group["momentum"]) / damped)


def clip(params: Iterable[nn.Parameter], norm: float) -> None:
    """Scale the gradients down so that all together, as one vector, have at most this norm.

    As ``torch.nn.utils.clip_grad_norm_``, but the norm of half-precision gradients is taken in float32,
    where their squares do not overflow.
    """
    mine = [p for p in params if p.grad is not None]
    grads = [p.grad for p in mine if p.grad is not None]
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
    total = nn.utils.get_total_norm(wide)
    nn.utils.clip_grads_with_norm_(mine, norm, total)
