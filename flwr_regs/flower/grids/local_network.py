"""The clients of a grid in this process: their contexts, and the server's network to them without messages.

Contexts are made when they are first used: a simulation may have 100,000 clients and let 1,000 of them
train, and the others cost nothing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict

from flwr_regs.client import member
from flwr_regs.client.member import Asked, Identity
from flwr_regs.client.memory import Memory, latest, written
from flwr_regs.client.train.batches import DRAWING, label_counts
from flwr_regs.cohort.batch_plan import CannotStack
from flwr_regs.cohort.stack_processes import StackProcesses
from flwr_regs.cohort.stacks import Stacks
from flwr_regs.flower.app import NumPyClientApp
from flwr_regs.flower.client import RegClient
from flwr_regs.flower.grids.grid_network import GridNetwork
from flwr_regs.flower.node import NodeState, copied
from flwr_regs.flower.simulated_clients import Clients
from flwr_regs.server.exchange.network import Replies, Request
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, digest
from flwr_regs.wire.delta import WHOLE, OutOfSync, model_from
from flwr_regs.wire.errors import described
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.precision import narrow
from flwr_regs.wire.records import from_record, to_record

LOG = logging.getLogger("flwr")
TRAINING = ("train", keys.PROBE)
OVERRIDES = ("fit", "evaluate", "get_properties", "to_client", "identity")
"""What a client that trains as every RegClient does has from RegClient."""
FEW = 4
"""Fewer clients train in one stack, however many processes there are."""
LACKING = Parcel(config={keys.MEMORY_KEY: [keys.LOST_MODEL]})
"""The reply of a client that lacks the model which its message builds on."""


class Contexts(dict[int, Context]):
    """The contexts that were used, by node id; the others are made when they are asked for.

    Parameters
    ----------
    nodes : sequence of int
        The node ids of all clients; their places are the clients' partition ids.
    run_config : mapping
        ``context.run_config`` of every client.
    """

    def __init__(self, nodes: Sequence[int], run_config: Mapping[str, Any]) -> None:
        super().__init__()
        self.nodes, self._run_config = nodes, run_config

    def __missing__(self, node: int) -> Context:
        run_config = dict(self._run_config)
        context = self[node] = Context(1, node, self.node_config(node), RecordDict(), run_config)
        return context

    def of_partition(self, pid: int) -> Context:
        """Return the context of a client by its partition id."""
        return self[self.nodes[pid]]

    def node_config(self, node: int) -> dict[str, Any]:
        """Return a client's ``context.node_config``; ValueError if there is no such node."""
        if node in self:
            return self[node].node_config
        return {"partition-id": self.nodes.index(node), "num-partitions": len(self.nodes)}

    def snapshot(self) -> dict[int, RecordDict]:
        """Return copies of the states that hold something, by node id.

        The first and the last client are always there: they tell one population from another.
        """
        held = {node: context.state for node, context in self.items() if context.state}
        states = dict.fromkeys((self.nodes[0], self.nodes[-1]), RecordDict()) | held
        return {node: copied(states[node]) for node in sorted(states)}

    def restore(self, states: Mapping[int, RecordDict]) -> None:
        """Continue from a snapshot, which does not change; raise ValueError if it is of other clients."""
        count = max(states) - min(states) + 1 if states else 0
        if count != len(self.nodes) or not {*self.nodes}.issuperset(states):
            has = f"this grid has {len(self.nodes)}"
            raise ValueError(f"the checkpoint holds the state of {count} clients, but {has}")
        for node in {*self, *(node for node, state in states.items() if state)}:
            self[node].state = copied(states.get(node, RecordDict()))


@dataclass
class Node:
    """What is kept for a client between messages, in one training.

    Attributes
    ----------
    state : NodeState
        Its place in the client's context.
    memory : Memory
    model : NDArrays or None
        A global model that the next message may build on.
    """

    state: NodeState
    memory: Memory = field(default_factory=dict)
    model: NDArrays | None = None


