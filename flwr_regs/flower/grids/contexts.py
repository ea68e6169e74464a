"""The contexts of the clients that live in this process, each made when it is first used.

A simulation may have 100,000 clients and let 1,000 of them train: the others cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flwr.app import Context, RecordDict

from flwr_regs.flower.node import copied
from flwr_regs.wire.records import identity


class Contexts(Mapping[int, Context]):
    """Contexts by node id.

    Parameters
    ----------
    nodes : sequence of int
        The node ids; their places are the clients' partition ids.
    run_config : mapping
        ``context.run_config`` of every client.
    """

    def __init__(self, nodes: Sequence[int], run_config: Mapping[str, Any]) -> None:
        self._nodes = nodes
        self._run_config = dict(run_config)
        self._made: dict[int, Context] = {}

    def __getitem__(self, node: int) -> Context:
        if (context := self._made.get(node)) is None:
            context = self._made[node] = Context(
                run_id=1,
                node_id=node,
                node_config=self.node_config(node),
                state=RecordDict(),
                run_config=dict(self._run_config),
            )
        return context

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def of_partition(self, pid: int) -> Context:
        """Return the context of a client by its partition id."""
        return self[self._nodes[pid]]

    def node_config(self, node: int) -> dict[str, Any]:
        """Return a client's ``context.node_config``; KeyError if there is no such node."""
        if (made := self._made.get(node)) is not None:
            return made.node_config
        if node not in self._nodes:
            raise KeyError(node)
        return {"partition-id": self._nodes.index(node), "num-partitions": len(self._nodes)}

    def identities(self, nodes: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return what these nodes say of themselves."""
        return {node: identity(self.node_config(node)) for node in nodes}

    def snapshot(self) -> dict[int, RecordDict]:
        """Return copies of the states that hold something, by node id.

        The first and the last client are always there: they tell one population from another.
        """
        held = {node: context.state for node, context in self._made.items() if context.state}
        states = dict.fromkeys((self._nodes[0], self._nodes[-1]), RecordDict()) | held
        return {node: copied(states[node]) for node in sorted(states)}

    def restore(self, states: Mapping[int, RecordDict]) -> None:
        """Continue from a snapshot, which does not change; raise ValueError if it is of other clients."""
        ends = min(states, default=None), max(states, default=None)
        if ends != (min(self._nodes), max(self._nodes)) or not all(n in self for n in states):
            first, last = ends
            count = 0 if first is None or last is None else last - first + 1
            raise ValueError(
                f"the checkpoint holds the state of {count} clients, but this grid has {len(self)}"
            )
        copies = {node: copied(state) for node, state in states.items()}
        for node, context in self._made.items():
            context.state = copies.get(node, RecordDict())
        for node, state in copies.items():
            if state:
                self[node].state = state
