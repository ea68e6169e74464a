"""Loads a round's arrays into a client's model: shared ones, private ones, and frozen ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from flwr_regs.chain import Chain
from flwr_regs.client.frozen_parameters import frozen_part, held_still
from flwr_regs.client.train.trainable import Every, every_parameter, first_names
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError, check_arrays, unpack


def load(
    model: nn.Module,
    term: Chain,
    arrays: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    every: Every | None = None,
) -> tuple[list[str], bool]:
    """Load the global model by name, and this client's private entries.

    Returns the private names, and whether frozen parameters came that differ from this client's own: they
    will not come again.
    Raises ProtocolError naming an array that does not fit, and OutOfSync if the frozen parameters are not
    the server's.
    """
    every = every_parameter(model) if every is None else every
    entries = model.state_dict()
    chosen = term.private(list(entries))
    private = [n for n in entries if n in chosen]
    own = held_still(model, term, chosen, every)
    frozen = frozen_part(own, arrays, config)
    shared = {n: v for n, v in entries.items() if n not in chosen and (n in arrays or n not in own)}
    tensors = {n: torch.from_numpy(np.asarray(a)) for n, a in arrays.items()}
    for n in own.keys() & tensors.keys():  # no update is lost in a frozen array's own precision
        if tensors[n].is_floating_point() and entries[n].is_floating_point():
            tensors[n] = tensors[n].to(entries[n].dtype)
    moving = {n: v for n, v in shared.items() if n not in own}
    given = _as_held(tensors, moving, config.get(keys.HALF_KEY))
    check_arrays(given, shared, "the global model")
    for name, first in tied_names(model, private, every).items():
        if name in given and not torch.equal(given[name], given[first]):
            raise ProtocolError(
                f"the global model: '{name}' and '{first}' are one parameter here, but differ"
            )
    mine = {n: entries[n] for n in private}
    if keys.PRIVATE_KEY in config:
        kept = unpack(config[keys.PRIVATE_KEY])
        mine = _as_held({n: torch.from_numpy(a) for n, a in kept.items()}, mine, "bfloat16")
        check_arrays(mine, {n: entries[n] for n in private}, "this client's private entries")
    exact = keys.HALF_KEY not in config
    anew = any(exact and n in arrays and not np.array_equal(a, arrays[n]) for n, a in own.items())
    held = {n: torch.from_numpy(a) for n, a in frozen.items()}
    model.load_state_dict({**entries, **held, **given, **mine})
    return private, anew


def tied_names(
    model: nn.Module, private: Collection[str], every: Every | None = None
) -> dict[str, str]:
    """Return the tied parameters of a model that are shared, other name -> first name.

    Raises ValueError if one name of a parameter is private and another is not.
    """
    every = every_parameter(model) if every is None else every
    first = first_names(every)
    pairs = {n: first[id(p)] for n, p in every}
    if split := [(n, f) for n, f in pairs.items() if (n in private) != (f in private)]:
        raise ValueError(
            f"the tied weights {split[0]} are one parameter, but only one of the two names is "
            "private; name both, or neither"
        )
    return {n: f for n, f in pairs.items() if n != f and n not in private}


def _as_held(
    arrays: dict[str, torch.Tensor], held: Mapping[str, torch.Tensor], half: str | None
) -> dict[str, torch.Tensor]:
    """Return float32 arrays in the model's half precision if they travelled in it; others unchanged.

    No value changes. Raises ProtocolError for a bfloat16 model if the arrays did not travel in bfloat16.
    """
    if half != "bfloat16" and (found := [n for n, v in held.items() if v.dtype == torch.bfloat16]):
        raise ProtocolError(
            f"this client's model holds bfloat16 in {found}, which travels only if the strategy has "
            f"wire_dtype='bfloat16', not {half!r} (and then initial_arrays in float32)"
        )
    own = getattr(torch, half) if half else None
    return {
        n: a.to(own) if a.dtype == torch.float32 and n in held and held[n].dtype == own else a
        for n, a in arrays.items()
    }
