"""What goes back and forth in one round: the messages, the first exchange, and what a client lacks.

**The downlink** is the model with the terms' broadcasts, or the changes since a client's last model.
``"model"`` sends ``w_t`` and the broadcasts (the full pair) to everyone. ``"delta"`` sends
``w_t − w_{t−1}`` to a client that took part in round t − 1 and kept ``w_{t−1}``. The client rebuilds
``w_t`` to the bit, which a digest checks. It recovers broadcasts from the step where a term can; the
others are sent. A method with a code for its steps sends them coded, and a client that missed rounds
also gets their steps. Any other client gets the full pair, and so does a client for which the full pair
is smaller. A client that finds that it lost its model gets the full pair in the same round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from flwr_regs.abilities import Recovers
from flwr_regs.server.aggregate.aggregators import TooFewVectors
from flwr_regs.server.aggregate.weights import aggregation_weights
from flwr_regs.server.client_metrics import read_metrics
from flwr_regs.server.exchange.network import Network, Replies, Request
from flwr_regs.server.exchange.replies import check_round, disagreeing, output_layer, read_uploads
from flwr_regs.server.failures import UnusableReplies, name_failures, of_usable, read_each
from flwr_regs.server.global_model import GlobalModel
from flwr_regs.server.options import Options
from flwr_regs.server.round import Replied, Reply, Round, Snapshots
from flwr_regs.term import ServerContext, Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError, digest
from flwr_regs.wire.delta import WHOLE
from flwr_regs.wire.parcel import Parcel, Record
from flwr_regs.wire.precision import narrow

LOG = logging.getLogger("flwr")
Content = tuple[dict[str, Record], dict[str, Any]]
"""(records, entries of the config)"""
Came = tuple[dict[int, Parcel], list[int]]
"""(replies, the clients that say that they have lost their model)"""


class Remembered(Snapshots):
    """What the server knows of the clients' memory: by partition id, rounds of this course of the training.

    The clients' side of it, and the rule, are in ``client/memory.py``.

    Attributes
    ----------
    held : dict of int to int
        The round whose model a client last kept.
    came : dict of int to int
        Of a client that keeps something: the last round whose reply arrived.
    used : dict of int to int
        Of a client that keeps slots of terms: the last round whose reply was used; 0: none. Like `came`, it
        is set once a round has ended well.
    """

    kept = ("held", "came", "used")

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.came: dict[int, int] = {}
        self.used: dict[int, int] = {}

    def note(self, number: int, came: Mapping[int, Parcel], used: Collection[int]) -> None:
        """Note a round's replies, and whose were used; one that keeps nothing of the round says nothing."""
        self.held |= dict.fromkeys(came, number)
        for pid, reply in came.items():
            if keeps_state := reply.says(keys.KEEPS_STATE):
                self.used[pid] = number if pid in used else self.used.get(pid, 0)
            if keeps_state or reply.says(keys.KEEPS_PRIVATE):
                self.came[pid] = number

    def entries(self, pid: int, seed: int, number: int) -> dict[str, Any]:
        """Return the entries of a client's own in a message of a round; `seed` is the run's."""
        labels = [rounds[pid] for rounds in (self.used, self.came) if pid in rounds]
        key: Any = (seed, number, pid)
        if max(key) < 2**32:  # the same seed from 32-bit words, in half the time
            key = np.array(key, np.uint32)
        return {
            keys.SEED_KEY: int(np.random.SeedSequence(key).generate_state(1)[0]),
            keys.CLIENT_KEY: pid,
            **({keys.SNAPSHOTS_KEY: labels} if labels else {}),
        }


