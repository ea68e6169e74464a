"""`Clients`: a simulation's clients as data, for this package's grids and for Flower's apps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flwr.clientapp import ClientApp

from flwr_regs.client.member import Identity
from flwr_regs.cohort.client_sets import ClientSets
from flwr_regs.flower.app import MessageContext, client_app
from flwr_regs.flower.client import RegClient
from flwr_regs.flower.compat import Mod
from flwr_regs.term import Term
from flwr_regs.wire import keys


class Clients(ClientSets):
    __doc__ = ClientSets.__doc__

    def app(self, client_class: type[RegClient], mods: Sequence[Mod] = ()) -> ClientApp:
        """Return a ClientApp of these clients, of a method's client class such as `FedFORClient`.

        For Flower's simulation, SuperNodes, and strategies with messages of their own.
        """
        return client_app(partial(_client_of, self, client_class), mods)

    def app_of(self, who: Identity) -> ClientApp:
        """Return a ClientApp of these clients for any method."""
        make = partial(_of_method, who.method, tuple(who.terms))
        return client_app(partial(_client_of, self, make))


def _client_of(clients: Clients, make: Any, context: MessageContext) -> RegClient:
    """Return the client of a context."""
    pid = int(context.node_config["partition-id"])
    if not 0 <= pid < len(clients):
        raise ValueError(f"there is no client {pid}: the clients are 0 to {len(clients) - 1}")
    train, test = clients.sets_of(pid)
    return make(  # type: ignore[no-any-return]
        clients.fresh_model(),
        train,
        test,
        **vars(clients.task),
        optimizer=clients.optimizer,
        device=clients.device,
        classifier=clients.classifier,
        step_budget=clients.step_budget(pid, int(context.config.get(keys.ROUND_KEY, 0))),
        share_label_counts=True,  # simulated data has no secrets
    )


def _of_method(method: str, terms: Sequence[type[Term]], *args: Any, **settings: Any) -> RegClient:
    client = RegClient(*args, terms=terms, **settings)
    client.method = method  # type: ignore[misc]  # a class of its own would only say this
    return client
