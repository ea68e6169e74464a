"""Which entries of the model a client keeps to itself, whatever the server says."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from flwr_regs.chain import Chain
from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.patterns import matching, split

Pins = str | Sequence[str]
"""Shell patterns on ``state_dict`` names: one text with commas, or several."""


def pinned(pins: Pins, model: nn.Module) -> set[str]:
    """Return the names of the model's entries that `pins` match, and of those in the same memory.

    Raises ValueError for a pattern that matches nothing.
    """
    if not pins:
        return set()
    entries = model.state_dict()
    found = matching(split(pins, "private"), list(entries))
    places = {entries[n].data_ptr() for n in found if entries[n].numel()}
    return found | {n for n, v in entries.items() if v.numel() and v.data_ptr() in places}


def check_custody(pins: Pins, model: nn.Module, term: Chain) -> None:
    """Raise ProtocolError if the strategy's method does not withhold every pinned entry."""
    entries = pinned(pins, model)
    if not entries:
        return
    if asked := sorted(entries - term.private(list(model.state_dict()))):
        raise ProtocolError(
            f"this client keeps {asked} to itself (private={pins!r}), but the strategy's method would "
            f"send and overwrite them: withhold them on the server too, such as with "
            f"Private({','.join(asked)!r}) among its terms"
        )
