"""A client's slots between rounds: a transaction for every term.

What `finish` returns is pending until a message says that the server used the round's reply; then it is
settled. Else the slot goes back to the one before the round, or to what the term's `unused` returns. A
term that keeps ``"always"`` skips this. All of it stays on the node.

A server that was resumed from a checkpoint, or that tries a round again, sends a message of a round that
this client has already trained. The pending slot is then dropped: the client begins that round with what it
began it with the first time. The node does the same with what is kept ``"always"`` (`flower/node.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from flwr_regs.abilities import TakesBack
from flwr_regs.chain import Chain
from flwr_regs.term import Arrays, Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, in_code_order, pack, unpack

NO_ROUND = -1
CODE = "|code"  # no parameter's name
SETTLED, PENDING, ALWAYS = "client", "pending.client", "always.client"
"""Kinds of slots, as the node keeps them: of terms that keep ``"if-used"`` (two), and ``"always"``."""


@dataclass(frozen=True)
class ClientState:
    """The slots of a client, by term name.

    Attributes
    ----------
    settled : Slot
        From rounds whose replies were used, and of terms that keep ``"always"``.
    pending : Slot
        From `round`, the last one, or from its `probe`.
    sent : dict
        The update that `round` sent, for terms that take it back: arrays, or its code.
    reaches : int
        The last round that the settled slots of ``"if-used"`` terms depend on.
    """

    settled: Slot = field(default_factory=dict)
    pending: Slot = field(default_factory=dict)
    round: int = NO_ROUND
    probe: bool = False
    sent: dict[str, Any] = field(default_factory=dict)
    reaches: int = NO_ROUND

    @classmethod
    def read(cls, term: Chain, config: Mapping[str, Any]) -> ClientState:
        """Return the state that the node put into a round's config."""
        settled = slots(term, config, SETTLED) | slots(term, config, ALWAYS)
        if keys.PENDING_KEY not in config:
            return cls(settled)
        note = _arrays(config[keys.PENDING_KEY])
        sent = {k.removeprefix("sent."): a for k, a in note.items() if k.startswith("sent.")}
        number, reaches = int(note["round"]), int(note["reaches"])
        pending = slots(term, config, PENDING)
        return cls(settled, pending, number, bool(note["probe"]), sent, reaches)

    def latest(self, term: Chain) -> Slot:
        """Return the slots as the last round left them, for evaluation: it does not wait for the server."""
        if self.round == NO_ROUND or self.probe:
            return self.settled
        waiting = {t.name for t in term.terms if t.keeps == "if-used"}
        always = {n: slot for n, slot in self.settled.items() if n not in waiting}
        return always | self.pending

    def entering(
        self, term: Chain, config: Mapping[str, Any], like: Mapping[str, np.ndarray]
    ) -> tuple[ClientState, bool]:
        """Return (the state with which the round of `config` begins, whether slots were lost).

        `like` are arrays with the names, shapes and dtypes of an update. The slots are settled by the
        server's word, the last round whose reply it used. What `probe` kept in this round is still pending.

        Slots are lost if they belong to another course of the training than the server's: they depend on a
        round that the server now repeats, or lack one whose reply it used.
        """
        number, used = config[keys.ROUND_KEY], config.get(keys.USED_KEY)
        waiting = {t.name: t for t in term.terms if t.keeps == "if-used"}
        always = {n: slot for n, slot in self.settled.items() if n not in waiting}
        ahead = self.reaches >= number
        behind = used is not None and used > max(self.round, self.reaches)
        if self.round != NO_ROUND and (ahead or behind):
            return ClientState(always, round=number), True
        probed = self.probe and self.round == number
        if self.round == NO_ROUND or self.probe or self.round >= number:
            pending = self.pending if probed else {}
            return replace(self, pending=pending, round=number, probe=probed, sent={}), False
        after, reaches = {n: self.pending.get(n, {}) for n in waiting}, self.reaches
        if self.round == used:
            reaches = self.round
        else:
            for name, t in waiting.items():
                before = self.settled.get(name, {})
                if isinstance(t, TakesBack) and after[name]:
                    after[name] = t.unused(before, after[name], self._update(term, like))
                    reaches = self.round
                else:
                    after[name] = before
        settled = always | {n: slot for n, slot in after.items() if slot}
        return ClientState(settled, round=number, reaches=reaches), False

    def _update(self, term: Chain, like: Mapping[str, np.ndarray]) -> Arrays:
        """Return the update that was sent."""
        update: Mapping[str, Any] = self.sent
        if (coder := term.coder("finish")) is not None and CODE in update:
            update = coder.decode(update[CODE].tobytes(), in_code_order(like, like))
        return {n: torch.from_numpy(np.array(a)) for n, a in update.items()}


