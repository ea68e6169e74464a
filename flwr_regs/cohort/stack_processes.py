"""Processes that each train a part of a cohort as a stack."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from flwr_regs.client.client_sets import ClientSets
from flwr_regs.client.member import Answer, Asked, Identity
from flwr_regs.cohort.stack_groups import Settings
from flwr_regs.cohort.stacks import Stacks
from flwr_regs.wire.worker_pool import Ended, WorkerPool

Part = tuple[dict[int, Answer], dict[str, int]]
"""What one process made of its clients: what came of them, and why others train by themselves."""


class StackProcesses(WorkerPool):
    """Some processes that train stacks.

    Parameters
    ----------
    clients : ClientSets
    who : Identity
        The method's.
    settings : Settings
    number : int

    Raises
    ------
    TypeError
        The clients cannot be sent to another process.
    """

    def __init__(self, clients: ClientSets, who: Identity, settings: Settings, number: int) -> None:
        remedy = "give them functions that stand in a module, not lambdas"
        super().__init__(_trainer, (clients, who, settings), number, "these clients", remedy)

    def train(self, asked: Sequence[Asked]) -> list[Part]:
        """Return what each process made of its part of the clients; nothing, if it has ended."""
        each = [(a.pid, a.client.step_budget, a.message, a.memory) for a in asked]
        size = -(-len(each) // self.number)
        tasks = [each[i : i + size] for i in range(0, len(each), size)]
        parts: list[Part] = [({}, {})] * len(tasks)
        with contextlib.closing(self.answers(tasks, lanes=range(len(tasks)))) as answers:
            for k, answer in answers:
                if isinstance(answer, Ended):
                    answer = {}, {f"a process that trains a stack {answer}": len(tasks[k])}
                parts[k] = answer
        return parts


def _trainer(given: tuple[ClientSets, Identity, Settings]) -> Callable[[Any], Part]:
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # the asking process says it
    clients, who, settings = given
    stacks = Stacks(settings)
    client = cache(partial(clients.client, identity=who))

    def train(tasks: Any) -> Part:
        asked = [Asked(pid, client(pid), message, memory) for pid, _, message, memory in tasks]
        for one, (_, budget, *_) in zip(asked, tasks, strict=True):
            one.client.step_budget = budget
        stacks.fallbacks = {}
        with clients.lent():
            return stacks.train(asked), stacks.fallbacks

    return train
