"""`Clients`: a simulation's clients as data, for this package's grids and for Flower's apps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flwr.clientapp import ClientApp

from flwr_regs.chain import named
from flwr_regs.client.client_sets import ClientSets
from flwr_regs.client.member import Identity
from flwr_regs.flower.app import MessageContext, client_app
from flwr_regs.flower.client import RegClient
from flwr_regs.flower.compat import Mod
from flwr_regs.term import Term
from flwr_regs.wire import keys


class Clients(ClientSets):
    """The clients of a simulation as data: they share a model and differ in their data sets.

    Parameters
    ----------
    model : nn.Module or callable
        The model, or what returns one without arguments. All clients of a process train in one model, one
        after the other. Entries that stay with a client begin as they are when the clients are first used;
        if the model has changed since, make new `Clients`. After a round on this package's grids, a model
        that was given has the entries that it had before.
    train_sets, test_sets : sequence, mapping, callable, or a partitioner of flwr-datasets
        Client ``k`` has entry ``k``, from 0 on: a Dataset, a pair of tensors ``(inputs, targets)`` with
        equal first dimensions, a DataLoader or other batches, or a function of k that returns one of these
        and is called when the client first takes part (where there are messages: for each of them). One
        function for all needs `num_clients`. A partitioner's partitions, or a FederatedDataset's, are
        Hugging Face data sets, whose batches are mappings. Without `test_sets` the strategy must not
        evaluate on clients (``fraction_evaluate=0``).
    batch_size : int
        Examples in a batch. Training data are shuffled in each pass, by the round's seed; batches that are
        given stay as they are.
    loss_fn, optimizer, target_key, output_fn, device, classifier
        As for :class:`flwr_regs.RegClient`, the same for all clients.
    step_budgets : sequence, mapping or callable, optional
        The most local steps of client ``k`` in a round; or ``budget(k, round)``. None: no limit.
    num_clients : int, optional
        Their number, where `train_sets` does not tell.

    Raises
    ------
    TypeError
        No model; data sets of another kind.
    ValueError
        No clients; an empty data set, or inputs and targets of unequal lengths: the error names the client.
    """

    def app(self, client_class: type[RegClient], mods: Sequence[Mod] = ()) -> ClientApp:
        """Return a ClientApp of these clients, of a method's client class such as `FedFORClient`.

        For Flower's simulation, SuperNodes, and strategies with messages of their own. Raises TypeError
        for a class that is none of a client, such as a strategy.
        """
        foreign = isinstance(client_class, type) and not issubclass(client_class, RegClient)
        if foreign or not callable(client_class):
            given = named(client_class)
            raise TypeError(f"app takes a client class, such as FedFORClient, not {given}")
        once = not self.by_round and not callable(self.step_budgets)
        return client_app(partial(self.made, client_class), mods, once=once)

    def app_of(self, who: Identity) -> ClientApp:
        """Return a ClientApp of these clients for any method."""
        return client_app(partial(self.made, partial(_of_method, who.method, tuple(who.terms))))

    def made(self, make: Callable[..., RegClient], context: MessageContext) -> RegClient:
        """Return the client of a message; `make` is called as a client class is."""
        pid = int(context.node_config["partition-id"])
        number = int(context.config.get(keys.ROUND_KEY, 0))
        if not 0 <= pid < len(self):
            raise ValueError(f"there is no client {pid}: the clients are 0 to {len(self) - 1}")
        shared = {n: getattr(self, n) for n in ("optimizer", "device", "classifier")}
        shared |= {**vars(self.task), "share_label_counts": True}  # simulated data has no secrets
        budget, sets = self.step_budget(pid, number), self.sets_of(pid, number)
        client = make(self.fresh_model(), *sets, step_budget=budget, **shared)
        if client.identity.withholds:
            client.model = copy.deepcopy(client.model)  # a grid may keep it beside others
        return client


def _of_method(method: str, terms: Sequence[type[Term]], *args: Any, **settings: Any) -> RegClient:
    named = {"method": method, "terms": terms}
    kind: type[RegClient] = type(RegClient.__name__, (RegClient,), named)
    return kind(*args, **settings)
