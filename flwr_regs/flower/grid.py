"""A Grid in one process: the ClientApp is called directly. No Ray, no servers.

For tests, notebooks and debugging. Only this file uses flwr's private names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from flwr_regs.flower.node import failure


class InProcessGrid(Grid):
    """Serve `num_clients` clients from one ClientApp in this process, one message after another.

    Parameters
    ----------
    client_app : ClientApp
        For example ``flwr_regs.client_app(client_fn)``.
    num_clients : int
        Clients get ``node_config`` ``partition-id`` 0 … num_clients − 1 and ``num-partitions``.
    run_config : mapping, optional
        ``context.run_config`` of every client.

    Notes
    -----
    As on a real node, a client gets a copy of its message. If it raises, its reply is an error and its
    ``Context.state`` stays as it was.

    Examples
    --------
    ``FedAvg(seed=7).start(grid=InProcessGrid(app, 10), initial_arrays=arrays, ...)``
    """

    replies_at_once = True  # no reply comes after the push

    def __init__(
        self, client_app: ClientApp, num_clients: int, run_config: Mapping[str, Any] | None = None
    ) -> None:
        if num_clients < 1:
            raise ValueError(f"num_clients must be at least 1, not {num_clients}")
        # Message() needs an identity, which flwr sets only in its own processes.
        if TaskIdentity._run_id is None:
            TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self._run = Run.create_empty(1)
        self._app = client_app
        self._replies: dict[str, Message] = {}
        self._contexts = {
            1000 + i: Context(
                run_id=1,
                node_id=1000 + i,
                node_config={"partition-id": i, "num-partitions": num_clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(num_clients)
        }

    def set_run(self, run: Run) -> None:
        """Set the run; Grid's interface."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run; Grid's interface."""
        return self._run

    def snapshot(self) -> dict[int, RecordDict]:
        """Return each client's ``Context.state`` by node id; later rounds do not change it."""
        return {
            node: RecordDict({k: r.copy() for k, r in context.state.items()})
            for node, context in self._contexts.items()
        }

    def restore(self, states: Mapping[int, RecordDict]) -> None:
        """Continue from a snapshot; raise ValueError if it is of other clients."""
        if states.keys() != self._contexts.keys():
            raise ValueError(
                f"the checkpoint holds the state of {len(states)} clients, but this grid has "
                f"{len(self._contexts)}"
            )
        for node, state in states.items():
            self._contexts[node].state = state

    def create_message(
        self, content: Any, message_type: str, dst_node_id: int, group_id: str, ttl: Any = None
    ) -> Message:
        """Build a message; Grid's interface."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the clients' node ids."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients; their replies wait for `pull_messages`."""
        ids = []
        for message in messages:
            ids.append(self._numbered(message))
            self._serve(message, self._app)
        return ids

    @staticmethod
    def _numbered(message: Message) -> str:
        """Give a message its id; return it."""
        message_id = str(uuid4())
        message.metadata.__dict__["_message_id"] = message_id
        return message_id

    def _serve(self, message: Message, app: ClientApp) -> None:
        """Run the client that a message is for; its reply waits."""
        message_id, message_type = message.metadata.message_id, message.metadata.message_type
        context = self._contexts[message.metadata.dst_node_id]
        before = RecordDict({k: r.copy() for k, r in context.state.items()})
        message.content = RecordDict({k: r.copy() for k, r in message.content.items()})
        try:
            self._replies[message_id] = app(message, context)
        except Exception as error:  # whatever an app that is not ours raises
            context.state = before
            message.metadata.message_type = message_type
            self._replies[message_id] = failure(message, error)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages."""
        return [self._replies.pop(i) for i in list(message_ids) if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Run the clients and return their replies, in the order of `messages`."""
        return self.pull_messages(self.push_messages(messages))
