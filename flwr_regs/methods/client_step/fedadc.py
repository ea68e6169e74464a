"""FedADC: the server's momentum embedded in the clients' steps, so that it also controls drift.

| *Init*       ``m_1 = 0``
| *Broadcast*  ``w_t`` and ``m_t = (w_{t−1} − w_t)/(α η)``, which follows from the last global step
| *Step*       with ``m̄ = β_l m_t / K_k``, Alg. 3:
|              Nesterov (red): ``v ← v − η m̄``, then ``v ← v − η ∇f_k(v)``
|              heavy ball (blue): ``v ← v − η (∇f_k(v) + m̄)``
|              double momentum (Alg. 4): ``u_1 = g_1``, ``u_τ = φ u_{τ−1} + (1−φ) g_τ``,
|              ``v ← v − η (m̄ + u_τ)``
| *Upload*     ``v_k``
| *Update*     ``Δ̄ = (1/η) Σ p_k (w_t − v_k)``, ``m_{t+1} = Δ̄ + (β_g − β_l) m_t``,
|              ``w_{t+1} = w_t − α η m_{t+1}``

The Nesterov loop runs as one shift by ``−η m̄``, then heavy-ball steps, then one shift back by ``+η m̄``.
With SGD this visits the same points. The client's optimiser must be SGD without momentum, because any
other would transform m̄ together with the gradients. The momentum has gradient units, so η may change
over rounds (the paper divides by the η of the round). Each client divides by its own number of steps K_k:
the planned number E, or its step budget if that is smaller. Under a time budget it is E: the steps are
not known beforehand. With ``incomplete="scale"`` every client divides by E, whatever its budget, because
the server scales its whole update by ``E / s_k``, the momentum's part included. The paper has one H for all
clients. Alg. 4's
second momentum is torch's ``SGD(momentum=φ, dampening=φ)``: its average leaves a constant m̄ in every
gradient unchanged.

**FedADC+** (Sec. III) adds self-confidence distillation to the local loss, Eq. 7:
``(1−λ) CE + λ T² KL(p̂ ‖ p)``, ``p = softmax(logits/T)``, teacher ``p̃ = softmax(w_t's logits/T)``,
``ρ_i = γ_i / max γ`` from the client's class shares γ, ``p̂_i = (1 − ρ_i) p̃_i`` for i ≠ y and
``p̂_y = 1 − Σ_{i≠y} p̂_i``. The paper states neither T² nor T. T² and the default T = 4 come from the
implementation that it names (CS-KD). The formula is in client/train/distillation.py, because
personalisation (Sec. IV-D, client/personal.py) uses it too.

**SlowMo** (Alg. 2) has momentum on the server only: ``m ← β m + Δ̄``, ``w ← w − α η m``.

Source: Ozfatura, Ozfatura, Gündüz, "FedADC: Accelerated federated learning with drift control"
(2021), Alg. 2-4, Eqs. 7-9; Wang, Tantia, Ballas, Rabbat, "SlowMo" (2020; first version 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.abilities import Steers, Steps
from flwr_regs.client.train.distillation import self_confidence_loss
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.last_step import LastStep, steps_to_spread
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.sgd import SCHEDULE, unlike_sgd, with_settings
from flwr_regs.term import DECAY, POSITIVE, SHARE, Ranges, Term, one_of

__all__ = [
    "EmbeddedMomentum",
    "FedADC",
    "FedADCClient",
    "FedADCPlus",
    "FedADCPlusClient",
    "SelfDistillation",
    "SlowMo",
    "SlowMoClient",
    "SlowMomentum",
]


@dataclass(frozen=True)
class EmbeddedMomentum(LastStep, Steps, Steers):
    """FedADC's momentum, on the clients and on the server.

    Parameters
    ----------
    beta_local, beta_global : float
        β_l and β_g, in [0, 1): the share of the momentum that the clients' steps embed, and the total
        decay of the momentum. With `local_momentum` they are the same, and may be 1, as in the co-author's
        code: then each round repeats the whole last step.
    alpha : float
        Server step size α > 0.
    variant : {"nesterov", "heavy-ball"}
        The red or the blue lines of Alg. 3.
    local_momentum : float, optional
        φ of Alg. 4, in [0, 1). Its step is the heavy-ball one; `variant` has no effect then.
    """

    name: ClassVar[str] = "fedadc"
    elementwise: ClassVar[bool] = True
    counts_on_rate: ClassVar[str] = SCHEDULE.format("FedADC")
    ranges: ClassVar[Ranges] = {
        "beta_local": SHARE,
        "beta_global": SHARE,
        "alpha": POSITIVE,
        "local_momentum": DECAY,
        "variant": one_of("nesterov", "heavy-ball"),
    }
    beta_local: float
    beta_global: float
    alpha: float = 1.0
    variant: str = "nesterov"
    local_momentum: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_momentum is None:
            for name in ("beta_local", "beta_global"):
                DECAY.check(type(self).__name__, name, getattr(self, name))
        elif self.beta_local != self.beta_global:
            raise ValueError("Alg. 4 (local_momentum) has one beta for clients and server")

    def recover(self, step: Arrays, lr: float) -> Slot:
        return {n: -s / (self.alpha * lr) for n, s in step.items()}  # line 19 solved for m_{t+1}

    def _per_step(self, ctx: ClientContext) -> Arrays:
        steps = steps_to_spread(ctx)
        return {n: self.beta_local * m / steps for n, m in ctx.broadcast.items()}  # m̄, line 5

    def _shift(self, ctx: ClientContext) -> Arrays:
        """Return ``η m̄``, by which the steps of Nesterov's form are shifted."""
        shifts = self.variant == "nesterov" and self.local_momentum is None
        return {n: ctx.lr * m for n, m in self._per_step(ctx).items()} if shifts else {}

    def client_optimizer(self, optimizer: Any) -> Any:
        if what := unlike_sgd(optimizer, ["momentum", "lr"]):
            raise ValueError(
                "FedADC's clients run SGD without momentum of their own, at the round's learning rate: it "
                f"adds m̄ to the gradients, which {what} may accumulate or rescale. For Alg. 4's momentum "
                "set local_momentum=..."
            )
        phi = self.local_momentum
        return optimizer if phi is None else with_settings(optimizer, momentum=phi, dampening=phi)

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        shift = self._shift(ctx)  # line 7, once
        return {n: p - shift.get(n, 0.0) for n, p in params.items()} if shift else params

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        m = self._per_step(ctx)
        return {n: g + m.get(n, 0.0) for n, g in grads.items()} if m else grads  # line 11

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        shift = self._shift(ctx)  # it is undone
        return {n: d + shift.get(n, 0.0) for n, d in delta.items()} if shift else delta, {}, {}

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        return _momentum(server, delta, self.beta_global - self.beta_local, self.alpha, ctx.lr)