def to_numpy(value: Any) -> np.ndarray:
    """Return a tensor as an array; bfloat16, which numpy lacks, becomes float32 without loss."""
    if isinstance(value, np.ndarray):
        return value
    tensor = (value if isinstance(value, torch.Tensor) else torch.as_tensor(value)).detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _pack(slot: Mapping[str, Any]) -> bytes:
    return pack({k: to_numpy(a) for k, a in slot.items()})


def entries(
    term: Chain,
    before: ClientState,
    after: Slot,
    *,
    sent: Mapping[str, np.ndarray] | None = None,
    code: bytes | None = None,
    form: Callable[[Mapping[str, Any]], Any] = _pack,
) -> dict[str, Any]:
    """Return what the node keeps of a round, as entries of the reply: slots before and after it, packed.

    Or in another `form`, for a node in the same process.

    `before` is the state that the round began with. `sent` is the update that travels, in numpy, `code` its
    code; without `sent`, the round was a probe.
    """
    waiting = {t.name: t for t in term.terms if t.keeps == "if-used"}
    always = {n: s for n, s in after.items() if n not in waiting and s}
    mine = {n: s for n, s in after.items() if n in waiting and s}
    if sent is None:  # an empty slot of a probe leaves the kept one
        always = {n: s for n, s in before.settled.items() if n not in waiting} | always
    settled = {n: s for n, s in before.settled.items() if n in waiting and s}
    kinds = ((settled, SETTLED), (always, ALWAYS), (mine, PENDING))
    out: dict[str, Any] = {
        k: v for slots, kind in kinds for k, v in packed(slots, kind, form).items()
    }
    if sent is not None and (settled or always or mine):
        out[keys.KEEPS_KEY] = True
    if not settled and not mine:
        return out
    note = _note(before, sent is None)
    if sent is not None and any(isinstance(t, TakesBack) and t.name in mine for t in term.terms):
        kept = dict(sent) if code is None else {CODE: np.frombuffer(code, np.uint8)}
        note |= {f"sent.{n}": a for n, a in kept.items()}
    out[keys.PENDING_KEY] = form(note)
    return out


def untrained(term: Chain, before: ClientState) -> dict[str, Any]:
    """Return what the node keeps of a round without a step: the state that the round began with."""
    waiting = {t.name for t in term.terms if t.keeps == "if-used"}
    settled = {n: s for n, s in before.settled.items() if n in waiting and s}
    always = {n: s for n, s in before.settled.items() if n not in waiting}
    out: dict[str, Any] = packed(settled, SETTLED) | packed(always, ALWAYS)
    if settled:  # as after a probe, nothing is pending
        out[keys.PENDING_KEY] = pack(_note(before, True))
    return out


def _note(before: ClientState, probe: bool) -> dict[str, Any]:
    """Return the entry that says of which round the slots are."""
    numbers = {"round": before.round, "probe": probe, "reaches": before.reaches}
    return {n: np.asarray(v) for n, v in numbers.items()}


def slots(term: Chain, config: Mapping[str, Any], slot: str) -> Slot:
    """Return the terms' slots of one kind from a config, as tensors by term name."""
    found = {t.name: config[key] for t in term.terms if (key := f"{t.name}.{slot}") in config}
    return {
        name: value
        if isinstance(value, Mapping)  # in one process, slots may come as they are
        else {k: torch.from_numpy(a) for k, a in unpack(value).items()}
        for name, value in found.items()
    }


def packed(
    slots: Slot, slot: str, form: Callable[[Mapping[str, Any]], Any] = _pack
) -> dict[str, Any]:
    """Return the terms' slots as they travel: ``"<term>.<slot>" -> bytes``, without empty ones."""
    return {f"{name}.{slot}": form(arrays) for name, arrays in slots.items() if arrays}


def _arrays(value: Any) -> NDArrays:
    """Return packed arrays; in one process they may come as they are."""
    return value if isinstance(value, dict) else unpack(value)
