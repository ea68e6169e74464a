"""Clients, one of which has an accident; copied into the app's folder as ``accident.py``.

They are of plain numpy: without torch, a message takes seconds less. With a folder `disk` in the run config
they keep slots and private entries, on that disk. The run config says which accident, in which round and to
which partition; it happens once. Each training message leaves a file ``<round>-<partition>-<n>`` in
``marks``, and waits while there is a file ``hold-<round>-<partition>``.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.client import NumPyClient

import flwr_regs
from flwr_regs.flower.compat import ClientAppCallable


class Plain(NumPyClient):
    """Moves each array halfway to the number of its partition."""

    def __init__(self, target: int) -> None:
        self.target = target

    def fit(self, parameters: Any, config: Any) -> Any:
        moved = [(a + np.float32(self.target)) / 2 for a in parameters]
        return moved, 10 + self.target, {}


def accident(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Have the accident, if it is this client's turn."""
    if message.metadata.message_type != "train":
        return call_next(message, context)
    config = context.run_config
    number = int(message.content["config"]["server-round"])  # type: ignore[arg-type]
    partition = int(context.node_config["partition-id"])
    marks = Path(str(config["marks"]))
    before = len(list(marks.glob(f"{number}-{partition}-*")))
    (marks / f"{number}-{partition}-{before}").touch()
    victim = (number, partition) == (config["accident-round"], config["accident-partition"])
    if victim and not before:
        happen(str(config["accident"]))
    reply = call_next(message, context) if victim and config["accident"] == "trained" else None
    end = time.monotonic() + 200
    while (marks / f"hold-{number}-{partition}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    return reply or call_next(message, context)


def happen(kind: str) -> None:
    """Raise, die, or be silent for ten minutes; with another word, do nothing."""
    if kind == "raise":
        raise RuntimeError("the data of this client cannot be read")
    if kind == "die":
        os._exit(1)
    if kind == "silent":
        time.sleep(600)


def client_fn(context: Context) -> Any:
    """Return a client of plain numpy, or one that keeps something on its disk."""
    if not (disk := str(context.run_config["disk"])):
        return Plain(int(context.node_config["partition-id"]))
    from task import build, load  # type: ignore[import-not-found]

    terms = [flwr_regs.ControlVariates, flwr_regs.Private]
    train, test = load(context.node_config)
    return flwr_regs.RegClient(
        build(), train, test, terms=terms, private="2.*", save_private=disk, device="cpu"
    )


app = flwr_regs.client_app(client_fn, mods=[accident])
