"""A client's answer to one message: it trains, answers a first exchange, or evaluates. Plain torch."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch

from flwr_regs.client import personal
from flwr_regs.client.local_training import local_round
from flwr_regs.client.measure.classifier import find_classifier
from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.member import Identity, begin, end, evaluated, probe, seeded
from flwr_regs.client.memory import Memory, Root
from flwr_regs.client.train.batches import Batches, resolve_device
from flwr_regs.client.train.optimizer import OptimizerFn
from flwr_regs.client.train.task import Task, uncompiled
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays
from flwr_regs.wire.parcel import Parcel


class Client(Protocol):
    """What a client trains with; the attributes are those of :class:`flwr_regs.RegClient`."""

    model: torch.nn.Module
    train_data: Batches
    eval_data: Batches | None
    optimizer: OptimizerFn | None
    device: str | torch.device
    classifier: str | None
    step_budget: int | None
    time_budget: float | None
    save_private: Root

    @property
    def task(self) -> Task:
        """Its loss, and how its batches are read."""

    @property
    def identity(self) -> Identity:
        """Who it is, whatever round it takes part in."""


class Answer(NamedTuple):
    """A client's reply, what it remembers from now on, and the global model; None: as in the message."""

    reply: Parcel
    memory: Memory
    model: NDArrays | None = None


def train(client: Client, message: Parcel, held: Memory) -> Answer:
    """Return the answer to a train message, or to a first exchange.

    `held` is what the client remembers. Raises what :func:`.member.begin` and the training raise.
    """
    device, data, task = resolve_device(client.device), client.train_data, client.task
    model = uncompiled(client.model)
    member = begin(message, held, model, client.identity)
    with seeded(member.config[keys.SEED_KEY], device):
        if member.probing:
            reply, held = probe(member, measures(client))
        else:
            result = local_round(
                client.model,
                member.term,
                data,
                optimizer=client.optimizer,
                device=device,
                classifier=client.classifier,
                max_steps=client.step_budget,
                max_seconds=client.time_budget,
                **vars(task),
                **member.duration,
            )
            own_model = partial(personal.trained_model, member.term, measures(client), result)
            reply, held = end(member, result, own_model)
    return Answer(reply, held, member.rebuilt)


def evaluate(client: Client, message: Parcel, held: Memory) -> Answer:
    """Return the answer to an evaluate message; the metrics are those of :func:`.personal.evaluate`.

    Raises ValueError for a client without `eval_data`.
    """
    if client.eval_data is None:
        raise ValueError(
            f"{client.identity.who} was built without eval_data; "
            "pass it, or set fraction_evaluate=0 on the strategy"
        )
    term, slots, config = evaluated(message, held, uncompiled(client.model), client.identity)
    how = {"optimizer": client.optimizer, "folder": client.save_private}
    loss, count, metrics = personal.evaluate(
        measures(client), term, client.eval_data, message.config, slots, **how
    )
    if "personalise" in message.config and message.config.get("personal-part") != "all":
        config[keys.LAYER_KEY] = find_classifier(uncompiled(client.model), client.classifier)
    return Answer(Parcel({}, config, {"num-examples": count, "loss": loss, **metrics}), held)


def measures(client: Client) -> Measures:
    """Return the functions over a client's data."""
    model, device = uncompiled(client.model), resolve_device(client.device)
    return Measures(model, client.train_data, client.task, device, client.classifier)
