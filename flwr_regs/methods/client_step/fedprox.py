"""FedProx: a proximal term that keeps local training near the global model.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← ClientOpt(v, ∇f_k(v) + μ (v − w_t))``, from ``v = w_t``
| *Upload*     ``v_k``, ``n_k``
| *Update*     as FedAvg

`correct` adds the penalty's gradient directly. The step is the same as with the penalty in the loss,
and autograd builds no second graph.

``implicit=True`` is our addition, not the paper's: ``v ← v − η (∇f_k(v) + μ (v − w_t)) / (1 + η μ)``.
This is the implicit Euler step of the pull, ``v' = v − η (∇f_k(v) + μ (v' − w_t))``, stable for every μ.
The explicit step is stable while ``η μ < 2``; a μ beyond that gives one warning.

Source: Li et al., "Federated optimization in heterogeneous networks" (2020), Alg. 2: the local
objective ``h_k(v; w_t) = F_k(v) + μ/2 ‖v − w_t‖²``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.once import log_once, unstable
from flwr_regs.term import NOT_NEGATIVE, SWITCH, Arrays, ClientContext, Ranges, Term

__all__ = ["FedProx", "FedProxClient", "Proximal"]


@dataclass(frozen=True)
class Proximal(Term):
    """The gradient of ``μ/2 ‖v − w_t‖²``.

    Parameters
    ----------
    mu : float
        Strength μ ≥ 0, in units of 1 / (learning rate · steps); 0 is FedAvg.
    implicit : bool
        Take the pull's step implicitly (ours, not the paper's). It divides all that stands on the term's
        left. Right of all other forces, with SGD without momentum, the step is the implicit Euler step of
        the pull. Left of FedADC it is so too: FedADC's shift comes after it. With client momentum it is
        stable, but no longer that step; with an adaptive optimiser nothing is exact.
    """

    name: ClassVar[str] = "proximal"
    elementwise: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"mu": NOT_NEGATIVE, "implicit": SWITCH}
    mu: float
    implicit: bool = False

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        if not self.implicit and ctx.lr * self.mu > 2:
            log_once(unstable(self.name, "mu", self.mu, 2 / ctx.lr, "η is"), self.name, ctx)
        # ∇h_k, in place: a sum into a third array takes several times as long
        out = {n: (params[n] - ctx.start[n]).mul_(self.mu).add_(g) for n, g in grads.items()}
        return {n: g / (1 + ctx.lr * self.mu) for n, g in out.items()} if self.implicit else out


class FedProx(MethodStrategy):
    """FedAvg with a proximal term on the clients.

    Parameters
    ----------
    mu : float
        Strength μ of the proximal term; 0 is FedAvg.
    implicit : bool
        See :class:`Proximal`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, mu: float, *, implicit: bool = False, **kwargs: Any) -> None:
        super().__init__([Proximal(mu, implicit)], **kwargs)


class FedProxClient(MethodClient):
    """The client of :class:`FedProx`."""

    terms = (Proximal,)
