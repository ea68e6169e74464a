"""The clients of a grid in this process: their contexts, and their side of a network without messages.

Contexts are made when they are first used: a simulation may have 100,000 clients and let 1,000 of them
train, and the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, Context, RecordDict

from flwr_regs.abilities import Withholds
from flwr_regs.client.member import Identity
from flwr_regs.client.memory import Memory, written
from flwr_regs.client.serving import Client
from flwr_regs.cohort.cohort_network import Node
from flwr_regs.flower.app import NumPyClientApp
from flwr_regs.flower.client import RegClient
from flwr_regs.flower.node import NodeState, copied
from flwr_regs.flower.simulated_clients import Clients
from flwr_regs.server.exchange.network import Replies, Request
from flwr_regs.wire import keys
from flwr_regs.wire.records import from_record, to_record

OVERRIDES = ("fit", "evaluate", "get_properties", "to_client", "task", "identity")
"""What a client that trains as every RegClient does has from RegClient."""


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
        ends = min(states, default=None), max(states, default=None)
        if ends != (min(self.nodes), max(self.nodes)) or not {*self.nodes}.issuperset(states):
            first, last = ends
            count = 0 if first is None or last is None else last - first + 1
            raise ValueError(
                f"the checkpoint holds the state of {count} clients, but this grid has {len(self.nodes)}"
            )
        for node in {*self, *(node for node, state in states.items() if state)}:
            self[node].state = copied(states.get(node, RecordDict()))


@dataclass
class LocalClients:
    """A :class:`flwr_regs.cohort.cohort_network.Host`.

    Attributes
    ----------
    contexts : Contexts
    source : Clients or NumPyClientApp
        Whose `client_fn` makes each client.
    who : Identity
        The strategy's method, for `Clients`.
    ask : callable
        Asks clients by messages.
    refused : callable
        Told why a client is not served without messages.
    asking : bool
        Whether messages are on their way.
    """

    contexts: Contexts
    source: Clients | NumPyClientApp
    who: Identity
    ask: Callable[[Request], Replies]
    refused: Callable[[str], None]
    asking: bool = False
    _nodes: dict[int, Node] = field(default_factory=dict)
    _clients: dict[int, Any] = field(default_factory=dict)

    def node_ids(self) -> Collection[int]:
        """Return the nodes' ids."""
        return self.contexts.nodes

    def client(self, pid: int, kind: str, config: Mapping[str, Any]) -> Client | None:
        """Return a client; None if messages alone reach it."""
        source = self.source
        if isinstance(source, Clients):
            if pid not in self._clients:
                self._clients[pid] = source.client(pid, self.who)
            if source.step_budgets is not None:
                number = config.get(keys.ROUND_KEY, 0)
                self._clients[pid].step_budget = source.step_budget(pid, number)
            return self._clients[pid]  # type: ignore[no-any-return]
        if kind == keys.LABELS:  # only the client says whether it shares them
            return None
        made, why = self._made(source, pid, kind, config), ""
        if not isinstance(made, RegClient):
            why = f"{type(made).__name__} is no client of this package"
        elif overridden := made.overrides(*OVERRIDES):
            why = f"{type(made).__name__} has a {overridden[0]} of its own"
        if why and kind in ("train", keys.PROBE):
            self.refused(why)
        return None if why else made

    def prepare(self, client: Client, memory: Memory) -> None:
        """Let a client that remembers nothing begin with the entries that its model was given with."""
        if memory or not isinstance(self.source, Clients):
            return
        if any(issubclass(t, Withholds) for t in self.who.terms):
            client.model.load_state_dict(self.source.initial())

    def lent(self) -> AbstractContextManager[None]:
        """Let clients train in a model that they share; it is as before afterwards."""
        return self.source.lent() if isinstance(self.source, Clients) else nullcontext()

    def _made(self, app: NumPyClientApp, pid: int, kind: str, config: Mapping[str, Any]) -> Any:
        """Return what `client_fn` makes; once, if the app does not say otherwise."""
        if pid in self._clients:
            return self._clients[pid]
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

    def node(self, pid: int, config: Mapping[str, Any]) -> Node:
        """Return what was kept for a client before."""
        training = config.get(keys.METHOD_KEY), config.get(keys.START_KEY)
        node = self._nodes.get(pid)
        if node is None or node.training != training:
            state = NodeState(self.contexts.of_partition(pid), config)
            kept = None if state.model is None else from_record(state.model)
            node = self._nodes[pid] = Node(training, state.memory, kept)
        return node

    def by_messages(self, request: Request) -> Replies:
        """Return the replies of clients that messages alone reach."""
        self.asking = True
        try:
            return self.ask(request)  # the grid settles before
        finally:
            self.asking = False

    def settle(self) -> None:
        """Put what the clients keep into their contexts."""
        records: dict[int, ArrayRecord] = {}
        for pid, node in self._nodes.items():
            method, start = node.training
            entries = {keys.METHOD_KEY: method, keys.START_KEY: start}
            state = NodeState(self.contexts.of_partition(pid), entries)
            state.remember(written(node.memory))
            if (model := node.model) is not None:
                if id(model) not in records:
                    records[id(model)] = to_record(model)
                state.keep_model(records[id(model)])

    def forget(self) -> None:
        """Read what the clients keep from their contexts again."""
        self._nodes.clear()
