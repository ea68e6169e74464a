"""The server's network over a Flower grid: sends parcels as messages, and returns replies as parcels."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import zip_longest
from logging import INFO, WARNING
from threading import Thread
from typing import Any, Generic, TypeVar

from flwr.app import Error, Message
from flwr.common import log
from flwr.serverapp import Grid

from flwr_regs.flower.compat import FLOWER, ErrorCode, in_simulation
from flwr_regs.server.exchange.network import Course, Network, Replies, Request
from flwr_regs.server.failures import read_each
from flwr_regs.wire import keys
from flwr_regs.wire.errors import described
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.records import Writer, parcel_of
from flwr_regs.wire.text import one_line

T = TypeVar("T")
PATIENCE, LEAST = 1.0, 0.01
"""Seconds that slow replies may hold up the others: all of them together, and each of them at least."""
SLOW = 10.0
"""Seconds after which the log says who has not reported its partition yet."""
AT_ONCE = 16
"""Pulls that begin together: most of their time is the network's."""
DEAD = ("ray.exceptions.ActorDiedError", "ray.exceptions.OutOfMemoryError")
"""What Flower's simulation says of a client whose Ray actor is dead; it keeps that actor for others."""
LEFT_OUT = "the strategy's own configure_train or configure_evaluate sent it no message"
OTHERS = "nodes %s run Flower %s, and this server Flower %s: install one version on all machines"


def ours_alone(grid: Grid) -> bool:
    """Whether a grid's messages pass through nothing that is not of this package, such as a subclass."""
    ways = grid.push_messages, grid.pull_messages, grid.get_node_ids
    return all(str(getattr(way, "__module__", "")).startswith("flwr_regs.flower.") for way in ways)


class Pull(Thread):
    """A pull of one reply: Flower waits for minutes for one that a lost node has begun to send."""

    def __init__(self, grid: Grid, key: str) -> None:
        super().__init__(daemon=True)
        self._grid, self._key = grid, key
        self.replies: list[Message] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """Pull."""
        try:
            self.replies = list(self._grid.pull_messages([self._key]))
        except Exception as error:
            self.error = error