@dataclass(frozen=True)
class Exchange:
    """One round's messages to the clients, and their replies; what many clients get is made once.

    Attributes
    ----------
    this_round : Round
        Begun: its cohort and config are known. What is sent and what comes is noted in it.
    options, model, network : Options, GlobalModel, Network
    context : ServerContext
        Of the round.
    request : callable
        Makes a request of messages by partition id: :meth:`Population.request`.
    remembered : Remembered
    judge : callable
        Raises UnusableReplies for clients whose uploads do not belong to their cohort's.
    """

    this_round: Round
    options: Options
    model: GlobalModel
    network: Network
    context: ServerContext
    request: Callable[[str, dict[int, Parcel]], Request]
    remembered: Remembered
    judge: Callable[[Mapping[int, Slot]], None]
    _since: dict[tuple[int, bool], Content] = field(default_factory=dict)

    def train(self, clients: Iterable[int], lost: bool = False, kind: str = "train") -> Request:
        """Return the messages of a `kind`, and count their bytes; `lost` clients get everything."""
        parcels = {pid: self._parcel(pid, lost, kind == keys.PROBE) for pid in clients}
        _count(self.this_round.bytes_down, parcels)
        return self.request(kind, parcels)

    def ahead(self, clients: Iterable[int]) -> Request:
        """Return the messages that send ``w_t`` to the next cohort, except to clients of this one."""
        names = (keys.METHOD_KEY, keys.START_KEY, keys.ROUND_KEY)
        config = {name: self.this_round.config[name] for name in names}
        parcel = Parcel({keys.ARRAYS: Record(self.model.model)}, config)
        parcels = dict.fromkeys(sorted(set(clients) - set(self.this_round.cohort)), parcel)
        self.this_round.bytes_ahead = dict.fromkeys(parcels, parcel.nbytes)
        return self.request(keys.PREFETCH, parcels)

    def _parcel(self, pid: int, lost: bool, probe: bool = False) -> Parcel:
        """Return a client's message, of the first exchange if it is a `probe`."""
        held_round = None if lost else self.remembered.held.get(pid)
        records, entries = self._downlink(held_round, probe)
        term, server, number = self.options.term, self.model.server, self.this_round.number
        own = {} if probe else term.broadcast_to(pid, server, self.context)
        for name, slot in [*own.items(), *self.this_round.answers.get(pid, {}).items()]:
            if slot:
                key = f"{name}.broadcast"
                records = {**records, key: Record({**records.get(key, {}), **slot})}
        of_client = self.remembered.entries(pid, self.options.seed, number)
        first = {keys.PROBE_KEY: True} if probe else {}
        return Parcel(records, {**self.this_round.config, **entries, **of_client, **first})

    def probe(self) -> list[int]:
        """Run the first exchange, ``w_t`` down and the terms' probes up; return the clients that replied.

        A client without a reply is left out of the round and named among its failures. A client that lost
        its model is asked once more, with the model.
        """
        this_round, replies = self.this_round, dict[int, Reply]()
        waiting, lost = this_round.asked, False
        while waiting:
            came, waiting = self._ask(self.train(waiting, lost, keys.PROBE), lost)
            probes, failures = read_each(came, self._read_probe)
            this_round.failures |= failures
            replies |= probes
            this_round.lose({pid: came[pid] for pid in probes})
            lost = True
        this_round.bytes_probe_down = {**this_round.bytes_down}
        this_round.bytes_probe_up = {**this_round.bytes_up}
        uploads = {pid: reply.uploads for pid, reply in replies.items()}
        unlike = disagreeing(self.options.term, uploads, probing=True)
        while replies := {pid: replies[pid] for pid in sorted(replies) if pid not in unlike}:
            try:
                self.judge({pid: reply.uploads for pid, reply in replies.items()})
                this_round.answers = self._answer(replies)
                break
            except UnusableReplies as error:
                unlike |= error.why
        this_round.failures |= unlike
        if this_round.failures:
            LOG.warning("\t> in the first exchange: %s", name_failures(this_round.failures))
        return list(replies)

    def _read_probe(self, pid: int, reply: Parcel) -> Reply:
        """Return a client's checked probe, and its examples."""
        check_round(what := f"the probe of client {pid}", reply, self.this_round.config)
        probe = read_uploads(what, reply)
        params, server = self.context.params, self.model.server
        try:
            self.options.term.check(probe, params, server, probing=True)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        return Reply({}, probe, *read_metrics(pid, reply, "num-examples"))

    def _answer(self, replies: Replied) -> Mapping[int, Slot]:
        """Return each client's own broadcasts; raise UnusableReplies for probes that cannot be used."""
        term, options = self.options.term, self.options

        def answer(pids: list[int]) -> Mapping[int, Slot]:
            some = {p: replies[p] for p in pids}
            weights = aggregation_weights(some, options.weighting, options.max_weight)
            uploads = {p: r.uploads for p, r in some.items()}
            return term.answer(uploads, replace(self.context, weights=weights))

        try:
            return of_usable(replies, answer, "its probe cannot be used")
        except TooFewVectors as error:
            why = f"in the first exchange, {error}"
            raise UnusableReplies(dict.fromkeys(replies, why)) from error

    def collect(self, replies: Replies) -> None:
        """Note the replies; send a client what it lacks (a restarted node its model), and wait."""
        this_round = self.this_round
        came, lost = self._lacking(replies)
        if lost:
            came |= self._ask(self.train(lost, lost=True), again=True)[0]
        this_round.came = came
        if (layer := output_layer(came)) is not None:
            this_round.events["output_layer"] = layer

    def _ask(self, request: Request, again: bool) -> Came:
        """Send a request; return what :meth:`_lacking` makes of the replies."""
        return self._lacking(self.network.ask(request, self.options.deadline), again)

    def noted(self, replies: Replies) -> Mapping[int, Parcel]:
        """Note the clients without a reply, which with a deadline are late; return the replies."""
        this_round, deadline = self.this_round, self.options.deadline
        this_round.failures |= replies.failures
        for pid in replies.unsent:
            this_round.bytes_down[pid] = (this_round.bytes_probe_down or {}).get(pid, 0)
        if deadline is not None:
            this_round.late += sorted(replies.silent)
            why = f"no reply within the deadline of {deadline:g} s"
            said = {pid: replies.failures[pid] for pid in replies.silent}
            this_round.failures |= {p: t.replace("no reply in time", why) for p, t in said.items()}
        return replies.came

    def _lacking(self, replies: Replies, again: bool = False) -> Came:
        """Return (the other replies, the clients to send the model that they say they have lost).

        Their bytes are counted. A client that says so `again` is named among the failures.
        """
        came = self.noted(replies)
        _count(self.this_round.bytes_up, came)
        lost = [p for p, reply in came.items() if reply.says(keys.LOST_MODEL)]
        others = {p: reply for p, reply in came.items() if p not in lost}
        if again:
            why = "it says that it lacks the model that it was just sent"
            self.this_round.failures |= dict.fromkeys(lost, why)
            return others, []
        if had := [p for p in lost if p in self.remembered.held]:
            LOG.warning("clients %s no longer hold their last model; sending the full pair", had)
        return others, lost

    def _downlink(self, held_round: int | None, probe: bool = False) -> Content:
        """Return (records, config entries) for a client that last kept the model of `held_round`.

        A `probe` is the first exchange of a round with two: it sends no broadcasts. The second sends only
        the broadcasts to a client that got ``w_t`` in the first.
        """
        keeps = self.options.downlink == "delta"
        broadcasts = {} if probe else self._broadcasts
        if held_round == self.context.round:
            kept = {keys.DOWNLINK_KEY: "kept", keys.DIGEST_KEY: self._base[keys.DIGEST_KEY]}
            return {keys.ARRAYS: Record(), **broadcasts}, kept
        entries = {keys.DOWNLINK_KEY: WHOLE} if keeps or probe else {}
        whole: Content = {keys.ARRAYS: self._whole, **broadcasts}, entries
        if not keeps or held_round is None or self.model.step is None:
            return whole
        if self.options.term.coder("release") is not None:
            return self._coded_since(held_round, probe, whole)
        if held_round != self.context.round - 1:
            return whole
        broadcasts = {} if probe else self._explicit
        return {keys.ARRAYS: self._step, **broadcasts}, {keys.DOWNLINK_KEY: "delta", **self._base}

    @cached_property
    def _whole(self) -> Record:
        return Record(narrow(self.model.model, self.options.wire_dtype))

    @cached_property
    def _broadcasts(self) -> dict[str, Record]:
        slots = self.options.term.broadcast(self.model.server, self.context)
        return {f"{name}.broadcast": Record(slot) for name, slot in slots.items() if slot}

    @cached_property
    def _explicit(self) -> dict[str, Record]:
        """The broadcasts that do not follow from the last step."""
        known = {f"{t.name}.broadcast" for t in self.options.term.able(Recovers)}
        return {key: record for key, record in self._broadcasts.items() if key not in known}

    @cached_property
    def _step(self) -> Record:
        return Record(self.model.step or {})

    @cached_property
    def _base(self) -> dict[str, Any]:
        """Entries of a message that changes a client's last model."""
        model = self.model
        return {keys.DIGEST_KEY: digest(model.given), keys.PREVIOUS_LR_KEY: model.previous_lr}

    def _coded_since(self, held_round: int, probe: bool, whole: Content) -> Content:
        """Return the coded steps since a round, or what is `whole` if that is smaller or one is gone."""
        m, rounds, key = self.model, range(held_round, self.context.round), (held_round, probe)
        if not m.coded_steps.keys() >= set(rounds):
            return whole
        if key not in self._since:
            names = {*(m.buffers or ())} - {*(m.tied or ())}
            moved = Record({n: m.model[n] for n in names if m.changed[n] >= held_round})
            steps = [m.coded_steps[r] for r in rounds]
            entries = {keys.DOWNLINK_KEY: "coded", **self._base, keys.STEPS_KEY: steps}
            update: Content = {keys.ARRAYS: moved, **({} if probe else self._explicit)}, entries
            smaller = Parcel(*update).nbytes < Parcel(*whole).nbytes
            self._since[key] = update if smaller else whole
        return self._since[key]


def _count(size: dict[int, int], parcels: Mapping[int, Parcel]) -> None:
    """Add the bytes of parcels to those of their clients."""
    for pid, parcel in parcels.items():
        size[pid] = size.get(pid, 0) + parcel.nbytes


def name_losses(this_round: Round) -> None:
    """Warn of the clients of a round that lost what they kept, or could not save it."""
    if lost := this_round.lost["state"]:
        LOG.warning("clients %s have lost their state and began anew without", lost)
    if unsaved := sorted(p for p, r in this_round.came.items() if r.says(keys.NOT_SAVED)):
        this_round.events["not_saved"] = unsaved
        LOG.warning("clients %s could not save what they keep", unsaved)
    if lost := this_round.lost["private"]:
        LOG.warning("clients %s have lost their private entries and began with their model's", lost)
