"""Self-confidence distillation from the round's global model.

Source: Ozfatura, Ozfatura, Gündüz, "FedADC" (2021), Sec. III, Eqs. 7-9.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from flwr_regs.term import ClientContext


def self_confidence_loss(base: Any, ctx: ClientContext, lam: float, temperature: float) -> Any:
    """Return ``(1−λ) base + λ T² KL(p̂ ‖ p)`` on the batch of `ctx` (Eq. 7).

    ``p = softmax(logits/T)``, teacher ``p̃ = softmax(w_t's logits/T)``; ``p̂_i = (1 − ρ_i) p̃_i`` for i ≠ y
    (Eq. 8) and ``p̂_y = 1 − Σ_{i≠y} p̂_i`` (Eq. 9), ``ρ_i = γ_i / max γ`` from the client's class shares γ.

    Raises ValueError unless the output is class logits ``(batch, classes)``, the labels are ``(batch,)``
    and every label has a logit.
    """
    if ctx.output.ndim != 2 or ctx.output.shape[-1] < 2 or ctx.targets.ndim != 1:
        raise ValueError(
            "self-distillation needs logits (batch, classes) and labels (batch,), not "
            f"{tuple(ctx.output.shape)} and {tuple(ctx.targets.shape)}"
        )
    if ctx.label_counts.shape[-1] > ctx.output.shape[-1]:
        raise ValueError(
            f"the data has labels up to {ctx.label_counts.shape[-1] - 1}, the model "
            f"{ctx.output.shape[-1]} outputs"
        )
    wide = torch.promote_types(ctx.output.dtype, torch.float32)  # half loses small values
    log_p = F.log_softmax(ctx.output.to(wide) / temperature, dim=-1)
    teacher = F.softmax(ctx.start_output.to(wide) / temperature, dim=-1)
    counts = ctx.label_counts.to(torch.float64)
    counts = F.pad(counts, (0, log_p.shape[-1] - counts.shape[-1]))
    confidence = (counts / counts.max()).to(log_p.dtype)  # ρ; 0 for a class that is absent
    # F.one_hot checks the values, which vmap does not allow
    true = ctx.targets.unsqueeze(-1) == torch.arange(log_p.shape[-1], device=log_p.device)
    others = torch.where(true, 0.0, (1 - confidence) * teacher)  # Eq. 8
    own = (1 - others.sum(-1, keepdim=True)).clamp(min=0)  # Eq. 9; rounding may fall below 0
    target = torch.where(true, own, others)
    divergence = F.kl_div(log_p, target, reduction="batchmean")
    return (1 - lam) * base + lam * temperature**2 * divergence
