"""The clients that are connected: partition ids, node ids, and label counts where they are needed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

from flwr_regs.server.client_metrics import usable
from flwr_regs.server.exchange.network import Network, Replies, Request
from flwr_regs.server.failures import name_failures, read_each
from flwr_regs.server.population.cohorts import CoverageError, class_covering_cohort, further
from flwr_regs.server.round import Snapshots
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import ProtocolError
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.text import quoted, read_json

LOG = logging.getLogger("flwr")
LONGEST = 60.0
"""Seconds that one query may take."""
MOST_PARTITIONS = 2**31
"""A node's partition-id is below this, and its num-partitions at most this."""
MOST_CLASSES = 10_000
MOST_MISSING = 1000
"""Missing clients that are named one by one."""
TOO_FEW = "start the others, or lower min_available_nodes or population"
NO_REPORT = "build its ClientApp with flwr_regs.client_app, or RegClientApp for a loop of your own"


class PopulationError(RuntimeError):
    """The clients that came are not the population that training needs."""


class Population(Snapshots):
    """The clients of a run, by partition id.

    Flower draws new node ids for each run, so cohorts are drawn over partition ids, which nodes report. A
    node without a partition id is known by its node id modulo 2**63: cohorts then repeat only while it
    keeps that id.

    Parameters
    ----------
    minimum : int
        Fewest clients to train with (Flower's ``min_available_nodes``).
    expected : int or None
        Clients to wait for; None: the nodes' own ``num-partitions``.
    timeout : float
        Seconds to wait for them before round 1.

    Attributes
    ----------
    refused : dict of int to str
        Node -> why it does not take part, of those connected at the last :meth:`refresh`.
    connected : list of int
        The partition ids that were connected then, sorted.
    """

    kept = ("nodes", "totals", "expected", "connected", "labels", "uncounted", "classes")

    def __init__(self, minimum: int, expected: int | None, timeout: float) -> None:
        self._minimum = minimum
        self._given = expected
        self._timeout = timeout
        self.nodes: dict[int, int] = {}
        self._known: set[int] = set()  # nodes that reported their partition
        self.totals: dict[int, int] = {}  # node -> the num-partitions that it reported
        self.refused: dict[int, str] = {}
        self._retry: dict[int, tuple[float, float]] = {}  # node -> (time to ask again, pause)
        self.connected: list[int] = []
        self.expected = expected
        self._complete = False
        self.labels: dict[int, list[int]] = {}
        self.uncounted: dict[int, str] = {}  # client -> why its label counts are not known
        self.classes: set[int] = set()
        self._awaited: set[int] = set()  # clients that a resumed run waits for

    @property
    def size(self) -> int:
        """How many clients the run knows: those expected, or those that ever came, if they are more."""
        return max(self.expected or 0, len(self.nodes))

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot; the first refresh waits for the clients that were connected."""
        super().restore(state)
        self._awaited = set(self.connected)

    def refresh(self, network: Network) -> list[int]:
        """Return the partition ids of the nodes that are connected now, sorted.

        The first call waits for the whole population. When the time is over, it goes on with the clients
        that came, if they are at least `minimum`, and names the missing ones. Later calls leave out nodes
        that left, and ask new nodes for their partitions. Nodes without a reply are asked again later.
        A node that does not report its partition, or reports one that another node serves, is refused:
        the others go on without it, and do not wait for it.

        Raises
        ------
        PopulationError
            Fewer than `minimum` clients came in time, or could take part when all expected ones were there.
        """
        logged = began = time.monotonic()
        deadline = began + self._timeout
        while True:
            present = set(network.nodes())
            self._known &= present  # a node that comes back is asked again
            self.refused = {n: why for n, why in self.refused.items() if n in present}
            self._identify(network, present, deadline)
            self.connected = came = sorted(p for p, n in self.nodes.items() if n in present)
            expected, least = self.expected or 1, max(self._minimum, 1)
            wanted = max(least, 1 if self._complete else expected - len(self.refused))
            if self._awaited:
                wanted = max(least, len(came) + len(self._awaited - set(came)))
            late = time.monotonic() > deadline
            if len(came) >= wanted or (late and len(came) >= least):
                if not self._complete and len(came) < max(wanted, expected):
                    without = f"{self.missing} after {time.monotonic() - began:.0f} s"
                    LOG.warning("training starts without %s", without)
                self._complete, self._awaited = True, set()
                return came
            all_here = len(came) + len(self.refused) >= max(least, expected)
            if late or (self.refused and all_here and not self._complete):
                raise PopulationError(self._too_few(came, wanted))
            if time.monotonic() - logged > 10:
                missing = f", {self.missing} missing" if self.missing else ""
                slow = f", {self._slow}" if self._slow else ""
                count = f"{len(came)} of {wanted} have come{missing}{slow}"
                logged = time.monotonic()
                LOG.info("waiting for clients: %s; at most %.0f s more", count, deadline - logged)
            time.sleep(0.1)

    def _too_few(self, came: list[int], wanted: int) -> str:
        """Return why training cannot begin or go on."""
        which = f" (partitions {came})" if len(came) <= MOST_MISSING else ""
        verb, hint = f"came within {self._timeout:.0f} s", TOO_FEW
        if self.refused:
            verb, hint = "can take part", name_failures(self.refused, "node", "id", "refused")
        elif slow := self._slow:
            hint = f"{slow}: with a larger wait_timeout they have more time; else {hint}"
        return f"{len(came)} of {wanted} clients {verb}{which}; {hint}"

    @property
    def _slow(self) -> str:
        """How many connected nodes have not reported their partition, in words; "" if none."""
        many = len(self._retry.keys() - self._known - self.refused.keys())
        return f"{many} connected without a report of their partition" if many else ""

    @property
    def missing(self) -> str:
        """The missing clients: partitions by number if these run from 0, else a count; "" if none is."""
        expected = self.expected or 0
        short = expected - len(self.connected)
        if short <= 0:
            return ""
        absent = set(range(expected)) - set(self.connected) if short <= MOST_MISSING else ()
        by_name = len(absent) == short
        return f"partitions {sorted(absent)}" if by_name else f"{short} of {expected} clients"

    @property
    def left_out(self) -> dict[int, str]:
        """Node -> why it does not take part: refused, or without label counts that cohorts need."""
        uncounted = {p: self.uncounted[p] for p in self.connected if p in self.uncounted}
        return {**self.refused, **{self.nodes[p]: why for p, why in uncounted.items()}}

    def request(self, kind: str, parcels: dict[int, Parcel]) -> Request:
        """Return a request to some of the clients, by partition id."""
        return Request(kind, parcels, {pid: self.nodes[pid] for pid in parcels})

    def covering_cohort(
        self, members: list[int], key: tuple[int, int], size: int, attempt: int, network: Network
    ) -> list[int]:
        """Return `size` of the `members`, by `key` and `attempt`, that together hold every class.

        The classes to cover are those that the first population held; one that no member holds is left out,
        with a warning.
        """
        first, purpose = not self.labels, further(attempt)
        self._ask_for_labels(network)
        told = [p for p in members if self.labels.get(p)]
        holds = {p: {i for i, n in enumerate(self.labels[p]) if n > 0} for p in told}
        holders = Counter(chain(*holds.values()))
        expected = set(range(max(holders, default=-1) + 1)) if first else self.classes
        if gone := expected - set(holders):
            LOG.warning("no client that takes part holds the classes %s", quoted(sorted(gone)))
        if first:
            self.classes = set(holders)
        classes = self.classes & set(holders)
        try:
            return class_covering_cohort(holds, key, size, classes, purpose)
        except CoverageError:  # a class that one client alone claims may be its invention
            shared = {i for i in classes if holders[i] > 1}
            cohort = class_covering_cohort(holds, key, size, shared, purpose)
            none = f"no cohort of {size} clients holds all {len(classes)} classes"
            LOG.warning("%s; those that one client alone holds do not count in this round", none)
            return cohort

    def _ask_for_labels(self, network: Network) -> None:
        """Ask each connected client once how many examples of each class it holds.

        A client that does not share its counts, which its operator must allow, is left out, with a warning.
        Raises PopulationError before training if fewer than `minimum` clients share them.
        """
        new = [p for p in self.connected if p not in self.labels]
        if not new:
            return
        request = self.request(keys.LABELS, {p: Parcel() for p in new})
        replies = network.ask(request, min(self._timeout, LONGEST))
        counted, failures = read_each(replies.came, _counts_of)
        failures |= replies.failures
        if failures:
            why = f"class-covering cohorts need label counts: {name_failures(failures)}"
            if not self.labels and len(counted) < max(self._minimum, 1):
                raise PopulationError(why)
            LOG.warning("%s; going on without them", why)
            self.uncounted |= failures
        self.labels |= counted | {pid: [] for pid in failures}

    def _identify(self, network: Network, present: set[int], deadline: float) -> None:
        """Ask nodes that are not known for their partitions; in training, leave out one without a reply.

        They have until the `deadline`, or a second where less is left.
        """
        began = time.monotonic()
        self._retry = {n: again for n, again in self._retry.items() if n in present}
        due = sorted(n for n in present - self._known if self._retry.get(n, (0,))[0] <= began)
        if not due:
            return
        request = Request(keys.IDENTIFY, dict.fromkeys(due, Parcel()), {n: n for n in due})
        replies = network.ask(request, min(self._timeout, LONGEST, max(deadline - began, 1.0)))
        before = dict(self.refused)
        self._place(replies, present)
        for node in [n for n in due if n not in self._known]:
            # In training the pause doubles: otherwise a silent node would cost time in every round.
            pause = 2 * max(self._retry.get(node, (0, 0.05))[1], time.monotonic() - began)
            if not self._complete or node in replies.came:
                pause = min(pause, LONGEST if self._complete else 1.0)
            self._retry[node] = (time.monotonic() + pause, pause)
            if node in replies.failures and node not in replies.silent:
                why = f"no report of its partition ({replies.failures[node]})"
                self.refused[node] = f"{why}; {NO_REPORT}"
        # each is asked again later, as it may restart
        if news := {n: why for n, why in self.refused.items() if before.get(n) != why}:
            LOG.warning("going on without %s", name_failures(news, "node", "id", "refused"))

    def _place(self, replies: Replies, present: set[int]) -> None:
        """Note the partitions that nodes report."""
        reported, failures = read_each(replies.came, _identity)
        self.refused |= failures
        placed: dict[int, int] = {}
        for node, (pid, total) in reported.items():
            if "partition-id" not in replies.came[node].config:
                LOG.warning("node %d has no partition-id; %d stands in for it", node, pid)
            other = placed.get(pid, self.nodes.get(pid, node))
            if other != node and other in present:
                both = f"nodes {other} and {node} both serve partition-id {pid}"
                self.refused[node] = f"{both}; give each --node-config a partition-id of its own"
                continue
            if self.nodes.get(pid, node) != node:
                LOG.info("partition %d is now served by node %d (restarted)", pid, node)
            placed[pid] = node
            self._known.add(node)
            self._retry.pop(node, None)
            self.refused.pop(node, None)
            if total is not None:
                self.totals[node] = total
        moved = {*placed.values()}  # one that comes back as another partition leaves the old one
        self.nodes = {p: n for p, n in self.nodes.items() if n not in moved} | placed
        if self._given is None and self.totals:  # one node's word does not count
            said = Counter(self.totals.get(n, 0) for n in self.nodes.values())
            self.expected = min(said, key=lambda total: (-said[total], total)) or None


def _identity(node: int, reply: Parcel) -> tuple[int, int | None]:
    """Return (the partition that a node serves, its num-partitions if it reports any).

    Raises ProtocolError unless both are whole numbers in range.
    """
    config = reply.config
    pid, total = config.get("partition-id", keys.stand_in(node)), config.get("num-partitions")
    if "partition-id" in config and not (type(pid) is int and 0 <= pid < MOST_PARTITIONS):
        wrong = f"the partition-id {quoted(pid, 40)}, expected one from 0 to {MOST_PARTITIONS - 1}"
    elif total is not None and not (type(total) is int and 0 < total <= MOST_PARTITIONS):
        wrong = f"num-partitions {quoted(total, 40)}, expected a positive whole number"
    else:
        return pid, total
    raise ProtocolError(f"node {node} reports {wrong}")


def _counts_of(pid: int, reply: Parcel) -> list[int]:
    """Return a client's label counts; raise ProtocolError without."""
    said: Any = reply.config.get(keys.LABELS_KEY)
    if said is None:
        raise ProtocolError("it does not send its label counts (a client of another library?)")
    try:
        counts: list[int] = read_json(said)
    except ValueError as error:
        raise ProtocolError(f"its label counts cannot be read: {error}") from error
    fits = isinstance(counts, list) and 0 < len(counts) <= MOST_CLASSES
    if not (fits and all(type(n) is int and usable(n) and n >= 0 for n in counts)):
        expected = f"at most {MOST_CLASSES} whole numbers, none of them negative"
        raise ProtocolError(f"its label counts are {quoted(counts, 80)}, expected {expected}")
    return counts
