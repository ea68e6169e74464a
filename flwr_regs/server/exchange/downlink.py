"""The downlink: the model with the terms' broadcasts, or the changes since a client's last model.

``"model"`` sends ``w_t`` and the broadcasts (the full pair) to everyone. ``"delta"`` sends
``w_t − w_{t−1}`` to a client that took part in round t − 1 and kept ``w_{t−1}``. The client rebuilds
``w_t`` to the bit, which a digest checks. It recovers broadcasts from the step where a term can; the
others are sent. A method with a code for its steps sends them coded, and a client that missed rounds
also gets their steps. Any other client gets the full pair, and so does a client for which the full pair
is smaller. A client that finds that it lost its model gets the full pair in the same round.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from flwr_regs.abilities import Recovers
from flwr_regs.server.global_model import GlobalModel
from flwr_regs.server.options import Options
from flwr_regs.term import ServerContext
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import digest
from flwr_regs.wire.delta import WHOLE
from flwr_regs.wire.parcel import Parcel, Record
from flwr_regs.wire.precision import narrow

Content = tuple[dict[str, Record], dict[str, Any]]
"""(records, entries of the config)"""


@dataclass(frozen=True)
class Downlink:
    """The records that one round sends down; each is made once for the whole cohort.

    Attributes
    ----------
    options : Options
    model : GlobalModel
        Holds ``w_t`` and the last steps.
    ctx : ServerContext
        Of the round.
    """

    options: Options
    model: GlobalModel
    ctx: ServerContext
    _since: dict[tuple[int, bool], Content] = field(default_factory=dict)

    def content(self, held_round: int | None, probe: bool = False) -> Content:
        """Return (records, config entries) for a client that last kept the model of `held_round`.

        A `probe` is the first exchange of a round with two: it sends no broadcasts. The second sends only
        the broadcasts to a client that got ``w_t`` in the first.
        """
        keeps = self.options.downlink == "delta"
        if held_round == self.ctx.round:
            kept = {keys.DOWNLINK_KEY: "kept", keys.DIGEST_KEY: self._digest}
            return {keys.ARRAYS: Record(), **self._broadcasts}, kept
        whole: Content = (
            {keys.ARRAYS: self._whole} | ({} if probe else self._broadcasts),
            {keys.DOWNLINK_KEY: WHOLE} if keeps or probe else {},
        )
        if not keeps or held_round is None or self.model.step is None:
            return whole
        if self.options.term.coder("release") is not None:
            return self._coded_since(held_round, probe, whole)
        if held_round != self.ctx.round - 1:
            return whole
        broadcasts = {} if probe else self._explicit
        return {keys.ARRAYS: self._step} | broadcasts, self._base("delta")

    @cached_property
    def _whole(self) -> Record:
        return Record(narrow(self.model.model, self.options.wire_dtype))

    @cached_property
    def _broadcasts(self) -> dict[str, Record]:
        slots = self.options.term.broadcast(self.model.server, self.ctx)
        return {f"{name}.broadcast": Record(slot) for name, slot in slots.items() if slot}

    @cached_property
    def _explicit(self) -> dict[str, Record]:
        """The broadcasts that do not follow from the last step."""
        known = {f"{t.name}.broadcast" for t in self.options.term.terms if isinstance(t, Recovers)}
        return {key: record for key, record in self._broadcasts.items() if key not in known}

    @cached_property
    def _step(self) -> Record:
        return Record(self.model.step or {})

    @cached_property
    def _digest(self) -> str:
        return digest(self.model.given)

    def _base(self, kind: str) -> dict[str, Any]:
        return {
            keys.DOWNLINK_KEY: kind,
            keys.DIGEST_KEY: self._digest,
            keys.PREVIOUS_LR_KEY: self.model.previous_lr,
        }

    def _coded_since(self, held_round: int, probe: bool, whole: Content) -> Content:
        """Return the coded steps since a round, or what is `whole` if that is smaller or one is gone."""
        m, rounds, key = self.model, range(held_round, self.ctx.round), (held_round, probe)
        if not m.coded_steps.keys() >= set(rounds):
            return whole
        if key not in self._since:
            buffers, tied = m.buffers or frozenset(), m.tied or {}
            moved = {n: m.model[n] for n in buffers if m.changed[n] >= held_round and n not in tied}
            update: Content = (
                {keys.ARRAYS: Record(moved)} | ({} if probe else self._explicit),
                {**self._base("coded"), keys.STEPS_KEY: [m.coded_steps[r] for r in rounds]},
            )
            smaller = Parcel(*update).nbytes < Parcel(*whole).nbytes
            self._since[key] = update if smaller else whole
        return self._since[key]
