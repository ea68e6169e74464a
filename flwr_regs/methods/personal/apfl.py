"""APFL: each client mixes a model of its own with the global one, and learns how much of each.

| *Init*       nothing; client k's own u_k starts at the ``w_t`` of its first round, a_k at `alpha`
| *Broadcast*  ``w_t``
| *Step*       on one batch, with the mixture ``v̄ = a u + (1 − a) v``, all three from the old values:
|              ``v ← v − η ∇f_k(v)``,  ``u ← u − η a ∇f_k(v̄)``,  ``a ← a − η ⟨u − v, ∇f_k(v̄)⟩``
| *Upload*     ``v_k``, ``n_k``. The client keeps u_k and a_k, whether or not the server used its reply
| *Update*     as FedAvg, to the bit

The gradient with respect to u of the loss at v̄ has the factor a (Alg. 1; the paper's analysis has it too).
The paper learns a ("adaptive α") by the gradient of the same loss. Here it takes a step with every batch,
or, as in the authors' code, with the first batch of a round alone (``alpha_every="round"``);
docs/methods/apfl.md compares them. It is clipped to [0, 1]. In an evaluation the client's own model is
``a_k u_k + (1 − a_k) w_{t+1}``.

The v beside which u and a are trained is FedAvg's: plain SGD on the client's own loss from ``w_t``. With
another optimiser, or beside another method, the v that is sent differs from it. So each step costs two
gradients beside its own.

The mixture has the parameters that are trained and shared. Private entries (FedBN) are the client's own,
and buffers the global model's. A client that lost u_k and a_k begins anew; the history names it.

Source: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning" (2020), Alg. 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flwr_regs.abilities import Personalises
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.uploads import joined, under
from flwr_regs.term import SHARE, SWITCH, Arrays, ClientContext, Ranges, Slot, Term, one_of

__all__ = ["APFL", "APFLClient", "MixedModel"]

WEIGHT = "a"  # beside the entries "u.<name>"
LEARNS = "learns"  # 1 at steps that learn a, else 0


@dataclass(frozen=True)
class MixedModel(Term, Personalises):
    """A mixture of a model of the client's own and the global one (Alg. 1).

    Parameters
    ----------
    alpha : float
        The own model's share a of the mixture at first, from 0 to 1.
    adaptive : bool
        Whether each client learns its share.
    alpha_every : {"round", "step"}
        When it does: at a round's first step alone, as in the authors' code, or at each step.
    """

    name: ClassVar[str] = "apfl"
    keeps: ClassVar[str] = "always"
    keeps_update: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {
        "alpha": SHARE,
        "adaptive": SWITCH,
        "alpha_every": one_of("round", "step"),
    }
    alpha: float = 0.5
    adaptive: bool = True
    alpha_every: str = "step"

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        def loss(p: Arrays, at: ClientContext) -> Any:
            u, v = under(p, "u."), under(p, "v.")
            learns, a = p[LEARNS].detach(), p[WEIGHT]
            a = learns * a + (1 - learns) * a.detach()
            mixed = {n: a * u[n] + (1 - a) * w.detach() for n, w in v.items()}
            return sum(at.loss_fn(at.output_at(model), at.targets) for model in (v, mixed))

        def stepped(p: Arrays) -> Arrays:
            again = p[LEARNS] * (self.alpha_every == "step")
            return {**p, WEIGHT: p[WEIGHT].clamp(0, 1), LEARNS: again}

        kept: Slot = {f"u.{n}": ctx.client.get(f"u.{n}", w) for n, w in ctx.start.items()}
        kept[WEIGHT] = self._share(ctx)
        both = kept | joined(v=ctx.start)
        both[LEARNS] = torch.full_like(kept[WEIGHT], float(self.adaptive))
        end = ctx.train(both, loss, ctx.num_steps, after=stepped)
        return delta, {}, {key: end[key] for key in kept}

    def _share(self, ctx: ClientContext) -> Any:
        """Return a_k as the client's last round left it."""
        like = next(iter(ctx.start.values()))
        first = torch.tensor(self.alpha, dtype=like.dtype, device=like.device)
        return ctx.client.get(WEIGHT, first)

    def personal(self, params: Arrays, ctx: ClientContext) -> Arrays:
        a = self._share(ctx)
        return {n: a * ctx.client.get(f"u.{n}", w) + (1 - a) * w for n, w in params.items()}


class APFL(MethodStrategy):
    """FedAvg, and on each client a mixture of its own model and the global one.

    Parameters
    ----------
    alpha, adaptive, alpha_every : float, bool, str
        See :class:`MixedModel`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self, alpha: float = 0.5, adaptive: bool = True, alpha_every: str = "step", **kwargs: Any
    ) -> None:
        super().__init__([MixedModel(alpha, adaptive, alpha_every)], **kwargs)


class APFLClient(MethodClient):
    """The client of :class:`APFL`."""

    terms = (MixedModel,)