@dataclass(frozen=True)
class SelfDistillation(Term):
    """FedADC+'s self-confidence distillation from the round's global model (Eq. 7).

    Needs integer labels and a model whose output is class logits ``(batch, classes)``. Composes with any
    method.

    Parameters
    ----------
    lam : float
        λ in [0, 1]; 0 gives the plain loss.
    temperature : float
        T > 0 of both softmaxes.
    """

    name: ClassVar[str] = "self-distillation"
    needs = ("start_output", "label_counts")
    ranges: ClassVar[Ranges] = {"lam": SHARE, "temperature": POSITIVE}
    lam: float = 0.35
    temperature: float = 4.0

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        return self_confidence_loss(base, ctx, self.lam, self.temperature)


@dataclass(frozen=True)
class SlowMomentum(Term, Steps):
    """SlowMo's server momentum (Alg. 2); clients train as in FedAvg.

    Parameters
    ----------
    beta : float
        Momentum β in [0, 1).
    alpha : float
        Server step size α > 0.
    """

    name: ClassVar[str] = "slowmo"
    ranges: ClassVar[Ranges] = {"beta": DECAY, "alpha": POSITIVE}
    beta: float
    alpha: float = 1.0

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        return _momentum(server, delta, self.beta, self.alpha, ctx.lr)


