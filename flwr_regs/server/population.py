"""Who is there: partition ids, node ids, and (if asked) label counts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from logging import INFO, WARNING
from typing import cast

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from flwr_regs.server.cohorts import class_covering_cohort, uniform_cohort
from flwr_regs.server.replies import sort_replies, told
from flwr_regs.wire import keys


class PopulationError(RuntimeError):
    """The clients that came are not the population that training needs."""


class Population:
    """The clients of a run, by partition id.

    Flower's node ids are drawn at random for each run and come in no order, so cohorts are drawn
    over partition ids, which each node is asked for once. A node without one is known by its node
    id, which makes cohorts repeatable only while the node keeps that id.

    Parameters
    ----------
    minimum : int
        Fewest nodes to wait for (Flower's ``min_available_nodes``).
    expected : int or None
        Nodes to wait for; None: as many as the nodes' own ``num-partitions`` says.
    timeout : float
        Seconds to wait before round 1.
    """

    def __init__(self, minimum: int, expected: int | None, timeout: float) -> None:
        if expected is not None and expected < 1:
            raise ValueError(f"population must be at least 1, not {expected}")
        self._minimum = minimum
        self._given = expected
        self._timeout = timeout
        self.forget()

    def forget(self) -> None:
        """Ask everyone again, and wait for all of them again."""
        self._node_of: dict[int, int] = {}
        self._asked: set[int] = set()
        self._here: list[int] = []
        self._expected: int | None = self._given
        self._complete = False
        self._labels: dict[int, list[int]] = {}
        self._classes: set[int] = set()

    @property
    def here(self) -> list[int]:
        """The partition ids that were there at the last :meth:`refresh`, sorted."""
        return self._here

    def node_id(self, pid: int) -> int:
        """Return the node that serves a partition id."""
        return self._node_of[pid]

    def refresh(self, grid: Grid) -> list[int]:
        """Return the partition ids of the nodes that are there now, sorted.

        Waits for the whole population the first time; later a node that left is left out, and a new
        one is asked who it is.

        Raises
        ------
        PopulationError
            Too few nodes came in time, a node does not answer, or two serve one partition.
        """
        deadline = time.monotonic() + self._timeout
        told = time.monotonic()
        while True:
            present = set(grid.get_node_ids())
            self._asked &= present  # a node that comes back is asked again
            self._identify(grid, sorted(present - self._asked), present)
            self._here = sorted(p for p, n in self._node_of.items() if n in present)
            need = max(self._minimum, 1 if self._complete else self._expected or 1)
            if len(self._here) >= need:
                self._complete = True
                return self._here
            if time.monotonic() > deadline:
                raise PopulationError(
                    f"{len(self._here)} of {need} clients came within {self._timeout:.0f} s"
                    f" (partitions {self._here}); start the others, or lower min_available_nodes "
                    "or population"
                )
            if time.monotonic() - told > 10:
                log(INFO, "waiting for clients: %d of %d are here", len(self._here), need)
                told = time.monotonic()
            time.sleep(0.1)

    def nodes(self, pids: Iterable[int]) -> dict[int, int]:
        """Return node id -> partition id for some of the clients."""
        return {self._node_of[pid]: pid for pid in pids}

    def label_counts(self, grid: Grid) -> tuple[dict[int, list[int]], set[int]]:
        """Return (each present client's examples of each class, the classes that can be covered).

        Every client is asked once. The classes are those from 0 to the largest one that the first
        population held; one that left with the clients who held it is left out, with a warning.

        Raises PopulationError before training if a client does not tell: it must have agreed to. One
        that joins later and does not tell is left out, with a warning.
        """
        new = [p for p in self._here if p not in self._labels]
        replies = grid.send_and_receive(
            [Message(RecordDict(), self._node_of[p], keys.LABELS) for p in new],
            timeout=min(self._timeout, 60.0),
        )
        answered, failures = sort_replies(replies, {self._node_of[p]: p for p in new})
        first = not self._labels
        for pid, reply in answered.items():
            config = reply.content.config_records.get(keys.CONFIG, ConfigRecord())
            if keys.LABELS_KEY in config:
                self._labels[pid] = json.loads(cast(str, config[keys.LABELS_KEY]))
            else:
                failures[pid] = "it does not tell its label counts (a client of another library?)"
        if failures:
            why = f"class-covering cohorts need label counts: {told(failures)}"
            if first:
                raise PopulationError(why)
            log(WARNING, "%s; going on without them", why)
            self._labels |= {pid: [] for pid in failures}
        counts = {p: self._labels[p] for p in self._here if self._labels[p]}
        held = {i for c in counts.values() for i, n in enumerate(c) if n > 0}
        if first:
            self._classes = set(range(max(held, default=-1) + 1))
            return counts, self._classes
        if gone := self._classes - held:
            log(WARNING, "no client that is left holds the classes %s", sorted(gone))
        return counts, self._classes & held

    def cohort(
        self, members: list[int], key: tuple[int, int], size: int, kind: str, grid: Grid
    ) -> list[int]:
        """Return `size` of the `members` by `key` alone; `kind` is "uniform" or "class-covering"."""
        if kind == "uniform":
            return uniform_cohort(members, key, size)
        counts, classes = self.label_counts(grid)
        left = {p: c for p, c in counts.items() if p in members}
        if len(left) < len(counts):  # clients were dropped
            held = {i for c in left.values() for i, n in enumerate(c) if n > 0}
            if classes - held:
                log(WARNING, "only dropped clients hold the classes %s", sorted(classes - held))
            classes = classes & held
        return class_covering_cohort(left, key, size, classes)

    def _identify(self, grid: Grid, nodes: list[int], present: set[int]) -> None:
        """Ask `nodes` who they are. Once training has begun, a node that cannot say is left out."""
        if not nodes:
            return
        replies = grid.send_and_receive(
            [Message(RecordDict(), n, keys.IDENTIFY) for n in nodes],
            timeout=min(self._timeout, 60.0),
        )
        answers = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if not reply.has_error():
                answers[node] = reply.content.config_records[keys.CONFIG]
            elif node in nodes:
                self._object(
                    f"node {node} does not answer who it is ({reply.error.reason}); build its "
                    "ClientApp with flwr_regs.client_app, or RegClientApp for a loop of your own"
                )
        if self._complete:
            self._asked |= set(nodes)  # a mute one would cost its timeout again every round
        fresh: dict[int, int] = {}
        for node in sorted(answers):
            answer = answers[node]
            pid = int(answer.get("partition-id", node))  # type: ignore[arg-type]
            if "partition-id" not in answer:
                log(WARNING, "node %d has no partition-id; its node id stands in for it", node)
            other = fresh.get(pid, self._node_of.get(pid))
            if other is not None and other in present:
                self._asked.discard(node)  # a restarted node's former self may still be listed
                self._object(
                    f"nodes {other} and {node} both serve partition-id {pid}; "
                    "give each SuperNode a --node-config partition-id of its own"
                )
                continue
            if pid in self._node_of:
                log(INFO, "partition %d is now served by node %d (restarted)", pid, node)
            fresh[pid] = node
            self._asked.add(node)
            if self._given is None and "num-partitions" in answer:
                self._expected = int(answer["num-partitions"])  # type: ignore[arg-type]
        self._node_of |= fresh

    def _object(self, why: str) -> None:
        """Refuse to begin; once training has begun, log it and go on without the node."""
        if not self._complete:
            raise PopulationError(why)
        log(WARNING, "%s; going on without it", why)