class GridNetwork:
    """A :class:`flwr_regs.server.exchange.network.Network` over a grid.

    Parameters
    ----------
    grid : Grid
    timeout : float or None
        Seconds to wait for replies, unless a call sets a smaller limit. None: without end.

    Raises
    ------
    RuntimeError
        In a simulation, when one of Ray's actors has died.
    """

    def __init__(self, grid: Grid, timeout: float | None = 3600.0) -> None:
        self._grid, self._timeout = grid, timeout
        self._simulated = in_simulation(grid)
        self._waiting: dict[str, tuple[Message, Request, float]] = {}  # message id -> sent when
        self._pulls: dict[str, Pull] = {}  # that have not ended
        self.at_once: bool = getattr(grid, "replies_at_once", False)

    def nodes(self) -> list[int]:
        """Return the ids of the nodes that are connected now."""
        return list(self._grid.get_node_ids())

    def ask(self, request: Request, timeout: float | None = None) -> Replies:
        """Send a request and wait for its replies, at most `timeout` seconds."""
        if request.kind == keys.IDENTIFY and (known := self._known(request)) is not None:
            return known
        messages = messages_of([request])
        (replies,) = replies_to([request], messages, self.exchange(messages, timeout))
        if request.kind == keys.IDENTIFY:
            _name_other_versions(replies)
        return replies

    def exchange(self, messages: Sequence[Message], timeout: float | None = None) -> list[Message]:
        """Push messages; pull their replies until all have come, or the time is over.

        Only the grid's ``push_messages`` and ``pull_messages`` are used. A grid that has all replies
        when a push returns says so with an attribute ``replies_at_once = True``.

        Where nodes are slow to report their partition, the log says once how many have not.
        """
        if not messages:
            return []
        began, limit = time.monotonic(), self._limit(timeout)
        # Flower's grid gives None for a message that it could not send: nobody will reply to it.
        pushed = zip(self._grid.push_messages(messages), messages, strict=False)
        waiting = {i: message for i, message in pushed if i}
        if self.at_once:
            return list(self._grid.pull_messages(list(waiting)))
        replies = list[Message]()
        identifies = messages[0].metadata.message_type == keys.IDENTIFY
        while True:
            for key, came in self._pull(waiting).items():
                del waiting[key]
                replies += came
            spent = time.monotonic() - began
            if not waiting or spent >= limit:
                for key in waiting:
                    self._pulls.pop(key, None)
                return replies
            if identifies and spent > SLOW:
                identifies = False  # it is said once
                late = f"{len(waiting)} of {len(messages)} connected nodes have not reported their"
                said = "%s partition after %.0f s; at most %.0f s more"
                log(INFO, said, late, spent, limit - spent)
            time.sleep(min(max(0.01, 0.1 * spent), 1.0, limit - spent))

    def send(self, request: Request) -> None:
        """Push a request, and do not wait: `receive` returns the replies."""
        if not (messages := messages_of([request])):
            return
        ids = list(self._grid.push_messages(messages))
        for pid, message, sent in zip_longest(request.parcels, messages, ids):
            one = Request(request.kind, {pid: request.parcels[pid]}, {pid: request.nodes[pid]})
            began = time.monotonic() if sent else -math.inf  # not sent: nobody will reply
            self._waiting[sent or f"unsent-{pid}"] = message, one, began

    def receive(self, timeout: float | None = None) -> Replies:
        """Wait for the next replies to what was sent; name clients that are silent for `timeout` s."""
        began, limit = time.monotonic(), self._limit(timeout)
        while True:
            by_id = {i: message for i, (message, _, since) in self._waiting.items() if since > 0}
            came = self._pull(by_id)
            late = time.monotonic() - limit
            ended = [i for i, (_, _, at) in self._waiting.items() if i in came or at <= late]
            if ended:
                break
            time.sleep(min(max(0.01, 0.1 * (time.monotonic() - began)), 1.0))
        replies = Replies({}, {}, [])
        for i in ended:  # each by itself: a lost node's error is no other client's
            message, request, _ = self._waiting.pop(i)
            self._pulls.pop(i, None)
            (one,) = replies_to([request], [message], came.get(i, []))
            silent = [*replies.silent, *one.silent]
            came_now, failures = {**replies.came, **one.came}, {**replies.failures, **one.failures}
            replies = Replies(came_now, failures, silent)
        return replies

    def _limit(self, timeout: float | None) -> float:
        return min((t for t in (self._timeout, timeout) if t is not None), default=math.inf)

    def _known(self, request: Request) -> Replies | None:
        """Return what nodes would say of their partitions, where the grid knows it; None elsewhere.

        100,000 messages take some ten seconds.
        """
        grid: Any = self._grid
        nodes = request.nodes
        # a partition id that is no number, say, raises: asked, its node says so
        with suppress(Exception):
            if ours_alone(grid) and (said := grid.identities(nodes.values())) is not None:
                return Replies({pid: Parcel(config=said[node]) for pid, node in nodes.items()})
        return None

    def _pull(self, waiting: Mapping[str, Message]) -> dict[str, list[Message]]:
        """Return the replies that have come, by the id of the message that each was pulled for.

        Each is pulled by itself: Flower raises for all of a pull if it cannot read one of them, and the
        SuperLink has forgotten the others by then. One that it cannot read becomes an error of its client.
        Raises if the link is down: then the grid cannot name its nodes either.
        """
        came: dict[str, list[Message]] = {}
        end, each = time.monotonic() + PATIENCE, list(waiting.items())
        for some in (each[first : first + AT_ONCE] for first in range(0, len(each), AT_ONCE)):
            for key in [key for key, _ in some if key not in self._pulls]:
                self._pulls[key] = Pull(self._grid, key)
                self._pulls[key].start()
            for key, message in some:
                pull = self._pulls[key]
                pull.join(max(end - time.monotonic(), LEAST))
                if pull.is_alive():
                    continue
                del self._pulls[key]
                if pull.error is not None:
                    try:
                        self.nodes()
                    except Exception:
                        self._pulls.clear()  # the others have failed as well
                        raise pull.error from None
                    why = f"its reply cannot be read: {described(pull.error)}"
                    came[key] = [_failure(message, why)]
                elif pull.replies:
                    if self._simulated:
                        _refuse_dead_actors(pull.replies)
                    came[key] = [_own(message, reply) for reply in pull.replies]
        return came


def _failure(message: Message, why: str) -> Message:
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, why), reply_to=message)


def _refuse_dead_actors(replies: Iterable[Message]) -> None:
    errors = [reply.error.reason or "" for reply in replies if reply.has_error()]
    if any(name in error.partition(">")[0] for error in errors for name in DEAD):
        raise RuntimeError(
            "one of Ray's actors died, perhaps for want of memory, and clients of this simulation would "
            "go on failing: begin a new simulation; one with fewer clients at a time needs less memory"
        )


def _own(message: Message, reply: Message) -> Message:
    """Return the reply that came to a message; an error in its place if it names another message."""
    sent, came = message.metadata, reply.metadata
    asked = sent.message_id, sent.dst_node_id, sent.message_type
    named = came.reply_to_message_id, came.src_node_id, came.message_type
    if reply.has_error() or not sent.message_id or named == asked:
        return reply
    return _failure(message, "its reply names another message")


