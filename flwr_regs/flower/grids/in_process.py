"""A Grid without Ray and without servers: the ClientApp is called here, or in worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flwr_regs.flower.app import NumPyClientApp, RegClientApp
from flwr_regs.flower.compat import Run, identify, numbered
from flwr_regs.flower.grids.contexts import Contexts
from flwr_regs.flower.grids.workers import Workers, served
from flwr_regs.wire.records import identity

FIRST = 1000
"""The node id of the first client."""


class InProcessGrid(Grid):
    """Serve `num_clients` clients from one ClientApp, in this process or by some worker processes.

    Parameters
    ----------
    client_app : ClientApp
        For example ``flwr_regs.client_app(client_fn)``.
    num_clients : int
        Clients get ``node_config`` ``partition-id`` 0 … num_clients − 1 and ``num-partitions``.
    run_config : mapping, optional
        ``context.run_config`` of every client.
    workers : int
        1: one message after another, in this process. More: that many processes, several clients at once.

    Raises
    ------
    ValueError
        `num_clients` or `workers` is less than 1.
    TypeError
        The app cannot be sent to a worker.

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

    Examples
    --------
    ``FedAvg(seed=7).start(grid=InProcessGrid(app, 10), initial_arrays=arrays, ...)``
    """

    replies_at_once = True  # no reply comes after the push

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: Mapping[str, Any] | None = None,
        *,
        workers: int = 1,
    ) -> None:
        if num_clients < 1:
            raise ValueError(f"num_clients must be at least 1, not {num_clients}")
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            raise ValueError(f"workers must be a whole number of at least 1, not {workers!r}")
        identify()
        self._workers = Workers(client_app, workers) if workers > 1 else None
        self._run = Run.create_empty(1)
        self._app = client_app
        self._replies: dict[str, Message] = {}
        self._contexts = Contexts(range(FIRST, FIRST + num_clients), run_config or {})

    def set_run(self, run: Run) -> None:
        """Set the run; Grid's interface."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run; Grid's interface."""
        return self._run

    def snapshot(self) -> dict[int, RecordDict]:
        """Return the clients' ``Context.state`` by node id; later rounds do not change it.

        A client that is not in it, but between others, holds nothing.
        """
        return self._contexts.snapshot()

    def restore(self, states: Mapping[int, RecordDict]) -> None:
        """Continue from a snapshot; raise ValueError if it is of other clients."""
        self._contexts.restore(states)

    def create_message(
        self, content: Any, message_type: str, dst_node_id: int, group_id: str, ttl: Any = None
    ) -> Message:
        """Build a message; Grid's interface."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the clients' node ids."""
        return list(self._contexts)

    def identities(self, nodes: Iterable[int]) -> dict[int, dict[str, Any]] | None:
        """Return what these nodes would reply if they were asked for their partitions.

        None if that is not known: another app may reply otherwise, or not at all.
        """
        if type(self._app) not in (NumPyClientApp, RegClientApp):
            return None
        return {node: identity(self._contexts.node_config(node)) for node in nodes}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients; their replies wait for `pull_messages`."""
        if self._workers is None:
            return [self._serve(m, self._app) for m in map(numbered, messages)]
        sent = [numbered(message) for message in messages]
        replies = self._workers.run(sent, [self._contexts[m.metadata.dst_node_id] for m in sent])
        return list(map(self._keep, sent, replies))

    def _serve(self, message: Message, app: ClientApp) -> str:
        """Run the client that a message is for, and keep its reply; return the message's id."""
        sent, context = message.content, self._contexts[message.metadata.dst_node_id]
        message.content = RecordDict({k: r.copy() for k, r in sent.items()})
        try:
            return self._keep(message, served(app, message, context))
        finally:
            message.content = sent

    def _keep(self, message: Message, reply: Message) -> str:
        self._replies[message.metadata.message_id] = reply
        return message.metadata.message_id

    def close(self) -> None:
        """End the workers; a later message starts new ones."""
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
