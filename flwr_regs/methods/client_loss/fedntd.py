"""FedNTD: distillation from the global model, over the classes other than the true one.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← ClientOpt(v, ∇(f_k(v) + β τ² KL(q̃_g ‖ q̃)))``, from ``v = w_t``; on an example with
|              label y, ``q̃ = softmax(z/τ)`` over the classes i ≠ y alone, z the logits of v, and q̃_g the
|              same of ``w_t``  (Sec. 3)
| *Upload*     ``v_k``, ``n_k``
| *Update*     as FedAvg

The true class takes no part in either softmax: it is left out, its logit is not set to zero. So the
cross-entropy alone says what the true class gets, and the rest keeps the global model's proportions. With
two classes the term is zero.

The teacher is the global model of the round, in eval mode. The divergence is the mean over the batch. The
factor τ² keeps the gradient's size where τ is not the paper's 1.

Source: Lee, Jeong, Shin, Bae, Yun, "Preservation of the global knowledge by not-true distillation in
federated learning" (2022), Sec. 3 and Alg. 1. There β = 1 and τ = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flwr_regs.client.train.distillation import check_classes, divergence
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.term import NOT_NEGATIVE, POSITIVE, Arrays, ClientContext, Ranges, Term

__all__ = ["FedNTD", "FedNTDClient", "NotTrueDistillation"]


@dataclass(frozen=True)
class NotTrueDistillation(Term):
    """FedNTD's distillation over the classes other than the true one.

    Needs integer labels, none of them ignored (-100), and a model whose output is class logits
    ``(batch, classes)``.

    Parameters
    ----------
    beta : float
        Strength β ≥ 0; 0 is FedAvg.
    temperature : float
        τ > 0 of both softmaxes.
    """

    name: ClassVar[str] = "not-true-distillation"
    needs = ("start_output",)
    ranges: ClassVar[Ranges] = {"beta": NOT_NEGATIVE, "temperature": POSITIVE}
    beta: float = 1.0
    temperature: float = 1.0

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        check_classes(ctx, "FedNTD")
        others = torch.arange(ctx.output.shape[-1] - 1, device=ctx.output.device)
        others = others + (others >= ctx.targets.unsqueeze(-1))  # i ≠ y, (batch, classes − 1)
        teacher, student = (z.gather(-1, others) for z in (ctx.start_output, ctx.output))
        return base + self.beta * divergence(teacher, student, self.temperature)


class FedNTD(MethodStrategy):
    """FedAvg with not-true distillation on the clients.

    Parameters
    ----------
    beta, temperature : float
        See :class:`NotTrueDistillation`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, beta: float = 1.0, temperature: float = 1.0, **kwargs: Any) -> None:
        super().__init__([NotTrueDistillation(beta, temperature)], **kwargs)


class FedNTDClient(MethodClient):
    """The client of :class:`FedNTD`."""

    terms = (NotTrueDistillation,)
