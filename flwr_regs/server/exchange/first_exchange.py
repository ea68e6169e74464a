"""What goes back and forth in one round: the messages, the first exchange, and what a client lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr_regs.server.aggregate.aggregators import TooFewVectors
from flwr_regs.server.exchange.downlink import Downlink
from flwr_regs.server.exchange.network import Network, Replies, Request
from flwr_regs.server.exchange.outbox import Outbox
from flwr_regs.server.exchange.remembered import Remembered
from flwr_regs.server.exchange.replies import disagreeing, output_layer, read_uploads
from flwr_regs.server.failures import culprits, name_failures, read_each
from flwr_regs.server.global_model import GlobalModel
from flwr_regs.server.options import Options
from flwr_regs.server.round import Round
from flwr_regs.term import Slot
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.errors import described
from flwr_regs.wire.parcel import Parcel, Record

LOG = logging.getLogger("flwr")


class Exchange:
    """One round's messages to the clients, and their replies.

    Parameters
    ----------
    this_round : Round
        Begun: its cohort, config and context are known. What is sent and what comes is noted in it.
    options, model, network : Options, GlobalModel, Network
    request : callable
        Makes a request of messages by partition id: :meth:`Population.request`.
    held : mapping
        Client -> the round whose model it last kept.
    remembered : Remembered
    """

    def __init__(
        self,
        this_round: Round,
        options: Options,
        model: GlobalModel,
        request: Callable[[str, dict[int, Parcel]], Request],
        network: Network,
        held: Mapping[int, int],
        remembered: Remembered,
    ) -> None:
        self._round = this_round
        self._options = options
        self._model = model
        self._request = request
        self._network = network
        seed, config = options.seed, this_round.config
        assert this_round.context is not None
        downlink = Downlink(
            options.downlink, options.term, model, this_round.context, options.wire_dtype
        )
        self._outbox = Outbox(this_round.number, seed, config, downlink, held, remembered)

    def train(self, clients: Iterable[int], lost: bool = False) -> Request:
        """Return the train messages, and count their bytes; `lost` clients get everything."""
        this_round = self._round
        parcels = {pid: self._outbox.train(pid, lost) for pid in clients}
        for pid, parcel in parcels.items():
            before = this_round.bytes_down.get(pid, (this_round.probe_down or {}).get(pid, 0))
            this_round.bytes_down[pid] = before + parcel.nbytes
        return self._request("train", parcels)

    def ahead(self, clients: Iterable[int]) -> list[Request]:
        """Return the messages that send ``w_t`` to the next cohort, except to clients of this one."""
        model, this_round = Record(self._model.model), self._round
        parcels = {
            p: self._outbox.ahead(model) for p in sorted(set(clients) - set(this_round.cohort))
        }
        this_round.bytes_ahead = {pid: parcel.nbytes for pid, parcel in parcels.items()}
        return [self._request(keys.PREFETCH, parcels)]

    def probe(self) -> list[int]:
        """Run the first exchange, ``w_t`` down and the terms' probes up; return the clients that replied.

        A client without a reply is left out of the round and named among its failures. A client that lost
        its model is asked once more, with the model.
        """
        this_round, outbox = self._round, self._outbox
        assert this_round.context is not None
        term, uploads = self._options.term, dict[int, dict[str, Any]]()
        this_round.probe_down, this_round.probe_up = dict.fromkeys(this_round.asked, 0), {}
        waiting, tries = this_round.asked, 0
        while waiting:
            parcels = {pid: outbox.probe(pid, lost=tries > 0) for pid in waiting}
            replies = self._ask(self._request(keys.PROBE, parcels))
            this_round.failures |= replies.failures
            this_round.miss(replies.silent, self._options.deadline)
            for pid, parcel in parcels.items():
                this_round.probe_down[pid] += parcel.nbytes
            came, waiting = self._lacking(replies.came, tries)
            probes, failures = read_each(came, self._read_probe)
            this_round.failures |= failures
            uploads |= probes
            this_round.probe_up |= {pid: came[pid].nbytes for pid in probes}
            this_round.lose({pid: came[pid] for pid in probes})
            tries += 1
        unlike = disagreeing(term, uploads, probing=True)
        uploads = {pid: uploads[pid] for pid in sorted(uploads) if pid not in unlike}
        this_round.failures |= unlike
        this_round.answers, wrong = self._answer(uploads)
        outbox.broadcasts = this_round.answers
        this_round.failures |= wrong
        if this_round.failures:
            LOG.warning("\t> in the first exchange: %s", name_failures(this_round.failures))
        return [pid for pid in uploads if pid not in wrong]

    def _read_probe(self, pid: int, reply: Parcel) -> Slot:
        """Return a client's checked probe."""
        assert self._round.context is not None
        probe = read_uploads(f"the probe of client {pid}", reply)
        params, server = self._round.context.params, self._model.server
        try:
            self._options.term.check(probe, params, server, probing=True)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        return probe

    def _answer(self, probes: Mapping[int, Slot]) -> tuple[Mapping[int, Slot], dict[int, str]]:
        """Return (each client's own broadcasts, client -> why its probe cannot be used)."""
        term, ctx = self._options.term, self._round.context
        try:
            return term.answer(probes, ctx), {}
        except TooFewVectors as error:
            return {}, dict.fromkeys(probes, f"in the first exchange, {error}")
        except Exception as error:  # whatever a probe makes a term raise
            wrong = culprits(
                probes,
                lambda pids: term.answer({p: probes[p] for p in pids}),
                "its probe cannot be used",
            )
            if not wrong:
                raise ValueError(f"the probes cannot be used: {described(error)}") from error
            rest, more = self._answer({p: u for p, u in probes.items() if p not in wrong})
            return rest, {**wrong, **more}

    def collect(self, replies: Replies) -> None:
        """Note the replies; send a client what it lacks (a restarted node its model), and wait."""
        this_round, failures, tries = self._round, dict(replies.failures), 0
        silent = list(replies.silent)
        came, lost = self._lacking(replies.came, tries)
        while lost:
            again = self._ask(self.train(lost, lost=True))
            failures |= again.failures
            silent += again.silent
            tries += 1
            came, lost = self._lacking(came | dict(again.came), tries)
        this_round.came = came
        before = this_round.probe_up or {}
        this_round.bytes_up = {p: reply.nbytes + before.get(p, 0) for p, reply in came.items()}
        this_round.failures = {**failures, **this_round.failures}
        this_round.miss(silent, self._options.deadline)
        if (layer := output_layer(came)) is not None:
            this_round.events["output_layer"] = layer

    def _ask(self, request: Request) -> Replies:
        return self._network.ask(request, self._options.deadline)

    def _lacking(
        self, came: Mapping[int, Parcel], tries: int
    ) -> tuple[dict[int, Parcel], list[int]]:
        """Return (the other replies, the clients to send what they say that they lack).

        That is its model. A client that says so again is named among the failures.
        """
        lost = [p for p, reply in came.items() if reply.says(keys.OUT_OF_SYNC_KEY)]
        others = {p: reply for p, reply in came.items() if p not in lost}
        refused = self._outbox.catch_up(lost, tries)
        self._round.failures |= refused
        return others, [p for p in lost if p not in refused]
