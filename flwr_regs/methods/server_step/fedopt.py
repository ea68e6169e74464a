"""FedOpt: generalised FedAvg, with an optimiser of any kind on either side.

| *Init*       the server optimiser's state
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← ClientOpt(v, ∇f_k(v), η, t)``, from ``v = w_t``, ``K_k`` times
| *Upload*     ``v_k``, ``n_k``
| *Update*     ``Δ = Σ p_k (v_k − w_t)``,  ``w_{t+1} = ServerOpt(w_t, −Δ, η_s, t)``

ServerOpt may be any ``torch.optim.Optimizer`` whose ``step()`` needs no closure (LBFGS needs one), e.g.
``server_optimizer=lambda params: Adam(params)``, or a class's name, ``FedOpt("Adam", lr=0.01)``.
ClientOpt is the optimiser given to the client. Both learning rates may follow a schedule over rounds.

Presets: **FedAvgM** is torch's SGD with momentum. **FedAdagrad**, **FedAdam** and **FedYogi** are
Reddi et al.'s Alg. 2. They differ from torch's classes of those names in three ways: there is no bias
correction; τ is large (1e-3) and is added outside the root; the second moment starts at τ² (the paper
asks for ``v_{−1} ≥ τ²``). ``FedOpt(server_optimizer=...)`` runs torch's classes.

Source: Wang et al., "A field guide to federated optimization" (2021), Alg. 1; Reddi et al.,
"Adaptive federated optimization" (2021), Alg. 2; Hsu et al. (2019) for FedAvgM.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from flwr_regs.abilities import Steps
from flwr_regs.client.train.optimizer import load_state, state_of
from flwr_regs.hook_contexts import Arrays, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.uploads import kept, under
from flwr_regs.server.options import Options, factor_of
from flwr_regs.term import DECAY, NOT_NEGATIVE, POSITIVE, SWITCH, Range, Ranges, Term, one_of
from flwr_regs.wire.config import nearest

__all__ = [
    "AdaptiveServer",
    "FedAdagrad",
    "FedAdagradClient",
    "FedAdam",
    "FedAdamClient",
    "FedAvgM",
    "FedAvgMClient",
    "FedOpt",
    "FedOptClient",
    "FedYogi",
    "FedYogiClient",
    "TorchServerOptimizer",
]

Maker = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
Schedule = Callable[[int], float]


@dataclass(frozen=True)
class TorchServerOptimizer(Term, Steps):
    """``w_{t+1} = ServerOpt(w_t, −Δ)`` with a torch optimiser (Alg. 1).

    Parameters
    ----------
    make : callable
        ``make(params) -> torch.optim.Optimizer`` over a list of tensors.
    schedule : callable, optional
        ``schedule(round) -> factor`` multiplies the optimiser's learning rates; rounds count from 1.
    """

    name: ClassVar[str] = "server-optimizer"
    reads_lr: ClassVar[bool] = False
    make: Maker
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_schedule(self.schedule)
        if not callable(self.make):
            raise TypeError(
                "server_optimizer must be a function of a list of parameters, or the name of a class of "
                f"torch.optim, not {self.make!r}"
            )

    def init(self, params: Arrays) -> Slot:
        """Take one step with zero gradients: an optimiser that cannot run here fails before round 1."""
        trial = {n: np.asarray(p) for n, p in params.items() if np.asarray(p).dtype.kind == "f"}
        try:
            self.update({}, {n: 0 * p for n, p in trial.items()}, {}, ServerContext(1, 1.0, trial))
        except TypeError as error:
            raise ValueError(f"this optimiser cannot run on the server: {error}") from error
        return {}

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        start = {n: kept(ctx.params[n]) for n in delta}
        params = {n: torch.tensor(w, requires_grad=True, device="cpu") for n, w in start.items()}
        for n, p in params.items():
            p.grad = -torch.as_tensor(kept(delta[n]), device="cpu")  # the pseudo-gradient
        optimizer = self.make([*params.values()])
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "server_optimizer must be a function of a list of parameters that returns a "
                f"torch.optim.Optimizer, but it returned {type(optimizer).__name__}"
            )
        ours = {id(p) for p in params.values()}
        if not {id(p) for group in optimizer.param_groups for p in group["params"]} <= ours:
            raise ValueError(
                "server_optimizer must make its optimiser of the parameters that it is given, as "
                "`lambda p: torch.optim.SGD(p, lr=1.0)` does; others do not move the global model"
            )
        # The slot holds the optimiser's state as arrays, and each round restores it from there: by the
        # keys of `state_of`, and "#<group>|<key>" for a group's numbers.
        state = {key: torch.tensor(a, device="cpu") for key, a in server.items() if key[0] != "#"}
        load_state(optimizer, params, state)
        factor = _factor(self.schedule, ctx.round)
        for i, group in enumerate(optimizer.param_groups):
            for what, value in under(server, f"#{i}|").items():
                group[what] = type(group[what])(value)
            group["lr"] = group["lr"] * factor
        optimizer.step()
        new: Slot = {key: value.numpy() for key, value in state_of(optimizer, params).items()}
        for i, group in enumerate(optimizer.param_groups):
            numbers = {k: v for k, v in group.items() if type(v) in (int, float) and k != "lr"}
            new |= {f"#{i}|{what}": np.asarray(value) for what, value in numbers.items()}
        return new, {n: p.detach().numpy() - start[n] for n, p in params.items()}


def _check_schedule(schedule: Any) -> None:
    if schedule is not None and not callable(schedule):
        raise TypeError(f"server_lr_schedule must be a function of the round, not {schedule!r}")


def _factor(schedule: Schedule | None, number: int) -> float:
    factor = 1.0 if schedule is None else factor_of("server_lr_schedule", schedule, number)
    if not math.isfinite(factor):
        raise ValueError(f"server_lr_schedule({number}) is {factor}, expected a finite number")
    return factor


@dataclass(frozen=True)
class AdaptiveServer(Term, Steps):
    """FedAdagrad, FedAdam and FedYogi as in Reddi et al., Alg. 2.

    Parameters
    ----------
    rule : {"adagrad", "adam", "yogi"}
        How the second moment is updated.
    lr : float
        Server learning rate η > 0.
    beta_1, beta_2 : float
        Decay of the first and the second moment, in [0, 1); Adagrad ignores `beta_2`.
    tau : float
        τ > 0, the degree of adaptivity; added outside the root.
    initial_v : float, optional
        The second moment before round 1; default τ².
    schedule : callable, optional
        ``schedule(round) -> factor`` multiplies `lr`.
    """

    name: ClassVar[str] = "adaptive-server"
    reads_lr: ClassVar[bool] = False
    ranges: ClassVar[Ranges] = {
        "lr": POSITIVE,
        "beta_1": DECAY,
        "beta_2": DECAY,
        "tau": POSITIVE,
        "initial_v": NOT_NEGATIVE,
        "rule": one_of("adagrad", "adam", "yogi"),
    }
    rule: str
    lr: float
    beta_1: float
    beta_2: float
    tau: float
    initial_v: float | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_schedule(self.schedule)

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        b1, b2 = self.beta_1, self.beta_2
        v0 = self.tau**2 if self.initial_v is None else self.initial_v
        lr = self.lr * _factor(self.schedule, ctx.round)
        new, step = Slot(), Arrays()
        for n, d in ((n, kept(d)) for n, d in delta.items()):
            m = b1 * server.get(f"{n}|m", 0 * d) + (1 - b1) * d  # line 11
            v, square = server.get(f"{n}|v", 0 * d + v0), d * d
            if self.rule == "adagrad":
                v = v + square  # line 12
            elif self.rule == "adam":
                v = b2 * v + (1 - b2) * square  # line 14
            else:
                above, below = 1.0 * (v > square), 1.0 * (v < square)
                v = v - (1 - b2) * square * (above - below)  # line 13: sign(v − Δ²)
            new[f"{n}|m"], new[f"{n}|v"] = m, v
            step[n] = lr * m / (v**0.5 + self.tau)  # line 15
        return new, step


class FedOpt(MethodStrategy):
    """Generalised FedAvg with any torch optimiser on the server.

    Parameters
    ----------
    server_optimizer : callable or str
        ``server_optimizer(params) -> torch.optim.Optimizer``, e.g.
        ``lambda p: torch.optim.SGD(p, lr=1.0)``, which is FedAvg. Or the name of a class of
        ``torch.optim`` that trains dense parameters of any shape.
    server_lr_schedule : callable, optional
        ``server_lr_schedule(round) -> factor`` multiplies the server's learning rate.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`. With a name, also those of
        that class, with torch's defaults: ``FedOpt("SGD", lr=0.7, momentum=0.5)``. ``nesterov=True``
        without a momentum, which torch refuses, takes FedAvgM's default of 0.9.

    Raises
    ------
    ValueError
        There is no such class, or the class refuses a value.
    TypeError
        An argument that neither the optimiser nor a strategy takes.
    """

    def __init__(
        self,
        server_optimizer: Maker | str,
        server_lr_schedule: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(server_optimizer, str):
            server_optimizer, kwargs = _named_optimizer(server_optimizer, kwargs)
        super().__init__([TorchServerOptimizer(server_optimizer, server_lr_schedule)], **kwargs)


def _named_optimizer(name: str, kwargs: Mapping[str, Any]) -> tuple[Maker, dict[str, Any]]:
    """Return (the factory of the optimiser with its own arguments, the strategy's arguments)."""
    base, classes = torch.optim.Optimizer, inspect.getmembers(torch.optim, inspect.isclass)
    kinds = {n: kind for n, kind in classes if issubclass(kind, base) and kind is not base}
    if name not in kinds:
        why = f"torch.optim has no optimiser '{name}'{nearest(name, kinds)}"
        raise ValueError(f"server_optimizer: {why}")
    parameters, settings = inspect.signature(kinds[name]).parameters, Options.names()
    known = {*parameters} - {"params"} | settings
    for argument in kwargs.keys() - known:
        why = f"takes '{argument}'{nearest(argument, known)}"
        raise TypeError(f"neither torch's {name} nor a strategy {why}")
    given = {k: v for k, v in kwargs.items() if k not in settings}
    if given.get("nesterov") and "momentum" in parameters:
        given.setdefault("momentum", 0.9)
    for argument, value in given.items():
        default = parameters[argument].default
        if isinstance(default, int | float):
            number = Range("a number") if type(default) is not bool else SWITCH
            number.check(f"FedOpt('{name}')", argument, value)
    make: Any = partial(kinds[name], **given)
    make([torch.zeros(2, 2, requires_grad=True)])  # torch refuses a wrong value here
    return make, {k: v for k, v in kwargs.items() if k in settings}


class FedOptClient(MethodClient):
    """The client of :class:`FedOpt`: local training with the optimiser that it is given."""


class FedAvgM(MethodStrategy):
    """FedAvg with momentum on the server, by torch's SGD (Hsu et al. 2019)."""

    def __init__(
        self,
        server_lr: float = 1.0,
        momentum: float = 0.9,
        server_lr_schedule: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        POSITIVE.check("FedAvgM", "server_lr", server_lr)
        DECAY.check("FedAvgM", "momentum", momentum)
        make = partial(torch.optim.SGD, lr=server_lr, momentum=momentum)
        super().__init__([TorchServerOptimizer(make, server_lr_schedule)], **kwargs)


class FedAvgMClient(MethodClient):
    """The client of :class:`FedAvgM`."""


class FedAdam(MethodStrategy):
    """FedAvg with Adam on the server (Reddi et al. 2021).

    Parameters as in :class:`AdaptiveServer`.
    """

    rule: ClassVar[str] = "adam"

    def __init__(
        self,
        server_lr: float = 0.1,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        tau: float = 1e-3,
        initial_v: float | None = None,
        server_lr_schedule: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        POSITIVE.check("FedAdam", "server_lr", server_lr)  # the term calls it lr
        settings = (server_lr, beta_1, beta_2, tau, initial_v, server_lr_schedule)
        super().__init__([AdaptiveServer(self.rule, *settings)], **kwargs)


class FedAdamClient(MethodClient):
    """The client of :class:`FedAdam`."""


class FedYogi(FedAdam):
    """FedAvg with Yogi on the server (Reddi et al. 2021).

    Parameters as in :class:`AdaptiveServer`.
    """

    method = "FedYogi"
    rule = "yogi"


class FedYogiClient(MethodClient):
    """The client of :class:`FedYogi`."""


class FedAdagrad(FedAdam):
    """FedAvg with Adagrad on the server (Reddi et al. 2021).

    Parameters as in :class:`AdaptiveServer`.
    """

    method = "FedAdagrad"
    rule = "adagrad"

    def __init__(
        self,
        server_lr: float = 0.1,
        beta_1: float = 0.0,
        tau: float = 1e-3,
        initial_v: float | None = None,
        server_lr_schedule: Schedule | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(server_lr, beta_1, 0.0, tau, initial_v, server_lr_schedule, **kwargs)


class FedAdagradClient(MethodClient):
    """The client of :class:`FedAdagrad`."""