class Paused(Generic[T]):
    """A course that waits for the replies to its `requests`; none, which then ends with None."""

    def __init__(self, course: Course[T] | None = None) -> None:
        self._course = course
        self.requests = () if course is None else next(course)

    def __bool__(self) -> bool:
        return self._course is not None

    @cached_property
    def messages(self) -> list[Message]:
        """The requests as messages."""
        return messages_of(self.requests)

    def note_sent(self, messages: Iterable[Message]) -> None:
        """Note which messages a user's code sends in place of these; further ones are its own."""
        kinds = {request.kind for request in self.requests}  # a user's may be train.my-kind
        types = ((m.metadata.message_type, m) for m in messages)
        self.messages = [m for kind, m in types if kinds & {kind, kind.split(".")[0]}]

    def over(self, network: Network, timeout: float | None) -> T | None:
        """Run the course to its end on a network."""
        return self._ended([network.ask(request, timeout) for request in self.requests])

    def answered(self, replies: Iterable[Message]) -> T | None:
        """Run the course to its end with the replies to its messages; RuntimeError without a course."""
        if self._course is None and list(replies):
            raise RuntimeError("replies came without a configure_train or configure_evaluate")
        return self._ended(replies_to(self.requests, self.messages, replies))

    def _ended(self, replies: Sequence[Replies]) -> T | None:
        if self._course is None:
            return None
        try:
            self._course.send(replies)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]
        raise RuntimeError("a course pauses only once")


def messages_of(requests: Iterable[Request]) -> list[Message]:
    """Return the messages of requests; a record that goes to many clients is serialised once."""
    writer = Writer()
    return [
        Message(writer.content_of(parcel), request.nodes[pid], request.kind)
        for request in requests
        for pid, parcel in request.parcels.items()
    ]


def _name_other_versions(replies: Replies) -> None:
    """Warn of nodes that run another minor version of Flower than this server."""
    said = {n: str(p.config.get(keys.FLOWER_KEY, FLOWER))[:20] for n, p in replies.came.items()}
    for version in dict.fromkeys(said.values()):
        if version.split(".")[:2] != FLOWER.split(".")[:2]:
            nodes = [node for node, its in said.items() if its == version]
            log(WARNING, OTHERS, nodes, one_line(version), FLOWER)


def replies_to(
    requests: Iterable[Request], messages: Iterable[Message], replies: Iterable[Message]
) -> list[Replies]:
    """Return, by partition id, those of the `replies` that belong to each request of the `messages`.

    A reply to another message, such as one of an earlier round, is none; messages have ids once a grid has
    sent them. Flower reports a lost node as an error from node 1 to the node's message, and says nothing of
    a node that missed the timeout. So a client without a reply counts as failed. One without a message is
    named as left out.
    """
    messages = list(messages)
    reached = {message.metadata.dst_node_id for message in messages}
    node_of = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    node_of.pop("", None)
    came_all, answered = list(replies), list[Replies]()
    for request in requests:
        nodes = request.nodes
        client_of = {node: pid for pid, node in nodes.items()}
        contents, failures = dict[int, Message](), dict[int, str]()
        stray: list[tuple[int | None, str]] = []  # of which node, if that is known; what came
        for reply in came_all:
            if (reply.metadata.message_type == keys.PREFETCH) != (request.kind == keys.PREFETCH):
                continue
            node = reply.metadata.src_node_id
            asked = node_of.get(reply.metadata.reply_to_message_id)
            pid = client_of.get(node)
            if reply.has_error():
                why = one_line(str(reply.error.reason))
                if (code := reply.error.code) != ErrorCode.CLIENT_APP_RAISED_EXCEPTION:
                    why = f"error code {code}: {why}"
                if pid is None or (node_of and asked is None):
                    stray.append((asked, why))
                else:
                    failures[pid] = why
            elif node_of and asked is None:
                stray.append((node, "a reply to another message came"))
            elif pid is not None:
                contents[pid] = reply
        came, unread = read_each(contents, lambda _, reply: parcel_of(reply.content))
        failures |= unread
        unsent = [p for p in request.parcels if nodes[p] not in reached and p not in came]
        failures |= dict.fromkeys(unsent, LEFT_OUT)
        silent = [pid for pid in request.parcels if pid not in came and pid not in failures]
        for pid in silent:
            told = [why for node, why in stray if node in (nodes[pid], None)]
            failures[pid] = "no reply" + (f" ({one_line('; '.join(told))})" if told else " in time")
        # in the order of the request: that of arrival differs from run to run
        came = {p: came[p] for p in request.parcels if p in came}
        failures = {p: failures[p] for p in request.parcels if p in failures and p not in came}
        answered.append(Replies(came, failures, silent, unsent))
    return answered