@dataclass
class LocalNetwork:
    """A :class:`flwr_regs.server.exchange.network.Network` of clients in this process.

    Attributes
    ----------
    contexts : Contexts
    source : Clients or NumPyClientApp
        Whose `client_fn` makes each client.
    who : Identity
        The strategy's method, for `Clients`.
    messages : GridNetwork
        Reaches clients by messages.
    workers : int
        With more than 1, clients that train one by one do so by messages, and stacks of `Clients` in
        so many processes.
    stacks : Stacks, optional
        Trains the clients of a round together that can. None: one by one.
    asking : bool
        Whether messages are on their way.
    """

    contexts: Contexts
    source: Any
    who: Identity
    messages: GridNetwork
    workers: int
    stacks: Stacks | None = None
    asking: bool = False
    _processes: StackProcesses | None = None
    _nodes: dict[int, Node] = field(default_factory=dict)
    _clients: dict[int, Any] = field(default_factory=dict)

    def serve(self, who: Identity) -> None:
        """Let `Clients` be of a method from now on."""
        self.put_away()
        self.close()
        self.who, self._processes = who, None
        self._clients.clear()

    def close(self) -> None:
        """End the processes; the next stacks start new ones."""
        if self._processes is not None:
            self._processes.close()

    def nodes(self) -> Collection[int]:
        """Return the ids of the nodes."""
        return self.contexts.nodes

    def ask(self, request: Request, timeout: float | None = None) -> Replies:
        """Return the replies to a request; no client is late."""
        if request.kind == keys.IDENTIFY:
            return self._by_messages(request)
        with self.lent():
            return self._asked(request)

    def lent(self) -> AbstractContextManager[Any, Any]:
        """Let clients train in a model that they share; that of `Clients` is as before afterwards.

        Trainings in several threads take turns: an app may have one model for all, too.
        """
        if isinstance(self.source, Clients):
            return self.source.lent()
        return nullcontext() if self.workers > 1 else DRAWING

    def _asked(self, request: Request) -> Replies:
        kind, parcels = request.kind, request.parcels
        came, others = dict[int, Parcel](), dict[int, Parcel]()
        failures, asked, seen = dict[int, str](), dict[int, Asked](), dict[Any, Any]()

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
                self._node(pid, parcel.config).model = dict(parcel.records[keys.ARRAYS])
                return Parcel()
            client = self._client(pid, kind, parcel.config)
            if client is None:
                others[pid] = parcel
                return None
            if kind == keys.LABELS:
                counts = label_counts(client.task.pairs(client.train_data)).tolist()
                return Parcel(config={keys.LABELS_KEY: json.dumps(counts)})
            node = self._node(pid, parcel.config)
            asked[pid] = Asked(pid, client, _received(parcel, node, seen), node.memory)
            return None

        apart = self.workers > 1  # other processes also evaluate
        evaluates = kind == "evaluate" and not apart
        stacks = self.stacks if len(parcels) > 1 and (kind in TRAINING or evaluates) else None

        def alone(pid: int) -> Parcel:
            return self._alone(kind, asked.pop(pid))

        for pid in parcels:
            attempt(pid, begun)
            if pid in asked and not stacks and not apart:
                attempt(pid, alone)
        if stacks and evaluates:
            came |= stacks.evaluate(list(asked.values()))
        elif stacks:
            for pid, served in self._stacked(stacks, list(asked.values())).items():
                loss: Any = (served.reply.metrics or {}).get("train-loss", 0.0)
                # where the loss is not finite, the client trains alone, and names what is wrong
                if math.isfinite(loss):
                    came[pid] = self._ended(asked[pid], served)
                else:
                    stacks.note(FloatingPointError("the loss in a stack is not finite"))
        for pid in [p for p in asked if p not in came]:
            if apart:
                others[pid] = parcels[pid]
            else:
                attempt(pid, alone)
        elsewhere = Request(kind, others, request.nodes)
        more = self._by_messages(elsewhere) if others else Replies({})
        came, failures = {**came, **more.came}, {**failures, **more.failures}
        if stacks and not failures:
            stacks.tell()
        came = {p: came[p] for p in parcels if p in came}
        return Replies(came, {p: failures[p] for p in parcels if p in failures}, more.silent)

    def _stacked(self, stacks: Stacks, asked: Sequence[Asked]) -> dict[int, member.Answer]:
        """Return what came of the clients that train in stacks, in this process or in others."""
        source = self.source
        here = self.workers == 1 or not isinstance(source, Clients) or source.by_round
        if here or len(asked) < FEW:
            return stacks.train(asked)
        if self._processes is None:
            self._processes = StackProcesses(source, self.who, stacks.settings, self.workers)
        served: dict[int, member.Answer] = {}
        for part, fallbacks in self._processes.train(asked):
            served |= part
            for why, clients in fallbacks.items():
                stacks.note(CannotStack(why), clients)
        return served

    def _alone(self, kind: str, asked: Asked) -> Parcel:
        """Return the reply of a client by itself."""
        if kind not in TRAINING:
            return member.evaluate(asked.client, asked.message, asked.memory).reply
        reply, memory, rebuilt = member.train(asked.client, asked.message, asked.memory)
        half = asked.message.config.get(keys.HALF_KEY)
        if half and keys.ARRAYS in reply.records:
            halved = narrow(dict(reply.records[keys.ARRAYS]), half)
            reply = replace(reply, records={**reply.records, keys.ARRAYS: halved})
        model: Any = asked.message.records[keys.ARRAYS] if rebuilt is None else rebuilt
        return self._ended(asked, member.Answer(reply, memory, model))

    def _ended(self, asked: Asked, served: member.Answer) -> Parcel:
        """Keep what a client leaves for the next round; return its reply."""
        config = asked.message.config
        node = self._nodes[asked.pid]
        node.memory = served.memory
        if keys.DOWNLINK_KEY in config:
            node.model = served.model
        return served.reply

    def _client(self, pid: int, kind: str, config: Mapping[str, Any]) -> member.Client | None:
        """Return a client; None if messages alone reach it."""
        source = self.source
        if isinstance(source, Clients):
            number = config.get(keys.ROUND_KEY, 0)
            budget = source.step_budget(pid, number)
            client = self._clients.get(pid) or source.client(pid, self.who, number)
            client.step_budget = budget
            if not source.by_round:
                self._clients[pid] = client
            return client
        if kind == keys.LABELS:  # only the client says whether it shares them
            return None
        made, why = self._made(source, pid, kind, config), ""
        if not isinstance(made, RegClient):
            why = f"{type(made).__name__} is no client of this package"
        elif overridden := made.overrides(*OVERRIDES):
            why = f"{type(made).__name__} has a {overridden[0]} of its own"
        if why and self.stacks and kind in TRAINING:
            self.stacks.note(CannotStack(why))
        return None if why else made

    def _made(self, app: NumPyClientApp, pid: int, kind: str, config: Mapping[str, Any]) -> Any:
        """Return what `client_fn` makes; once, if the app does not say otherwise."""
        if (kept := self._clients.get(pid)) is not None:
            withholds = isinstance(kept, RegClient) and kept.identity.withholds
            if not withholds or latest(self._node(pid, config).memory, config).private is not None:
                return kept
            # without a snapshot, entries that stay with it begin as `client_fn` makes them
        context = self.contexts.of_partition(pid)
        before = copied(context.state)
        try:
            made = app.made(context, kind, config)
        except Exception:  # whatever the user's code raises
            context.state = before
            raise
        if app.once:
            self._clients[pid] = made
        return made

    def _node(self, pid: int, config: Mapping[str, Any]) -> Node:
        """Return what was kept for a client before."""
        state, node = NodeState(self.contexts.of_partition(pid), config), self._nodes.get(pid)
        if node is None or node.state.prefix != state.prefix:
            kept = None if state.model is None else from_record(state.model)
            node = self._nodes[pid] = Node(state, state.memory, kept)
        return node

    def _by_messages(self, request: Request) -> Replies:
        """Return the replies of clients that messages alone reach."""
        self.asking = True
        try:
            return self.messages.ask(request)  # the grid settles before
        finally:
            self.asking = False

    def settle(self) -> None:
        """Put what the clients keep into their contexts."""
        models = {id(n.model): n.model for n in self._nodes.values() if n.model is not None}
        records = {key: to_record(model) for key, model in models.items()}
        for node in self._nodes.values():
            node.state.remember(written(node.memory))
            if node.model is not None:
                node.state.keep(keys.MODEL, records[id(node.model)])

    def put_away(self) -> None:
        """Put what the clients keep into their contexts, and read it from there again."""
        self.settle()
        self._nodes.clear()


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
