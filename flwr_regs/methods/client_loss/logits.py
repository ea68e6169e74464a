"""FedLC and FedRS: the loss of changed logits, for classes of which a client has few examples or none.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← ClientOpt(v, ∇ℓ(z̃, y))``, from ``v = w_t``; z̃ are the changed logits:
|              FedLC: ``z̃_c = z_c − τ n_c^{−1/4}``, n_c the client's examples of class c
|              FedRS: ``z̃_c = α z_c`` for each class c that the client lacks
| *Upload*     ``v_k``, ``n_k``
| *Update*     as FedAvg

ℓ is the client's own loss, the cross-entropy in the papers. A term adds ``ℓ(z̃, y) − ℓ(z, y)`` to what
stands on its left, so that it composes: on the plain loss it gives ``ℓ(z̃, y)``. A term on its left that
scales the plain loss (FedADC+'s distillation) would leave a part of ``−ℓ(z, y)``: put it on the right.

n_c is counted over all the client's data, once a round. FedLC divides by zero for a class that the client
lacks. The limit ``z̃_c → −∞`` leaves that class out of the softmax, and so does this file: its logit
becomes 100 less than the largest other one, a constant, whose exponential is below any rounding. So the
loss and all gradients are finite. ``absent=1.0`` (ours) counts such a class as one example instead. A label
that the count has not seen, in data that change from pass to pass, counts as often as its batch has it.

FedRS restricts the output layer's weights. Its logits have a bias here, and α multiplies the whole logit.

Sources: Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated learning with label distribution skew via logits
calibration" (2022), Sec. 4 (FedLC); Li, Zhan, "FedRS: Federated learning with restricted softmax for label
distribution non-IID data" (2021), Sec. 4, where α = 0.5 (FedRS).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flwr_regs.client.train.distillation import check_classes, one_hot
from flwr_regs.client.train.task import returns_loss
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.methods.parts.uploads import wide
from flwr_regs.term import NOT_NEGATIVE, POSITIVE, SHARE, Arrays, ClientContext, Ranges, Term

__all__ = ["FedLC", "FedLCClient", "FedRS", "FedRSClient", "LogitCalibration", "RestrictedSoftmax"]

FAR = 100.0  # e^−100 is below the rounding of any dtype


class _ChangedLogits(Term):
    """The part that both terms share: the loss of changed logits in place of the plain one."""

    needs = ("label_counts",)
    who: ClassVar[str]

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        check_classes(ctx, self.who)
        if returns_loss(ctx.output):
            raise ValueError(
                f"{self.who} needs the loss of changed logits, but the client has loss_fn=None, and its "
                "model computes the loss itself: pass loss_fn="
            )
        counts = torch.where(ctx.label_counts > 0, ctx.label_counts, one_hot(ctx).sum(0))
        changed = self.changed(wide(ctx.output), counts)
        return base + ctx.loss_fn(changed, ctx.targets) - ctx.loss_fn(ctx.output, ctx.targets)

    def changed(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return z̃ from z, ``(batch, classes)``, and the examples of each class, ``(classes,)``."""
        raise NotImplementedError


@dataclass(frozen=True)
class LogitCalibration(_ChangedLogits):
    """FedLC's margin ``τ n_c^{−1/4}`` of each logit.

    Needs integer labels and a model whose output is class logits ``(batch, classes)``.

    Parameters
    ----------
    tau : float
        Strength τ ≥ 0; 0 is FedAvg, with the classes that a client lacks.
    absent : float, optional
        n_c > 0 of a class that the client lacks. Default: such a class leaves the softmax.
    """

    name: ClassVar[str] = "logit-calibration"
    who: ClassVar[str] = "FedLC"
    excludes: ClassVar[tuple[str, ...]] = ("restricted-softmax",)
    ranges: ClassVar[Ranges] = {"tau": NOT_NEGATIVE, "absent": POSITIVE}
    tau: float
    absent: float | None = None

    def changed(self, logits: Tensor, counts: Tensor) -> Tensor:
        lacking = counts == 0
        n = torch.where(lacking, self.absent or 1.0, counts.to(logits.dtype))
        shifted = logits - self.tau * n**-0.25
        if self.absent is not None or self.tau == 0:
            return shifted
        largest = shifted.detach().masked_fill(lacking, -torch.inf).amax(-1, keepdim=True)
        return torch.where(lacking, largest - FAR, shifted)


@dataclass(frozen=True)
class RestrictedSoftmax(_ChangedLogits):
    """FedRS's factor α on the logits of classes that the client lacks.

    Needs integer labels and a model whose output is class logits ``(batch, classes)``.

    Parameters
    ----------
    alpha : float
        α in [0, 1]; 1 is FedAvg.
    """

    name: ClassVar[str] = "restricted-softmax"
    who: ClassVar[str] = "FedRS"
    excludes: ClassVar[tuple[str, ...]] = ("logit-calibration",)
    ranges: ClassVar[Ranges] = {"alpha": SHARE}
    alpha: float = 0.5

    def changed(self, logits: Tensor, counts: Tensor) -> Tensor:
        return torch.where(counts == 0, self.alpha * logits, logits)


class FedLC(MethodStrategy):
    """FedAvg with logits that are calibrated by the client's label counts.

    Parameters
    ----------
    tau, absent : float
        See :class:`LogitCalibration`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, tau: float, absent: float | None = None, **kwargs: Any) -> None:
        super().__init__([LogitCalibration(tau, absent)], **kwargs)


class FedLCClient(MethodClient):
    """The client of :class:`FedLC`."""

    terms = (LogitCalibration,)


class FedRS(MethodStrategy):
    """FedAvg with a softmax that is restricted to the client's own classes.

    Parameters
    ----------
    alpha : float
        See :class:`RestrictedSoftmax`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, alpha: float = 0.5, **kwargs: Any) -> None:
        super().__init__([RestrictedSoftmax(alpha)], **kwargs)


class FedRSClient(MethodClient):
    """The client of :class:`FedRS`."""

    terms = (RestrictedSoftmax,)
