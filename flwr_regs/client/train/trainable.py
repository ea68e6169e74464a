"""Which of a model's entries a method trains, holds still, or withholds. Plain torch."""

from __future__ import annotations

from torch import Tensor, nn

from flwr_regs.abilities import Freezes, Withholds
from flwr_regs.chain import Chain

Every = list[tuple[str, nn.Parameter]]
"""A model's parameters under all their names, in order: each walk over a model costs."""
Parameters = dict[str, nn.Parameter]


def every_parameter(model: nn.Module) -> Every:
    """Return a model's parameters, tied ones under each of their names."""
    return list(model.named_parameters(remove_duplicate=False))


def first_names(every: Every) -> dict[int, str]:
    """Return the first name of each parameter, by its id."""
    return {id(p): name for name, p in reversed(every)}


def trained_parameters(model: nn.Module, term: Chain, every: Every | None = None) -> Parameters:
    """Return the parameters that a method trains, by their first names; private ones too."""
    every = every_parameter(model) if every is None else every
    first = first_names(every)
    named = {name: p for name, p in every if p.requires_grad and first[id(p)] == name}
    if not term.able(Freezes):
        return named
    frozen = term.frozen(list(model.state_dict()))
    held = {id(p) for name, p in every if name in frozen}
    return {name: p for name, p in named.items() if id(p) not in held}


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """Return what a model's clients train, for ``initial_arrays=ArrayRecord(trainable(model))``.

    That is its ``state_dict`` without the parameters that have ``requires_grad=False``: trained parameters,
    and buffers, which are averaged. The clients hold the rest, such as a pretrained backbone, and only a
    digest of it travels.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"trainable takes a model, a torch.nn.Module, not {type(model).__name__}")
    frozen = {name for name, p in every_parameter(model) if not p.requires_grad}
    return {name: v for name, v in model.state_dict().items() if name not in frozen}


def private_entries(model: nn.Module, term: Chain) -> set[str]:
    """Return the names of the model's entries that a method withholds."""
    return term.private(list(model.state_dict())) if term.able(Withholds) else set()
