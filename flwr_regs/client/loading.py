"""Loads a round's arrays into a client's model: shared ones and private ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from flwr_regs.chain import Chain
from flwr_regs.client.memory import to_numpy
from flwr_regs.client.train.trainable import Every, every_parameter, first_names, trained_parameters
from flwr_regs.term import Arrays, Config, Slot
from flwr_regs.wire import arrays as wired
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, ProtocolError, check_arrays, digest

_LEFT: WeakKeyDictionary[nn.Module, tuple[Arrays, Arrays]] = WeakKeyDictionary()
"""Model -> its private entries as the first client found them, and as the last one left them."""

Pins = str | Sequence[str]
"""Shell patterns on ``state_dict`` names: one text with commas, or several."""


def pinned(pins: Pins, model: nn.Module) -> set[str]:
    """Return the names of the model's entries that `pins` match, and of those in the same memory.

    Raises ValueError for a pattern that matches nothing.
    """
    if not pins:
        return set()
    entries = model.state_dict()
    chosen = wired.matching(wired.split_patterns(pins, "private"), list(entries))
    places = {entries[n].data_ptr() for n in chosen if entries[n].numel()}
    return chosen | {n for n, v in entries.items() if v.numel() and v.data_ptr() in places}


def check_custody(pins: Pins, model: nn.Module, term: Chain) -> None:
    """Raise ProtocolError if the strategy's method does not withhold every pinned entry."""
    entries = pinned(pins, model)
    if asked := entries and sorted(entries - term.private(list(model.state_dict()))):
        raise ProtocolError(
            f"this client keeps {asked} to itself (private={pins!r}), but the strategy's method would "
            f"send and overwrite them: put Private({','.join(asked)!r}) among its terms, too"
        )


@dataclass(frozen=True)
class Layout:
    """What a method makes of a model's entries.

    Attributes
    ----------
    private, trained : list of str, dict of str to Parameter
        The entries that stay with the client; the parameters that it trains, by their first names.
    tied : dict of str to str
        The other names of trained parameters -> the first.
    frozen_digest : str
        Of the parameters that do not travel, as this client does not train them; "" if there are none.
    """

    private: list[str]
    trained: dict[str, nn.Parameter]
    tied: dict[str, str]
    frozen_digest: str


def load(
    model: nn.Module, term: Chain, arrays: NDArrays, config: Config, own: Slot | None = None
) -> Layout:
    """Load the global model by name, and this client's `own` private entries (None: see `found`).

    Parameters that this client does not train may be missing from the `arrays`: it holds them itself.
    Raises ProtocolError naming an array that does not fit, and for another digest than the other clients';
    ValueError if a term withholds what the model does not have, or its ``state_dict`` lacks what it trains.
    """
    every, entries = every_parameter(model), model.state_dict()
    chosen = term.private(list(entries))
    if unknown := sorted(chosen - entries.keys()):
        who = ", ".join(t.name for t in term.overriding("private"))
        raise ValueError(f"private, of {who}: the model has no {unknown}, only {sorted(entries)}")
    private = [n for n in entries if n in chosen]
    trained = trained_parameters(model, term, every)
    if lost := [n for n in trained if n not in entries]:
        raise ValueError(
            f"the model's state_dict() lacks {lost}, which are trained: it must hold each trained "
            "parameter, under its name in named_parameters()"
        )
    ids = {id(p) for p in trained.values()}
    held = {n: p for n, p in every if n not in arrays and n not in chosen and id(p) not in ids}
    frozen_digest = digest({n: to_numpy(p) for n, p in held.items()}) if held else ""
    shared = {n: v for n, v in entries.items() if n not in chosen and n not in held}
    # copies: arrays that came are read-only
    tensors = {n: torch.tensor(a, device="cpu") for n, a in arrays.items()}
    given = _as_held(tensors, shared, config.get(keys.HALF_KEY))
    try:
        check_arrays(given, shared, "the global model")
    except ProtocolError as error:
        raise ProtocolError(f"{error}, as in this client's model, which must be the same") from None
    if config.get(keys.FROZEN_DIGEST_KEY, frozen_digest) != frozen_digest:
        raise ProtocolError(wired.OTHER_FROZEN)
    tied = tied_names(every, private)
    for name, first in tied.items():
        if name in given and not torch.equal(given[name], given[first]):
            raise ProtocolError(
                f"the global model: '{name}' and '{first}' are one parameter here, but differ"
            )
    values = {n: entries[n] for n in private}
    as_found = kept = found(model, values)
    if own is not None:
        kept = as_kept(own, values)
    model.load_state_dict({**entries, **given, **kept})
    if private:
        _LEFT[model] = as_found, kept
    else:
        note_left(model)
    tied = {n: first for n, first in tied.items() if first in trained}
    return Layout(private, trained, tied, frozen_digest)


def found(model: nn.Module, private: Arrays) -> Arrays:
    """Return the private entries with which a client begins that has none of its own yet: the model's.

    Clients of one process may share the model. What others have left in it since is taken back, unless
    the user has loaded something else.
    """
    first, left = _LEFT.get(model, ({}, {}))
    if left.keys() == private.keys() and all(_equal(left[n], v) for n, v in private.items()):
        return first
    return {n: v.detach().clone() for n, v in private.items()}


def as_kept(own: Slot, values: Arrays) -> Arrays:
    """Return a client's private entries in the dtypes of a model's; ProtocolError if they do not fit."""
    kept = _as_held(own, values, "bfloat16")
    check_arrays(kept, values, "this client's private entries")
    return kept


def note_left(model: nn.Module) -> None:
    """Note how a client has left its model: see `found`."""
    if model in _LEFT:
        first, entries = _LEFT[model][0], model.state_dict()
        _LEFT[model] = first, {n: v.detach().clone() for n, v in entries.items() if n in first}


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = (a.shape, a.dtype) == (b.shape, b.dtype)
    return same and torch.allclose(a.to(b.device), b, 0, 0, equal_nan=True)


def tied_names(every: Every, private: Collection[str]) -> dict[str, str]:
    """Return a model's tied parameters that are shared, other name -> first name.

    Raises ValueError if one name of a parameter is private and another is not.
    """
    first = first_names(every)
    pairs = {n: first[id(p)] for n, p in every}
    if split := [(n, f) for n, f in pairs.items() if (n in private) != (f in private)]:
        raise ValueError(
            f"tied weights {split[0]} are one parameter: make both private, or neither"
        )
    return {n: f for n, f in pairs.items() if n != f and n not in private}


def _as_held(arrays: Arrays, held: Arrays, half: str | None) -> Arrays:
    """Return float32 arrays in the model's half precision if they travelled in it; others unchanged.

    No value changes. Raises ProtocolError for a bfloat16 model if the arrays did not travel in bfloat16.
    """
    if half != "bfloat16" and (names := [n for n, v in held.items() if v.dtype == torch.bfloat16]):
        raise ProtocolError(
            f"this client's model holds bfloat16 in {names}: it needs wire_dtype='bfloat16', not {half!r}, "
            "and initial_arrays in float32; frozen parameters need not travel: flwr_regs.trainable(model)"
        )
    dtype = getattr(torch, half) if half else None
    return {
        n: a.to(dtype) if a.dtype == torch.float32 and n in held and held[n].dtype == dtype else a
        for n, a in arrays.items()
    }
