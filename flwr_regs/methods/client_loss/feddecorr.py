"""FedDecorr: the features of each batch are decorrelated, so that they do not collapse into few dimensions.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← ClientOpt(v, ∇(f_k(v) + β ℓ_dec))``, from ``v = w_t``; on a batch of B examples
|              ``ℓ_dec = (1/B) mean_{i≠j} C_ij²``, ``C = x̂ᵀ x̂``
| *Upload*     ``v_k``
| *Update*     ``w ← mean v_k``

x, ``(B, d)``, is the input of the output layer. x̂ is x, each feature centred over the batch and divided by
``√(1e-8 + σ²)``, σ² its unbiased variance. So C is ``B − 1`` times the features' correlation matrix, and
ℓ_dec has no unit. It is 0 where there is one example or one feature.

The paper writes ``(1/d²) ‖K‖_F²`` with the correlation matrix K, whose diagonal is constant. The authors'
code, which is followed here, has some ``(B − 1)²/B`` times that.

Source: Shi, Liang, Zhang, Tan, Bai, "Towards understanding and mitigating dimensional collapse in
heterogeneous federated learning" (2023), Sec. 4. Its code weighs the clients by their examples;
here they count alike unless `weighting` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.term import NOT_NEGATIVE, Arrays, ClientContext, Ranges, Term

__all__ = ["Decorrelation", "FedDecorr", "FedDecorrClient"]


@dataclass(frozen=True)
class Decorrelation(Term):
    """FedDecorr's loss ``β (1/B) mean_{i≠j} C_ij²`` of a batch's features.

    Parameters
    ----------
    beta : float
        Strength β ≥ 0; 0 is FedAvg.
    """

    name: ClassVar[str] = "feddecorr"
    needs = ("features",)
    ranges: ClassVar[Ranges] = {"beta": NOT_NEGATIVE}
    beta: float = 0.1

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        batch, d = ctx.features.shape
        if batch == 1 or d == 1:
            return base
        x = ctx.features.to(torch.promote_types(ctx.features.dtype, torch.float32))
        x = x - x.mean(0)
        x = x / (1e-8 + x.square().sum(0) / (batch - 1)).sqrt()
        others = (x.T @ x) * (1 - torch.eye(d, dtype=x.dtype, device=x.device))  # C_ij, i ≠ j
        return base + self.beta * others.square().sum() / (d * (d - 1) * batch)


class FedDecorr(MethodStrategy):
    """FedAvg with decorrelated features on the clients.

    Parameters
    ----------
    beta : float
        See :class:`Decorrelation`. The paper uses 0.1.
    weighting : {"uniform", "num-examples"}
        Weights of the updates.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, beta: float = 0.1, *, weighting: str = "uniform", **kwargs: Any) -> None:
        super().__init__([Decorrelation(beta)], weighting=weighting, **kwargs)


class FedDecorrClient(MethodClient):
    """The client of :class:`FedDecorr`."""

    terms = (Decorrelation,)
