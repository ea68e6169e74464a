"""Self-confidence distillation from the round's global model.

Source: Ozfatura, Ozfatura, Gündüz, "FedADC" (2021), Sec. III, Eqs. 7-9.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_regs.term import ClientContext


def self_confidence_loss(base: Any, ctx: ClientContext, lam: float, temperature: float) -> Any:
    """Return ``(1−λ) base + λ T² KL(p̂ ‖ p)`` on the batch of `ctx` (Eq. 7).

    ``p = softmax(logits/T)``, teacher ``p̃ = softmax(w_t's logits/T)``; ``p̂_i = (1 − ρ_i) p̃_i`` for i ≠ y
    (Eq. 8) and ``p̂_y = 1 − Σ_{i≠y} p̂_i`` (Eq. 9), ``ρ_i = γ_i / max γ`` from the client's class shares γ.

    Raises ValueError as `check_classes` does.
    """
    check_classes(ctx, "self-distillation")
    wide = torch.promote_types(ctx.output.dtype, torch.float32)  # half loses small values
    log_p = F.log_softmax(ctx.output.to(wide) / temperature, dim=-1)
    teacher = F.softmax(ctx.start_output.to(wide) / temperature, dim=-1)
    counts = ctx.label_counts.to(torch.float64)
    confidence = (counts / counts.max()).to(log_p.dtype)  # ρ; 0 for a class that is absent
    true = one_hot(ctx)
    others = torch.where(true, 0.0, (1 - confidence) * teacher)  # Eq. 8
    true_share = (1 - others.sum(-1, keepdim=True)).clamp(min=0)  # Eq. 9; rounding may fall below 0
    target = torch.where(true, true_share, others)
    # as F.kl_div to the bit, which vmap runs client by client
    divergence = (torch.xlogy(target, target) - target * log_p).sum() / len(log_p)
    return (1 - lam) * base + lam * temperature**2 * divergence


def check_classes(ctx: ClientContext, who: str) -> None:
    """Raise ValueError unless the batch is a classification's.

    The output is class logits ``(batch, classes)``, the labels are integers ``(batch,)``, and, if they are
    counted, every label has a logit. `who` begins the sentence.
    """
    shapes = [getattr(a, "shape", None) for a in (ctx.output, ctx.targets)]
    fits = [shape is not None and len(shape) == n for shape, n in zip(shapes, (2, 1), strict=True)]
    if not all(fits) or ctx.output.shape[-1] < 2 or ctx.targets.is_floating_point():
        given = " and ".join(
            type(a).__name__ if shape is None else f"{a.dtype} {tuple(shape)}"
            for a, shape in zip((ctx.output, ctx.targets), shapes, strict=True)
        )
        raise ValueError(
            f"{who} needs logits (batch, classes) and integer labels (batch,), not {given}"
        )
    classes = ctx.output.shape[-1]
    if ctx.label_counts is not None and (labels := ctx.label_counts.shape[-1]) > classes:
        raise ValueError(f"the data has labels up to {labels - 1}, the model {classes} outputs")


def one_hot(ctx: ClientContext) -> Tensor:
    """Return where the labels of the batch are, booleans ``(batch, classes)``."""
    # F.one_hot checks the values, which vmap does not allow
    classes = torch.arange(ctx.output.shape[-1], device=ctx.output.device)
    return ctx.targets.unsqueeze(-1) == classes  # type: ignore[no-any-return]


def divergence(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return ``T² KL(softmax(teacher/T) ‖ softmax(student/T))``, the mean over a batch of logits.

    No gradient flows to the teacher. Half precision, which loses small values, is widened.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    log_q = F.log_softmax(teacher.detach().to(wide) / temperature, dim=-1)
    log_p = F.log_softmax(student.to(wide) / temperature, dim=-1)
    return temperature**2 * (log_q.exp() * (log_q - log_p)).sum() / len(log_p)  # F.kl_div's bits
