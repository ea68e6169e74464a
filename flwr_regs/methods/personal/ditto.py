"""Ditto: beside the global model, each client trains a model of its own, pulled towards the global one.

| *Init*       nothing; client k's own model u_k starts at the ``w_t`` of its first round
| *Broadcast*  ``w_t``
| *Step*       the method's, on ``v``; beside it ``u_k ← u_k − η (∇F_k(u_k) + λ (u_k − w_t))``
| *Upload*     ``v_k``, ``n_k``. The client keeps u_k, whether or not the server used its reply
| *Update*     the method's; alone it is FedAvg, to the bit

The global model is solved by any method, and u_k by plain SGD (Alg. 1). So `PersonalModel` is a term that
goes beside any other: ``[FirstOrder(), PersonalModel(0.1)]``. u_k takes as many steps as ``v``, on the same
batches in the same order, with the round's η. The paper's Alg. 1 lets both differ: `personal_lr` sets
another rate. In an evaluation u_k is the client's own model: ``"personal-accuracy"``.

u_k has the parameters that are trained and shared. Private entries (FedBN, FedPer) are the client's own as
``v`` left them, and buffers are the global model's: u_k trains with each batch's own statistics, and is
evaluated with theirs. A client that lost its u_k begins anew, at ``w_t``; the history names it.

Source: Li, Hu, Beirami, Smith, "Ditto: Fair and robust federated learning through personalization"
(2021), Alg. 1. λ = 0.1 is one of the values that it tunes over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.abilities import Personalises
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.term import NOT_NEGATIVE, POSITIVE, Arrays, ClientContext, Ranges, Slot, Term

__all__ = ["Ditto", "DittoClient", "PersonalModel"]


@dataclass(frozen=True)
class PersonalModel(Term, Personalises):
    """A model of the client's own, pulled towards the global one (Alg. 1).

    Parameters
    ----------
    lam : float
        Strength λ ≥ 0 of the pull; 0 trains each client's own model on its data alone.
    personal_lr : float, optional
        Learning rate of the own model's SGD. None: that of the round.
    """

    name: ClassVar[str] = "ditto"
    keeps: ClassVar[str] = "always"
    keeps_update: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"lam": NOT_NEGATIVE, "personal_lr": POSITIVE}
    lam: float = 0.1
    personal_lr: float | None = None

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        rate = 1.0 if self.personal_lr is None else self.personal_lr / ctx.lr

        def loss(u: Arrays, at: ClientContext) -> Any:
            pull = sum(((p - ctx.start[n]) ** 2).sum() for n, p in u.items())
            return rate * (at.loss_fn(at.output_at(u), at.targets) + self.lam / 2 * pull)

        u = {n: ctx.client.get(n, w) for n, w in ctx.start.items()}
        return delta, {}, ctx.train(u, loss, ctx.num_steps)

    def personal(self, params: Arrays, ctx: ClientContext) -> Arrays:
        return {n: ctx.client.get(n, p) for n, p in params.items()}


class Ditto(MethodStrategy):
    """FedAvg, and a personal model of each client beside it.

    Parameters
    ----------
    lam, personal_lr : float, float or None
        See :class:`PersonalModel`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, lam: float = 0.1, personal_lr: float | None = None, **kwargs: Any) -> None:
        super().__init__([PersonalModel(lam, personal_lr)], **kwargs)


class DittoClient(MethodClient):
    """The client of :class:`Ditto`."""

    terms = (PersonalModel,)
