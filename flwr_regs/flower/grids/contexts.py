"""The contexts of the clients that live in this process, each made when it is first used.

A simulation may have 100,000 clients and let 1,000 of them train: the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Context, RecordDict

from flwr_regs.flower.node import copied


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
