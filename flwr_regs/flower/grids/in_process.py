"""A Grid without Ray and without servers: the ClientApp is called here, or in worker processes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import proxy

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_regs.client.member import Identity
from flwr_regs.flower.app import NumPyClientApp, RegClientApp
from flwr_regs.flower.compat import Run, identify, numbered
from flwr_regs.flower.grids.grid_network import GridNetwork, ours_alone
from flwr_regs.flower.grids.local_network import Contexts, LocalNetwork
from flwr_regs.flower.grids.workers import Workers, served
from flwr_regs.flower.node import copied
from flwr_regs.flower.simulated_clients import Clients
from flwr_regs.server.exchange.network import Network
from flwr_regs.term import COUNT, Term
from flwr_regs.wire.arrays import NDArrays
from flwr_regs.wire.config import check_train_config
from flwr_regs.wire.records import identity

FIRST = 1000
"""The node id of the first client."""


def _is_app(given: Any) -> bool:
    """Return whether it can be called with a message and a context, as a `client_fn` cannot."""
    try:
        inspect.signature(given).bind("message", "context")
    except ValueError:  # it says nothing of its arguments
        return True
    except TypeError:
        return False
    return not isinstance(given, type)


class InProcessGrid(Grid):
    """Serve clients in this process, or by some worker processes.

    Parameters
    ----------
    client_app : Clients or ClientApp
        Clients as data, :class:`flwr_regs.Clients`, whose method is the strategy's. Or an app, for example
        ``flwr_regs.client_app(client_fn)``.
    num_clients : int, optional
        How many clients an app has; `Clients` know their number. Each gets ``node_config``
        ``partition-id`` 0 … num_clients − 1 and ``num-partitions``.
    run_config : mapping, optional
        ``context.run_config`` of every client.
    workers : int
        1: one message after another, in this process. More: that many processes, several clients at once.

    Raises
    ------
    ValueError
        `num_clients` or `workers` is less than 1, or is not the number of the `Clients`.
    TypeError
        The app cannot be sent to a worker; neither an app nor `Clients`.

    Notes
    -----
    As on a real node, a client gets a copy of its message. If it raises, its reply is an error and its
    ``Context.state`` stays as it was. So does that of a client whose worker dies; another worker then
    starts.

    Workers give the bits of ``workers=1``, but for two things. What is drawn outside a round's own seed,
    such as a new model's private entries in `client_fn`, then depends on torch's seed, the client and the
    round. And the workers share torch's threads, on whose number its sums may depend:
    ``torch.set_num_threads(1)`` before the run excludes that.

    A worker has its own copy of what the app's modules hold, and a client may have another worker in
    each round. So what lasts must be in ``Context.state``: loaders with a generator of their own, or other
    objects that an app keeps from round to round, and changes of a context's configs, are not the same as
    with ``workers=1``. Of torch's settings a worker has the default dtype, the precision of products and
    whether algorithms are deterministic.

    Each worker imports the app's modules, once, which takes some seconds. So a script must start the
    training under ``if __name__ == "__main__":``. The workers end with the grid, with `close`, or with this
    process.

    `Clients` are served without messages, where the grid and the strategy are used as they are: with
    `workers`, or if one of their methods is overridden, messages go back and forth.

    Examples
    --------
    ``FedAvg(seed=7).start(grid=InProcessGrid(clients), initial_arrays=arrays, ...)``
    """

    replies_at_once = True  # no reply comes after the push

    def __init__(
        self,
        client_app: ClientApp | Clients,
        num_clients: int | None = None,
        run_config: Mapping[str, Any] | None = None,
        *,
        workers: int = 1,
    ) -> None:
        if not isinstance(client_app, Clients) and not _is_app(client_app):
            raise TypeError(f"expected Clients or client_app(client_fn), not {client_app!r:.80}")
        if isinstance(client_app, Clients):
            if num_clients not in (None, len(client_app)):
                raise ValueError(f"there are {len(client_app)} clients, not {num_clients}")
            num_clients = len(client_app)
        if num_clients is None:
            raise TypeError("an app does not say how many clients it has: give num_clients=")
        for name, number in (("num_clients", num_clients), ("workers", workers)):
            COUNT.check(type(self).__name__, name, number)
        identify()
        self._source = client_app
        who = Identity("FedAvg", (), "a client of Clients")
        self._app = client_app.app_of(who) if isinstance(client_app, Clients) else client_app
        self._workers = Workers(self._app, workers) if workers > 1 else None
        self._run = Run.create_empty(1)
        self._replies: dict[str, Message] = {}
        self._contexts = Contexts(range(FIRST, FIRST + num_clients), run_config or {})
        messages = GridNetwork(proxy(self))  # no cycle: workers end with the grid
        self._local = LocalNetwork(self._contexts, client_app, who, messages, workers)

    def set_run(self, run: Run) -> None:
        """Set the run; Grid's interface."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run; Grid's interface."""
        return self._run

    def check(
        self,
        evaluates: bool,
        initial_arrays: NDArrays,
        fewest: int = 0,
        train_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise ValueError for clients that are too few to begin, or `Clients` that would fail in round 1.

        A strategy's `start` calls it, with the `train_config` if that goes to the clients as it is.
        """
        if (number := len(self._contexts.nodes)) < fewest:
            raise ValueError(
                f"min_available_nodes is {fewest}, but the grid's clients are {number}: lower it"
            )
        if isinstance(self._source, Clients):
            self._source.check(evaluates, {n: a.shape for n, a in initial_arrays.items()})
            if train_config is not None and ours_alone(self):
                check_train_config(train_config)

    def serve(self, method: str, terms: Sequence[type[Term]]) -> None:
        """Let `Clients` be of a method from now on; a strategy calls it with its own."""
        who = Identity(method, tuple(t for t in terms if not t.server_only), f"a {method} client")
        if who == self._local.who:
            return
        self._local.serve(who)
        if isinstance(self._source, Clients):
            self._app = self._source.app_of(who)
            if self._workers is not None:
                self._workers.close()
                self._workers = Workers(self._app, self._workers.number)

    def network(self) -> Network | None:
        """Return a network without messages, of the method served; None where messages are needed."""
        plain = self._workers is None and isinstance(self._source, Clients)
        return self._local if plain and ours_alone(self) else None

    def snapshot(self) -> dict[int, RecordDict]:
        """Return the clients' ``Context.state`` by node id; later rounds do not change it.

        A client that is not in it, but between others, holds nothing.
        """
        self._local.settle()
        return self._contexts.snapshot()

    def restore(self, states: Mapping[int, RecordDict]) -> None:
        """Continue from a snapshot; raise ValueError if it is of other clients."""
        self._local.put_away()
        self._contexts.restore(states)

    def create_message(
        self, content: Any, message_type: str, dst_node_id: int, group_id: str, ttl: Any = None
    ) -> Message:
        """Build a message; Grid's interface."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the clients' node ids."""
        return list(self._contexts.nodes)

    def identities(self, nodes: Iterable[int]) -> dict[int, dict[str, Any]] | None:
        """Return what these nodes would reply if they were asked for their partitions.

        None if that is not known: another app may reply otherwise, or not at all.
        """
        if type(self._app) not in (NumPyClientApp, RegClientApp):
            return None
        return {node: identity(self._contexts.node_config(node)) for node in nodes}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients; their replies wait for `pull_messages`."""
        self._local.put_away()
        sent = [numbered(message) for message in messages]
        if self._workers is None:
            replies = [self._served(message) for message in sent]
        else:
            contexts = [self._contexts[m.metadata.dst_node_id] for m in sent]
            replies = self._workers.run(sent, contexts)
        ids = [message.metadata.message_id for message in sent]
        self._replies |= dict(zip(ids, replies, strict=True))
        return ids

    def _served(self, message: Message) -> Message:
        """Return the reply of the client that a message is for."""
        sent, context = message.content, self._contexts[message.metadata.dst_node_id]
        message.content = copied(sent)
        try:
            with self._local.lent():
                return served(self._app, message, context)
        finally:
            message.content = sent

    def close(self) -> None:
        """End the workers; a later message starts new ones."""
        self._local.close()
        if self._workers is not None:
            self._workers.close()

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages."""
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Run the clients and return their replies, in the order of `messages`."""
        return self.pull_messages(self.push_messages(messages))