def _momentum(server: Slot, delta: Arrays, decay: float, alpha: float, lr: float) -> ServerStep:
    """Return (m, ``−α η m``), ``m ← Δ̄ + decay · m``: lines 12 to 16 of Alg. 2, 16 to 19 of Alg. 3."""
    m = {n: -d / lr for n, d in delta.items()}  # Δ̄
    if server:
        m = {n: g + decay * server[n] for n, g in m.items()}
    return m, {n: -alpha * lr * b for n, b in m.items()}


def _betas(
    beta: float, local: float | None, total: float | None, local_momentum: float | None
) -> tuple[float, float]:
    """Return β_l and β_g, where `beta` stands for those that are not given."""
    (DECAY if local_momentum is None else SHARE).check("FedADC", "beta", beta)  # no term has it
    if local_momentum is not None and total is None:  # Alg. 4 has one beta
        total = local
    return beta if local is None else local, beta if total is None else total


class FedADC(MethodStrategy):
    """Accelerated federated learning with drift control (Alg. 3 and 4).

    Parameters
    ----------
    beta : float
        β_l = β_g, as in the paper's experiments; in [0, 1), or up to 1 with `local_momentum`.
    beta_local, beta_global : float, optional
        Override `beta` on the clients or on the server. With `local_momentum`, `beta_local` sets both.
    alpha : float
        Server step size α.
    variant : {"nesterov", "heavy-ball"}
        How a client applies the momentum.
    local_momentum : float, optional
        φ of the double momentum of Alg. 4.
    downlink : {"model", "delta"}
        As for :class:`flwr_regs.FedFOR`; clients compute ``m_t`` from the last step.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self,
        beta: float = 0.9,
        beta_local: float | None = None,
        beta_global: float | None = None,
        alpha: float = 1.0,
        variant: str = "nesterov",
        local_momentum: float | None = None,
        *,
        downlink: str = "model",
        weighting: str = "uniform",
        **kwargs: Any,
    ) -> None:
        betas = _betas(beta, beta_local, beta_global, local_momentum)
        term = EmbeddedMomentum(*betas, alpha, variant, local_momentum)
        super().__init__([term], downlink=downlink, weighting=weighting, **kwargs)


class FedADCClient(MethodClient):
    """The client of :class:`FedADC`."""

    terms = (EmbeddedMomentum,)


class FedADCPlus(MethodStrategy):
    """FedADC with self-confidence distillation on the clients (Sec. III).

    Takes FedADC's parameters and `lam`, `temperature` of :class:`SelfDistillation`.
    """

    def __init__(
        self,
        beta: float = 0.9,
        beta_local: float | None = None,
        beta_global: float | None = None,
        alpha: float = 1.0,
        variant: str = "nesterov",
        local_momentum: float | None = None,
        lam: float = 0.35,
        temperature: float = 4.0,
        *,
        downlink: str = "model",
        weighting: str = "uniform",
        **kwargs: Any,
    ) -> None:
        betas = _betas(beta, beta_local, beta_global, local_momentum)
        term = EmbeddedMomentum(*betas, alpha, variant, local_momentum)
        terms = [SelfDistillation(lam, temperature), term]
        super().__init__(terms, downlink=downlink, weighting=weighting, **kwargs)


class FedADCPlusClient(MethodClient):
    """The client of :class:`FedADCPlus`."""

    terms = (SelfDistillation, EmbeddedMomentum)


class SlowMo(MethodStrategy):
    """FedAvg with a slow momentum on the server (Alg. 2).

    Parameters
    ----------
    beta : float
        Momentum β in [0, 1); 0 with α = 1 is FedAvg.
    alpha : float
        Server step size α.
    weighting : {"uniform", "num-examples"}
        The paper uses uniform weights.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self, beta: float, alpha: float = 1.0, *, weighting: str = "uniform", **kwargs: Any
    ) -> None:
        super().__init__([SlowMomentum(beta, alpha)], weighting=weighting, **kwargs)


class SlowMoClient(MethodClient):
    """The client of :class:`SlowMo`: plain local training."""
