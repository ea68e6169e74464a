"""SGD's step on slices of its parameters, while they are in the cache. Plain torch.

It is torch's own function, called on views. SGD moves each entry by itself, so no bit changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import optimizer as of_torch
from torch.optim.sgd import sgd

Parts = Callable[[str, Tensor], Sequence[Tensor]]

SETTINGS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
EXACT = (torch.float32, torch.float64)
"""In half precision, torch rounds the last entries of an array otherwise than those that it computes by
vectors: there a slice could differ."""
OTHERS = ("foreach", "fused", "differentiable")
"""Settings of other kernels, or for a step that is differentiated; they leave the step to the optimiser."""


class SlicedSGD:
    """One step of a client's SGD, taken slice by slice.

    Parameters
    ----------
    optimizer : torch.optim.SGD
        It keeps the state. Its own step then passes over parameters without gradients.
    params : dict[str, nn.Parameter]
        What is moved.
    parts : callable
        ``parts(name, array)``, the slices of an array of a parameter's shape: views.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter], parts: Parts
    ) -> None:
        groups = _groups(optimizer)
        self._settings: dict[str, dict[str, Any]] = {}
        self._buffers: dict[str, Sequence[Tensor]] = {}
        for name, p in params.items():
            group = groups[id(p)]
            self._settings[name] = {key: group[key] for key in SETTINGS}
            if group["momentum"]:
                self._buffers[name] = parts(name, optimizer.state[p]["momentum_buffer"])

    @classmethod
    def of(
        cls,
        optimizer: torch.optim.Optimizer | None,
        params: Mapping[str, nn.Parameter],
        parts: Parts,
    ) -> Self | None:
        """Return the step of `optimizer`; None if it has to be left to the optimiser itself.

        It is so for any class but torch's, for hooks after the step, which may read the gradients, for a
        step that is wrapped, for settings that choose another kernel, in the first step with momentum,
        which makes the state, and for parameters that it does not hold, that share their memory, or of
        half precision.
        """
        if (
            type(optimizer) is not torch.optim.SGD
            or "step" in vars(optimizer)
            or _hooked(optimizer)
        ):
            return None
        groups = _groups(optimizer)
        for p in params.values():
            group = groups.get(id(p))
            if group is None or p.dtype not in EXACT or any(group[key] for key in OTHERS):
                return None
            if any(isinstance(group[key], Tensor) for key in SETTINGS):
                return None
            if group["momentum"]:
                buffer = optimizer.state.get(p, {}).get("momentum_buffer")
                if buffer is None or buffer.stride() != p.stride():
                    return None
        if len({p.untyped_storage().data_ptr() for p in params.values()}) < len(params):
            return None
        return cls(optimizer, params, parts)

    def __call__(self, name: str, number: int, values: Tensor, grad: Tensor) -> None:
        """Move the slice `number` of a parameter, its `values`, given its gradient."""
        buffer = self._buffers[name][number] if name in self._buffers else None
        sgd(
            [values],
            [grad],
            [buffer],
            has_sparse_grad=False,
            foreach=False,
            fused=False,
            **self._settings[name],
        )


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


def _hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something runs after each step; True where a later torch keeps its hooks elsewhere."""
    own = getattr(optimizer, "_optimizer_step_post_hooks", True)
    return bool(own or getattr(of_torch, "_global_optimizer_post_hooks", True))
