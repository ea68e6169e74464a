"""Loads a round's arrays into a client's model: shared ones and private ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from flwr_regs.chain import Chain
from flwr_regs.client.memory.state import to_numpy
from flwr_regs.client.train.trainable import (
    Every,
    every_parameter,
    first_names,
    trained_parameters,
)
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import OTHER_FROZEN, ProtocolError, check_arrays, digest, unpack


def load(
    model: nn.Module,
    term: Chain,
    arrays: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    every: Every | None = None,
) -> tuple[list[str], str]:
    """Load the global model by name, and this client's private entries.

    Parameters that this client does not train may be missing from the `arrays`: it holds them itself.
    Returns the private names, and the digest of what it so holds ("" if nothing).
    Raises ProtocolError naming an array that does not fit, and for another digest than the other clients'.
    """
    every = every_parameter(model) if every is None else every
    entries = model.state_dict()
    chosen = term.private(list(entries))
    private = [n for n in entries if n in chosen]
    frozen = frozen_rest(model, term, [*arrays, *private], every)
    frozen_digest = digest({n: to_numpy(entries[n]) for n in frozen}) if frozen else ""
    shared = {n: v for n, v in entries.items() if n not in chosen and n not in frozen}
    tensors = {n: torch.from_numpy(np.asarray(a)) for n, a in arrays.items()}
    given = _as_held(tensors, shared, config.get(keys.HALF_KEY))
    check_arrays(given, shared, "the global model")
    if config.get(keys.FROZEN_DIGEST_KEY, frozen_digest) != frozen_digest:
        raise ProtocolError(OTHER_FROZEN)
    for name, first in tied_names(model, private, every).items():
        if name in given and not torch.equal(given[name], given[first]):
            raise ProtocolError(
                f"the global model: '{name}' and '{first}' are one parameter here, but differ"
            )
    own_values = {n: entries[n] for n in private}
    if keys.PRIVATE_KEY in config:
        kept = unpack(config[keys.PRIVATE_KEY])
        tensors = {n: torch.from_numpy(a) for n, a in kept.items()}
        own_values = _as_held(tensors, own_values, "bfloat16")
        check_arrays(own_values, {n: entries[n] for n in private}, "this client's private entries")
    model.load_state_dict({**entries, **given, **own_values})
    return private, frozen_digest


def frozen_rest(model: nn.Module, term: Chain, known: Collection[str], every: Every) -> list[str]:
    """Return the parameters that this client does not train, but those whose names are `known`."""
    known = set(known)
    others = [(n, p) for n, p in every if n not in known]
    if not others:
        return []
    trained = {id(p) for p in trained_parameters(model, term, every).values()}
    return [n for n, p in others if id(p) not in trained]


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
    if half != "bfloat16" and (names := [n for n, v in held.items() if v.dtype == torch.bfloat16]):
        raise ProtocolError(
            f"this client's model holds bfloat16 in {names}, which travels only if the strategy has "
            f"wire_dtype='bfloat16', not {half!r} (and then initial_arrays in float32); frozen parameters "
            "need not travel: flwr_regs.trainable(model)"
        )
    dtype = getattr(torch, half) if half else None
    return {
        n: a.to(dtype) if a.dtype == torch.float32 and n in held and held[n].dtype == dtype else a
        for n, a in arrays.items()
    }
