"""The clients that are connected: partition ids, node ids, and label counts where they are needed."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable

from flwr_regs.server.cohorts import class_covering_cohort, further, uniform_cohort
from flwr_regs.server.network import Network, Replies, Request, name_failures
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel

LOG = logging.getLogger("flwr")
LONGEST = 60.0
"""Seconds that one query may take."""


class PopulationError(RuntimeError):
    """The clients that came are not the population that training needs."""


class Population:
    """The clients of a run, by partition id.

    Flower draws new node ids for each run, so cohorts are drawn over partition ids, which nodes report. A
    node without a partition id is known by its node id: cohorts then repeat only while it keeps that id.

    Parameters
    ----------
    minimum : int
        Fewest clients to train with (Flower's ``min_available_nodes``).
    expected : int or None
        Clients to wait for; None: the nodes' own ``num-partitions``.
    timeout : float
        Seconds to wait for them before round 1.
    """

    def __init__(self, minimum: int, expected: int | None, timeout: float) -> None:
        self._minimum = minimum
        self._given = expected
        self._timeout = timeout
        self._node_of: dict[int, int] = {}
        self._known: set[int] = set()  # nodes that reported their partition
        self._retry: dict[int, tuple[float, float]] = {}  # node -> (time to ask again, pause)
        self._connected: list[int] = []
        self._expected = expected
        self._complete = False
        self._labels: dict[int, list[int]] = {}
        self._classes: set[int] = set()

    @property
    def connected(self) -> list[int]:
        """The partition ids that were connected at the last :meth:`refresh`, sorted."""
        return self._connected

    @property
    def size(self) -> int:
        """How many clients the run knows: those expected, or those that ever came, if they are more."""
        return max(self._expected or 0, len(self._node_of))

    def refresh(self, network: Network) -> list[int]:
        """Return the partition ids of the nodes that are connected now, sorted.

        The first call waits for the whole population. When the time is over, it goes on with the clients
        that came, if they are at least `minimum`, and names the missing ones. Later calls leave out nodes
        that left, and ask new nodes for their partitions. Nodes without a reply are asked again later.

        Raises
        ------
        PopulationError
            Fewer than `minimum` clients came in time. Before round 1 also: a node does not report its
            partition, or two nodes serve the same one.
        """
        deadline = time.monotonic() + self._timeout
        logged = time.monotonic()
        while True:
            present = set(network.nodes())
            self._known &= present  # a node that comes back is asked again
            self._identify(network, sorted(present - self._known), present)
            self._connected = came = sorted(p for p, n in self._node_of.items() if n in present)
            wanted = max(self._minimum, 1 if self._complete else self._expected or 1)
            late = time.monotonic() > deadline
            if len(came) >= wanted or (late and len(came) >= max(self._minimum, 1)):
                if not self._complete and len(came) < wanted:
                    LOG.warning(
                        "training starts without %s after %.0f s", self.missing, self._timeout
                    )
                self._complete = True
                return came
            if late:
                raise PopulationError(
                    f"{len(came)} of {wanted} clients came within {self._timeout:.0f} s"
                    f" (partitions {came}); start the others, or lower min_available_nodes "
                    "or population"
                )
            if time.monotonic() - logged > 10:
                LOG.info("waiting for clients: %d of %d are connected", len(came), wanted)
                logged = time.monotonic()
            time.sleep(0.1)

    @property
    def missing(self) -> str:
        """The missing clients: partitions by number if these run from 0, else a count; "" if none is."""
        expected = self._expected or 0
        absent = sorted(set(range(expected)) - set(self._connected))
        short = expected - len(self._connected)
        if short <= 0:
            return ""
        return f"partitions {absent}" if len(absent) == short else f"{short} of {expected} clients"

    def request(self, kind: str, parcels: dict[int, Parcel]) -> Request:
        """Return a request to some of the clients, by partition id."""
        return Request(kind, parcels, {pid: self._node_of[pid] for pid in parcels})

    def cohort(
        self,
        members: list[int],
        key: tuple[int, int],
        size: int,
        kind: str,
        network: Network,
        attempt: int = 0,
    ) -> list[int]:
        """Return `size` of the `members` by `key` and `attempt`, "uniform" or "class-covering" (`kind`)."""
        purpose = further(attempt)
        if kind == "uniform":
            return uniform_cohort(members, key, size, purpose)
        counts, classes = self._label_counts(network)
        left = {p: c for p, c in counts.items() if p in members}
        if len(left) < len(counts):  # clients were dropped
            held = _held(left)
            if classes - held:
                LOG.warning("only dropped clients hold the classes %s", sorted(classes - held))
            classes = classes & held
        return class_covering_cohort(left, key, size, classes, purpose)

    def _label_counts(self, network: Network) -> tuple[dict[int, list[int]], set[int]]:
        """Return (each connected client's examples of each class, the classes that can be covered).

        Each client is asked once. The classes run from 0 to the largest one that the first population
        held. A class that no connected client holds is left out, with a warning.

        Raises PopulationError before training if a client does not share its counts, which its operator
        must allow. A client that joins later and does not share them is left out, with a warning.
        """
        new = [p for p in self._connected if p not in self._labels]
        request = self.request(keys.LABELS, {p: Parcel() for p in new})
        replies = network.ask(request, min(self._timeout, LONGEST)) if new else Replies({})
        failures = dict(replies.failures)
        first = not self._labels
        for pid, reply in replies.came.items():
            if keys.LABELS_KEY in reply.config:
                self._labels[pid] = json.loads(reply.config[keys.LABELS_KEY])
            else:
                failures[pid] = "it does not send its label counts (a client of another library?)"
        if failures:
            why = f"class-covering cohorts need label counts: {name_failures(failures)}"
            if first:
                raise PopulationError(why)
            LOG.warning("%s; going on without them", why)
            self._labels |= {pid: [] for pid in failures}
        counts = {p: self._labels[p] for p in self._connected if self._labels[p]}
        held = _held(counts)
        if first:
            self._classes = set(range(max(held, default=-1) + 1))
            return counts, self._classes
        if gone := self._classes - held:
            LOG.warning("no client that is left holds the classes %s", sorted(gone))
        return counts, self._classes & held

    def _identify(self, network: Network, nodes: Iterable[int], present: set[int]) -> None:
        """Ask `nodes` for their partitions; during training, leave out a node without a reply."""
        began = time.monotonic()
        self._retry = {n: again for n, again in self._retry.items() if n in present}
        due = [n for n in nodes if n not in self._retry or self._retry[n][0] <= began]
        if not due:
            return
        request = Request(keys.IDENTIFY, {n: Parcel() for n in due}, {n: n for n in due})
        replies = network.ask(request, min(self._timeout, LONGEST))
        for node in set(due) - set(replies.came):
            # In training the pause doubles: otherwise a silent node would cost time in every round.
            pause = 2 * max(self._retry.get(node, (0, 0.05))[1], time.monotonic() - began)
            pause = pause if self._complete else min(pause, 1.0)
            self._retry[node] = (time.monotonic() + pause, pause)
            if node not in replies.silent:
                self._refuse(
                    f"node {node} does not report its partition ({replies.failures[node]}); build its "
                    "ClientApp with flwr_regs.client_app, or RegClientApp for a loop of your own"
                )
        self._place(replies, present)

    def _place(self, replies: Replies, present: set[int]) -> None:
        """Note the partitions that nodes report."""
        placed: dict[int, int] = {}
        for node in sorted(replies.came):
            self._retry.pop(node, None)
            config = replies.came[node].config
            pid = int(config.get("partition-id", node))
            if "partition-id" not in config:
                LOG.warning("node %d has no partition-id; its node id stands in for it", node)
            other = placed.get(pid, self._node_of.get(pid, node))
            if other != node and other in present:
                # asked again later: after a restart, the old node may still be listed for a while
                self._refuse(
                    f"nodes {other} and {node} both serve partition-id {pid}; "
                    "give each SuperNode a --node-config partition-id of its own"
                )
                continue
            if pid in self._node_of:
                LOG.info("partition %d is now served by node %d (restarted)", pid, node)
            placed[pid] = node
            self._known.add(node)
            if self._given is None and "num-partitions" in config:
                self._expected = int(config["num-partitions"])
        self._node_of |= placed

    def _refuse(self, why: str) -> None:
        """Raise PopulationError; during training, only log `why` and go on without the node."""
        if not self._complete:
            raise PopulationError(why)
        LOG.warning("%s; going on without it", why)


def _held(counts: dict[int, list[int]]) -> set[int]:
    """Return the classes that at least one client holds."""
    return {i for c in counts.values() for i, n in enumerate(c) if n > 0}
