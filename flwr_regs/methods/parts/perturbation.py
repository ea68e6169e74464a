"""The perturbation of sharpness-aware steps."""

from __future__ import annotations

from flwr_regs.methods.parts.uploads import wide
from flwr_regs.term import Arrays


def of_length(direction: Arrays, rho: float) -> Arrays:
    """Return ``ρ d / ‖d‖``, all arrays as one vector, in at least float32; 0 where d = 0."""
    direction = {n: wide(d) for n, d in direction.items()}
    norm = sum((d * d).sum() for d in direction.values()) ** 0.5
    scale = (norm > 0) * (rho / (norm + (norm == 0)))
    return {n: scale * d for n, d in direction.items()}


def moved(params: Arrays, shift: Arrays) -> Arrays:
    """Return the parameters moved by a shift, in their own dtypes."""
    return {n: p + shift[n].to(p.dtype) for n, p in params.items()}
