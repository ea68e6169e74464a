"""Clients of this process as the server's network: requests in, replies out, no messages. Plain torch."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from flwr_regs.client import serving
from flwr_regs.client.memory import Memory
from flwr_regs.client.train.batches import label_counts
from flwr_regs.cohort.batch_plan import CannotStack
from flwr_regs.cohort.member_view import Asked
from flwr_regs.cohort.processes import StackProcesses
from flwr_regs.cohort.stacks import Stacks
from flwr_regs.server.exchange.network import Replies, Request
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, digest
from flwr_regs.wire.delta import WHOLE, OutOfSync, model_from
from flwr_regs.wire.errors import described
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.precision import narrow

LOG = logging.getLogger("flwr")
TRAINING = ("train", keys.PROBE)
FEW = 4
"""Fewer clients train in one stack, however many processes there are."""
LACKING = Parcel(config={keys.MEMORY_KEY: [keys.LOST_MODEL]})
"""The reply of a client that lacks the model which its message builds on."""


@dataclass
class Node:
    """What is kept for a client between messages, in one training.

    Attributes
    ----------
    training : tuple
        The method and the training's start id.
    memory : Memory
    model : NDArrays or None
        A global model that the next message may build on.
    """

    training: tuple[Any, Any]
    memory: Memory = field(default_factory=dict)
    model: NDArrays | None = None


class Host(Protocol):
    """Whose clients these are."""

    def node_ids(self) -> Collection[int]:
        """Return the nodes' ids."""

    def client(self, pid: int, kind: str, config: Mapping[str, Any]) -> serving.Client | None:
        """Return the client of a partition; None if messages alone reach it. Raises what it raises."""

    def node(self, pid: int, config: Mapping[str, Any]) -> Node:
        """Return what was kept for a client before."""

    def prepare(self, client: serving.Client, memory: Memory) -> None:
        """Let a client that remembers nothing begin with the entries that its model was given with."""

    def lent(self) -> AbstractContextManager[None]:
        """Let clients train in a model that they share; it is as before afterwards."""

    def by_messages(self, request: Request) -> Replies:
        """Return the replies of clients that messages alone reach."""


