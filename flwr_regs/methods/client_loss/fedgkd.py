"""FedGKD: distillation from the mean of the last global models.

| *Init*       no global models
| *Broadcast*  ``w_t`` and the teacher, the mean of the last M global models, ``w_t`` among them; while
|              ``w_t`` is the only one (round 1, or M = 1), ``w_t`` alone
| *Step*       ``v ← ClientOpt(v, ∇(f_k(v) + (γ/2) T² KL(p_teacher ‖ p)))``, from ``v = w_t``;
|              ``p = softmax(z/T)``, z the logits of v, and p_teacher the same of the teacher
| *Upload*     ``v_k``, ``n_k``
| *Update*     as FedAvg; the server keeps ``w_t`` as one of the last M − 1 models

In round t < M the teacher is the mean of the t models that there are. It is a mean of parameters, and has
``w_t``'s buffers and the client's private entries as they were when the round began. It runs in eval mode.
The divergence is the mean over the batch. T = 1 is the paper's; the factor T² keeps the gradient's size
where T is another.

Source: Yao, Pan, Dai, Wan, Ding, Jin, Xu, Sun, "Local-global knowledge distillation in heterogeneous
federated learning with non-IID data" (2021), the variant FedGKD with one averaged teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from flwr_regs.client.train.distillation import check_classes, divergence
from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, ServerStep, Slot
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.uploads import joined, under
from flwr_regs.term import COUNT, NOT_NEGATIVE, POSITIVE, Ranges, Term

__all__ = ["FedGKD", "FedGKDClient", "PastModels"]


@dataclass(frozen=True)
class PastModels(Term):
    """FedGKD's distillation from the mean of the last global models.

    Needs integer labels and a model whose output is class logits ``(batch, classes)``.

    Parameters
    ----------
    gamma : float
        Strength γ ≥ 0; 0 is FedAvg.
    models : int
        M ≥ 1, the global models in the teacher. The server keeps M − 1 of them.
    temperature : float
        T > 0 of both softmaxes.
    """

    name: ClassVar[str] = "past-models"
    keeps_delta: ClassVar[bool] = True
    ranges: ClassVar[Ranges] = {"gamma": NOT_NEGATIVE, "models": COUNT, "temperature": POSITIVE}
    gamma: float = 0.2
    models: int = 5
    temperature: float = 1.0

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        past = self._past(server)
        teacher: Slot = {}
        for n, w in ctx.params.items() if past else ():
            total = w.astype(np.float64) + sum(model[n] for model in past)
            teacher[n] = np.asarray(total / (1 + len(past)), dtype=w.dtype)
        return teacher

    def _past(self, server: Slot) -> list[Arrays]:
        """Return the last models that the server keeps: that before ``w_t``, the one before it, …"""
        return [m for age in range(1, self.models) if (m := under(server, f"{age}."))]

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        check_classes(ctx, "FedGKD")
        with torch.no_grad():
            teacher = ctx.output_at({n: ctx.broadcast.get(n, w) for n, w in ctx.start.items()})
        return base + self.gamma / 2 * divergence(teacher, ctx.output, self.temperature)

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        """Keep ``w_t`` under ``"1.<name>"``, the one before under ``"2.<name>"``, up to M − 1."""
        models = [{n: w.copy() for n, w in ctx.params.items()}, *self._past(server)]
        last = models[: self.models - 1]
        return joined(**{f"{age}": model for age, model in enumerate(last, 1)}), delta


class FedGKD(MethodStrategy):
    """FedAvg with distillation from the mean of the last global models.

    Parameters
    ----------
    gamma, models, temperature : float, int, float
        See :class:`PastModels`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self, gamma: float = 0.2, models: int = 5, temperature: float = 1.0, **kwargs: Any
    ) -> None:
        super().__init__([PastModels(gamma, models, temperature)], **kwargs)


class FedGKDClient(MethodClient):
    """The client of :class:`FedGKD`."""

    terms = (PastModels,)
