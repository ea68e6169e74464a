"""Processes that run a ClientApp for InProcessGrid, several clients at once.

All that lasts, the clients' contexts, stays in this process.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flwr_regs.flower.compat import identify
from flwr_regs.flower.node import copied, failure
from flwr_regs.wire.worker_pool import Ended, WorkerPool

SETTINGS = ("default_dtype", "float32_matmul_precision", "deterministic_debug_mode")


def served(app: ClientApp, message: Message, context: Context) -> Message:
    """Return the app's reply; if it raises, an error, and ``context.state`` stays as it was."""
    before = copied(context.state)
    message_type = message.metadata.message_type
    try:
        return app(message, context)
    except Exception as error:  # whatever an app that is not ours raises
        context.state = before
        message.metadata.message_type = message_type
        return failure(message, error)


class Workers(WorkerPool):
    """Some processes, each with the app. They start with the first messages, and end with this object.

    Parameters
    ----------
    app : ClientApp
    number : int

    Raises
    ------
    TypeError
        The app cannot be pickled.
    """

    def __init__(self, app: ClientApp, number: int) -> None:
        remedy = "give client_app a function that stands in a module, not a lambda or an inner one"
        super().__init__(_server, app, number, "this app", remedy)

    def run(self, messages: Sequence[Message], contexts: Sequence[Context]) -> list[Message]:
        """Return the replies to the messages in their order; the contexts then hold the new states.

        A client whose process dies has an error for a reply, and keeps its state. Raises RuntimeError if a
        process does not start.
        """
        settings = _settings()
        tasks = [(m, c, _seed(m), settings) for m, c in zip(messages, contexts, strict=True)]
        replies: dict[int, Message] = {}
        # two messages to one client: the second needs the state after the first
        with closing(self.answers(tasks, lanes=[*map(id, contexts)])) as answers:
            for k, answer in answers:
                if isinstance(answer, Ended):
                    client = contexts[k].node_config.get("partition-id", contexts[k].node_id)
                    why = f"the process of client {client} {answer}"
                    replies[k] = failure(messages[k], RuntimeError(why))
                else:
                    replies[k], contexts[k].state = answer
        return [replies[k] for k in range(len(messages))]


def _seed(message: Message) -> int:
    """Return the seed of what a client draws without one, such as a new model's values in `client_fn`.

    It does not depend on which process gets the message.
    """
    torch: Any = sys.modules.get("torch")
    said = message.metadata
    base = torch.initial_seed() if torch else 0
    return zlib.crc32(f"{base} {said.dst_node_id} {said.group_id} {said.message_type}".encode())


def _settings() -> dict[str, Any]:
    """Return what a script may have set in this process's torch, and on which a client's bits depend."""
    torch = sys.modules.get("torch")
    return {name: getattr(torch, f"get_{name}")() for name in SETTINGS} if torch else {}


def _server(app: ClientApp) -> Callable[[Any], tuple[Message, Any]]:
    import torch  # not where the server is

    def answer(task: Any) -> tuple[Message, Any]:
        message, context, seed, settings = task
        for name, value in settings.items():
            getattr(torch, f"set_{name}")(value)
        if mode := settings.get("deterministic_debug_mode"):  # for torch.compile, too
            torch.use_deterministic_algorithms(True, warn_only=mode == 1)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # for code that draws so
        torch.manual_seed(seed)
        return served(app, message, context), context.state

    identify()
    return answer