class CohortNetwork:
    """A :class:`flwr_regs.server.exchange.network.Network` of clients in this process.

    Parameters
    ----------
    host : Host
    stacks : Stacks, optional
        Trains the clients of a round together that can. None: one by one.
    apart : bool
        Clients that train one by one do so by messages: in other processes.
    processes : StackProcesses, optional
        Train the stacks.
    """

    def __init__(
        self,
        host: Host,
        stacks: Stacks | None = None,
        apart: bool = False,
        processes: StackProcesses | None = None,
    ) -> None:
        self._host, self._stacks, self._apart = host, stacks, apart
        self._processes = processes

    def nodes(self) -> Collection[int]:
        """Return the ids of the nodes."""
        return self._host.node_ids()

    def ask(self, request: Request, timeout: float | None = None) -> Replies:
        """Return the replies to a request; no client is late."""
        if request.kind == keys.IDENTIFY:
            return self._host.by_messages(request)
        with self._host.lent():
            return self._asked(request)

    def _asked(self, request: Request) -> Replies:
        kind, parcels = request.kind, request.parcels
        came: dict[int, Parcel] = {}
        failures: dict[int, str] = {}
        asked: dict[int, Asked] = {}
        others: dict[int, Parcel] = {}
        seen: dict[Any, Any] = {}

        def attempt(pid: int, step: Callable[[int], Parcel | None]) -> None:
            try:
                if (reply := step(pid)) is not None:
                    came[pid] = reply
            except OutOfSync:  # the server then sends the model
                came[pid] = LACKING
            except Exception as error:  # whatever the user's code raises
                LOG.debug("the traceback of a client that failed", exc_info=error)
                failures[pid] = described(error)

        def begun(pid: int) -> Parcel | None:
            parcel = parcels[pid]
            if kind == keys.PREFETCH:
                self._host.node(pid, parcel.config).model = dict(parcel.records[keys.ARRAYS])
                return Parcel()
            client = self._host.client(pid, kind, parcel.config)
            if client is None:
                others[pid] = parcel
                return None
            if kind == keys.LABELS:
                counts = label_counts(client.task.pairs(client.train_data)).tolist()
                return Parcel(config={keys.LABELS_KEY: json.dumps(counts)})
            node = self._host.node(pid, parcel.config)
            self._host.prepare(client, node.memory)
            asked[pid] = Asked(pid, client, _received(parcel, node, seen), node.memory)
            return None

        def alone(pid: int) -> Parcel:
            one = asked[pid]
            self._host.prepare(one.client, one.memory)  # others have used its model since
            return self._alone(kind, one)

        for pid in parcels:
            attempt(pid, begun)
        evaluates = kind == "evaluate" and not self._apart  # other processes evaluate, too
        stacks = self._stacks if len(parcels) > 1 and (kind in TRAINING or evaluates) else None
        if stacks and evaluates:
            came |= stacks.evaluate(list(asked.values()))
        elif stacks:
            for pid, served in self._stacked(stacks, list(asked.values())).items():
                loss: Any = (served.reply.metrics or {}).get("train-loss", 0.0)
                # where the loss is not finite, the client trains alone, and names what is wrong
                if math.isfinite(loss):
                    came[pid] = self._ended(asked[pid], served)
        for pid in [p for p in asked if p not in came]:
            if self._apart:
                others[pid] = parcels[pid]
            else:
                attempt(pid, alone)
        more = Replies({})
        if others:
            more = self._host.by_messages(Request(kind, others, request.nodes))
        came, failures = {**came, **more.came}, {**failures, **more.failures}
        if stacks and not failures:
            stacks.tell()
        return Replies(
            {p: came[p] for p in parcels if p in came},
            {p: failures[p] for p in parcels if p in failures},
            more.silent,
        )

    def _stacked(self, stacks: Stacks, asked: Sequence[Asked]) -> dict[int, serving.Answer]:
        """Return what came of the clients that train in stacks, in this process or in others."""
        if self._processes is None or len(asked) < FEW:
            return stacks.train(asked)
        served: dict[int, serving.Answer] = {}
        for part, fallbacks in self._processes.train(asked):
            served |= part
            for why, clients in fallbacks.items():
                stacks.note(CannotStack(why), clients)
        return served

    def _alone(self, kind: str, asked: Asked) -> Parcel:
        """Return the reply of a client by itself."""
        if kind not in TRAINING:
            return serving.evaluate(asked.client, asked.message, asked.memory).reply
        reply, memory, rebuilt = serving.train(asked.client, asked.message, asked.memory)
        half = asked.message.config.get(keys.HALF_KEY)
        if half and keys.ARRAYS in reply.records:
            halved = narrow(dict(reply.records[keys.ARRAYS]), half)
            reply = replace(reply, records={**reply.records, keys.ARRAYS: halved})
        model: Any = asked.message.records[keys.ARRAYS] if rebuilt is None else rebuilt
        return self._ended(asked, serving.Answer(reply, memory, model))

    def _ended(self, asked: Asked, served: serving.Answer) -> Parcel:
        """Keep what a client leaves for the next round; return its reply."""
        config = asked.message.config
        node = self._host.node(asked.pid, config)
        node.memory = served.memory
        if keys.DOWNLINK_KEY in config:
            node.model = served.model
        return served.reply


def _received(parcel: Parcel, node: Node, seen: dict[Any, Any]) -> Parcel:
    """Return a message with the global model in full in place of what travels; raise OutOfSync without.

    Of coded steps, which only the method can decode, it is the model that the client kept. What many
    clients get is made once: `seen` holds it.
    """
    config, records = parcel.config, parcel.records
    whole = config.get(keys.DOWNLINK_KEY, WHOLE) == WHOLE
    base = None if whole or node.model is None else _same(node.model, seen)
    sent = records[keys.ARRAYS] if records[keys.ARRAYS] else None  # one that is empty is none
    key = id(sent), id(base), config.get(keys.DOWNLINK_KEY)
    if key not in seen:
        copies = {n: np.array(a) for n, a in records[keys.ARRAYS].items()}  # torch may write
        arrays, step = model_from(config, copies, base)
        seen[key] = {keys.ARRAYS: arrays, **({} if step is None else {keys.STEP: step})}
    return Parcel({**records, **seen[key]}, config)


def _same(model: NDArrays, seen: dict[Any, Any]) -> NDArrays:
    """Return an equal model that is one object for all clients, as when each read its own from a file."""
    if id(model) not in seen:
        seen[id(model)] = model, seen.setdefault(digest(model), model)  # so that it keeps its id
    return seen[id(model)][1]  # type: ignore[no-any-return]
