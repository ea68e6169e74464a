"""MOON: a contrastive loss between the features of three models.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← ClientOpt(v, ∇(f_k(v) + μ ℓ_con))``, from ``v = w_t``; the batch mean of
|              ``ℓ_con = −log(e^{sim(z, z_g)/τ} / (e^{sim(z, z_g)/τ} + e^{sim(z, z_p)/τ}))``
| *Upload*     ``v_k``, ``n_k``. The client keeps ``v_k``
| *Update*     as FedAvg

z are the features of the model that is trained, z_g those of ``w_t``, z_p those of the model with which
the client's last round ended; sim is the cosine. Only z has a gradient. A client that has no last model
(its first round, or lost state) trains without the term.

The paper puts a projection head (two layers, 256 outputs) between the base encoder and the output layer,
and z is the head's output: the input of the output layer. That is the default here, with whatever model
the user has. `projection` names another layer whose output is z, such as that of a head beside the path to
the logits.

The teachers run in eval mode, with the buffers and private entries of the round's start. A term sees no
buffers, so z_p has ``w_t``'s BatchNorm statistics, not those of the last model: a departure.

The last model is kept always, whether or not the server used it: it is where the client's training ended.
A zero vector has no direction: its cosine with any other is 0, and so is the gradient.

Source: Li, He, Song, "Model-contrastive federated learning" (2021), Sec. 3, Alg. 1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from flwr_regs.chain import OUTPUT_OF
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.term import NOT_NEGATIVE, POSITIVE, Arrays, ClientContext, Range, Ranges, Slot, Term

__all__ = ["MOON", "MOONClient", "ModelContrast"]


@dataclass(frozen=True)
class ModelContrast(Term):
    """MOON's loss: features like the global model's, unlike the last local model's.

    Parameters
    ----------
    mu : float
        Strength μ ≥ 0; 0 is FedAvg.
    temperature : float
        τ > 0.
    projection : str, optional
        The layer of the model whose output is z. Default: z is the input of the output layer.
    """

    name: ClassVar[str] = "model-contrast"
    keeps: ClassVar[str] = "always"
    ranges: ClassVar[Ranges] = {
        "mu": NOT_NEGATIVE,
        "temperature": POSITIVE,
        "projection": Range("a layer's name", bool, str),
    }
    mu: float
    temperature: float = 0.5
    projection: str | None = None

    @property
    def needs(self) -> Collection[str]:
        return ("features",) if self.projection is None else (OUTPUT_OF + self.projection,)

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        if not ctx.client:
            return base
        z = ctx.features if self.projection is None else ctx.layers[self.projection]
        with torch.no_grad():
            z_global = ctx.features_at(ctx.start, self.projection)
            z_last = ctx.features_at(ctx.client, self.projection)
        nearer = _cosine(z, z_global) - _cosine(z, z_last)
        return base - self.mu * F.logsigmoid(nearer / self.temperature).mean()  # ℓ_con

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        return delta, {}, {n: ctx.start[n] + d for n, d in delta.items()}  # v_k


def _cosine(a: Any, b: Any) -> Any:
    """Return the cosine of each row of `a` with that of `b`, ``(batch,)``; 0 if one of them is zero."""
    return (_unit(a) * _unit(b)).sum(-1)


def _unit(rows: Any) -> Any:
    """Return each row, ``(batch, d)``, with norm 1; a zero row as it is, without a gradient."""
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    largest = rows.detach().abs().amax(-1, keepdim=True)  # squares may overflow
    zero = largest == 0
    scaled = rows / torch.where(zero, 1.0, largest)
    squares = (scaled**2).sum(-1, keepdim=True)
    return torch.where(zero, 0.0, scaled / torch.where(zero, 1.0, squares).sqrt())


class MOON(MethodStrategy):
    """FedAvg with MOON's model-contrastive loss on the clients.

    Parameters
    ----------
    mu, temperature, projection : float, float, str
        See :class:`ModelContrast`. The paper tunes μ over 0.1, 1, 5 and 10, and uses τ = 0.5.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self,
        mu: float = 5.0,
        temperature: float = 0.5,
        projection: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__([ModelContrast(mu, temperature, projection)], **kwargs)


class MOONClient(MethodClient):
    """The client of :class:`MOON`."""

    terms = (ModelContrast,)
