"""What two clients must share to train in one stack: model, loss, optimiser. Plain torch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from torch import Tensor, nn

TORCHS = {*vars(nn.Module()), "_compiled_call_impl", "_flat_weights", "_flat_weight_refs"}
"""Attributes of torch's own, of recurrent layers too: what they say is in the rest of a build."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (type(None), int, float, str, bytes)


def build_of(model: nn.Module) -> Hashable:
    """Return what of a model is no value of its tensors: two of equal build compute the same function.

    Attributes that cannot be compared count as equal only if they are the same object.
    """
    build: list[Hashable] = []
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = vars(module)
        params, buffers = attributes["_parameters"].items(), attributes["_buffers"].items()
        build += [
            (None, name, type(module)),
            *((n, *_form(p), p.requires_grad) for n, p in params if p is not None),
            *((n, *_form(b)) for n, b in buffers if b is not None),
            *((n, alike(a)) for n, a in attributes.items() if n not in TORCHS),
            *(tuple(attributes[hooks].values()) for hooks in _HOOKS if attributes[hooks]),
        ]
    return tuple(build)


def alike(value: Any) -> Hashable:
    """Return a key that is equal for values that do the same, also functions of one code and closure."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, nn.Module):
        if any(True for _ in value.parameters()):
            return id(value)
        held = ((b.dtype, tuple(b.shape), *b.flatten().tolist()) for b in value.buffers())
        return build_of(value), *held  # such as the weights of classes
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        defaults = (value.__defaults__, value.__kwdefaults__)
        return value.__code__, *map(alike, (*cells, *defaults))
    if isinstance(value, partial):
        return alike(value.func), alike(value.args), alike(value.keywords)
    if isinstance(value, tuple | list):
        return type(value), *map(alike, value)
    if isinstance(value, Mapping):
        return type(value), *((k, alike(v)) for k, v in value.items())
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value  # type: ignore[no-any-return]


def _form(tensor: Tensor) -> tuple[Hashable, ...]:
    return tuple(tensor.shape), tensor.dtype
