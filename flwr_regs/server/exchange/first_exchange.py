"""What goes back and forth in one round: the messages, the first exchange, and what a client lacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from flwr_regs.server.aggregate.aggregators import TooFewVectors
from flwr_regs.server.exchange.downlink import Downlink
from flwr_regs.server.exchange.network import Network, Replies, Request
from flwr_regs.server.exchange.outbox import Outbox
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
    now : Round
        Begun: its cohort, config and context are known. What is sent and what comes is noted in it.
    options, model, network : Options, GlobalModel, Network
    request : callable
        Makes a request of messages by partition id: :meth:`Population.request`.
    memory : tuple of mapping
        (client -> the round whose model it last kept, client -> the last round that used its reply).
    """

    def __init__(
        self,
        now: Round,
        options: Options,
        model: GlobalModel,
        request: Callable[[str, dict[int, Parcel]], Request],
        network: Network,
        memory: tuple[Mapping[int, int], Mapping[int, int]],
    ) -> None:
        self._now = now
        self._options = options
        self._model = model
        self._request = request
        self._network = network
        seed, config = options.seed, now.config
        assert now.context is not None
        downlink = Downlink(options.downlink, options.term, model, now.context, options.wire_dtype)
        self._outbox = Outbox(now.number, seed, config, downlink, *memory)

    def train(self, clients: Iterable[int], lost: bool = False) -> Request:
        """Return the train messages, and count their bytes; `lost` clients get everything."""
        now = self._now
        parcels = {pid: self._outbox.train(pid, lost) for pid in clients}
        for pid, parcel in parcels.items():
            before = now.bytes_down.get(pid, (now.probe_down or {}).get(pid, 0))
            now.bytes_down[pid] = before + parcel.nbytes
        return self._request("train", parcels)

    def ahead(self, clients: Iterable[int]) -> list[Request]:
        """Return the messages that send ``w_t`` to the next cohort, except to clients of this one."""
        model, now = Record(self._model.model), self._now
        parcels = {p: self._outbox.ahead(model) for p in sorted(set(clients) - set(now.cohort))}
        now.bytes_ahead = {pid: parcel.nbytes for pid, parcel in parcels.items()}
        return [self._request(keys.PREFETCH, parcels)]

    def probe(self) -> list[int]:
        """Run the first exchange, ``w_t`` down and the terms' probes up; return the clients that replied.

        A client without a reply is left out of the round and named among its failures. A client that lost
        its model is asked once more, with the model.
        """
        now, outbox = self._now, self._outbox
        assert now.context is not None
        term, uploads = self._options.term, dict[int, dict[str, Any]]()
        now.probe_down, now.probe_up = dict.fromkeys(now.asked, 0), {}
        waiting, tries = now.asked, 0
        while waiting:
            parcels = {pid: outbox.probe(pid, lost=tries > 0) for pid in waiting}
            replies = self._ask(self._request(keys.PROBE, parcels))
            now.failures |= replies.failures
            now.miss(replies.silent, self._options.deadline)
            for pid, parcel in parcels.items():
                now.probe_down[pid] += parcel.nbytes
            came, waiting = self._lacking(replies.came, tries)
            found, failures = read_each(came, self._read_probe)
            now.failures |= failures
            uploads |= found
            now.probe_up |= {pid: came[pid].nbytes for pid in found}
            now.lost_state += [pid for pid in found if came[pid].says(keys.LOST_KEY)]
            tries += 1
        unlike = disagreeing(term, uploads, probing=True)
        uploads = {pid: uploads[pid] for pid in sorted(uploads) if pid not in unlike}
        now.failures |= unlike
        now.answers, wrong = self._answer(uploads)
        outbox.broadcasts = now.answers
        now.failures |= wrong
        if now.failures:
            LOG.warning("\t> in the first exchange: %s", name_failures(now.failures))
        return [pid for pid in uploads if pid not in wrong]

    def _read_probe(self, pid: int, reply: Parcel) -> Slot:
        """Return a client's checked probe."""
        assert self._now.context is not None
        found = read_uploads(f"the probe of client {pid}", reply)
        params, server = self._now.context.params, self._model.server
        try:
            self._options.term.check(found, params, server, probing=True)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        return found

    def _answer(self, probes: Mapping[int, Slot]) -> tuple[Mapping[int, Slot], dict[int, str]]:
        """Return (each client's own broadcasts, client -> why its probe cannot be used)."""
        term, ctx = self._options.term, self._now.context
        try:
            return term.answer(probes, ctx), {}
        except TooFewVectors as error:
            return {}, dict.fromkeys(probes, f"in the first exchange, {error}")
        except Exception as error:  # whatever a probe makes a term raise

            def fails(pids: Collection[int]) -> str:
                try:
                    term.answer({p: probes[p] for p in pids})
                except Exception as its_own:
                    return f"its probe cannot be used: {described(its_own)}"
                return ""

            if not (wrong := culprits(list(probes), fails)):
                raise ValueError(f"the probes cannot be used: {described(error)}") from error
            rest, more = self._answer({p: u for p, u in probes.items() if p not in wrong})
            return rest, {**wrong, **more}

    def collect(self, replies: Replies) -> None:
        """Note the replies; send a client what it lacks (a restarted node its model), and wait."""
        now, failures, tries = self._now, dict(replies.failures), 0
        silent = list(replies.silent)
        came, lost = self._lacking(replies.came, tries)
        while lost:
            again = self._ask(self.train(lost, lost=True))
            failures |= again.failures
            silent += again.silent
            tries += 1
            came, lost = self._lacking(came | dict(again.came), tries)
        now.came = came
        before = now.probe_up or {}
        now.bytes_up = {p: reply.nbytes + before.get(p, 0) for p, reply in came.items()}
        now.failures = {**failures, **now.failures}
        now.miss(silent, self._options.deadline)
        if (layer := output_layer(came)) is not None:
            now.events["output_layer"] = layer

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
        self._now.failures |= refused
        return others, [p for p in lost if p not in refused]
