"""What few methods need beyond the hooks of `Term`: small protocols, one for each ability.

A term has an ability by having its methods. Whoever runs terms asks for the ability
(``isinstance(term, Folds)``), never for a term by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from flwr_regs.term import Arrays, ClientContext, ServerContext, Slot


class ByClass(type(Protocol)):  # type: ignore[misc]
    """Lets a class say what its instances can do: Python remembers that, but not what one instance has.

    Whether a term has an ability is asked some hundred times in a client's round.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        return issubclass(type(instance), cls)


@runtime_checkable
class Weighs(Protocol, metaclass=ByClass):
    """Sets the weights of the updates; at most one term of a chain does."""

    def weigh(
        self, weights: Mapping[int, float], uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> Mapping[int, float]:
        """Return ``ω_k`` by partition id, given ``p_k``; they need not sum to 1.

        ``Δ = Σ ω_k (v_k − w_t)`` for trained parameters. Buffers keep ``p_k``.
        """
        ...


@runtime_checkable
class Folds(Protocol, metaclass=ByClass):
    """Takes the uploads one at a time, so that the server never holds those of a whole cohort."""

    def fold(
        self,
        acc: Slot,
        pid: int,
        delta: Arrays,
        upload: Slot,
        weight: float,
        ctx: ServerContext,
    ) -> Slot:
        """Return `acc` with one client's upload; called in the order of partition ids, first with ``{}``.

        `delta` is the client's ``v_k − w_t`` as it arrived, `weight` its ``p_k``. `update` gets the last
        `acc` in place of the uploads. `acc` may be changed in place; the others may not.
        """
        ...


@runtime_checkable
class Adds(Protocol, metaclass=ByClass):
    """Folds by adding, so that a robust aggregator can make robust sums of what the clients send."""

    def adds(self, key: str) -> bool:
        """Return whether `fold` adds up this entry over the clients; others are single clients' notes.

        Under a robust aggregator, `fold` is called with ``{}`` for each client. `update` gets, for these
        entries, n times the aggregate of what came, in place of the sum.
        """
        ...


@runtime_checkable
class Probes(Protocol, metaclass=ByClass):
    """Has a first exchange in each round, before clients train."""

    def probe(self, ctx: ClientContext) -> tuple[Slot, Slot]:
        """Return (upload, client slot) at ``w_t``. `ctx` has the functions over the client's data."""
        ...

    def answer(self, probes: Mapping[int, Slot]) -> Mapping[int, Slot]:
        """Return each client's own broadcast, given the uploads of `probe` by partition id."""
        ...


@runtime_checkable
class AnswersRobustly(Protocol, metaclass=ByClass):
    """Has an `answer` for robust aggregators."""

    def robust_answer(self, probes: Mapping[int, Slot], ctx: ServerContext) -> Mapping[int, Slot]:
        """Return what `answer` returns, with ``ctx.aggregated`` in place of every mean over clients."""
        ...


@runtime_checkable
class Compresses(Protocol, metaclass=ByClass):
    """Sends updates in a code of its own; comes last in a chain.

    A client's update is coded if the term acts in `finish`, the global step if it acts in `release`. The
    other end uses what `decode` returns; so does the server for its own step.
    """

    def encode(self, update: Mapping[str, Any]) -> bytes:
        """Return the code of an update: numpy arrays by name, in an order that both ends know."""
        ...

    def decode(self, data: bytes, like: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the update, with the names, order, shapes and dtypes of `like`.

        Raises on bytes that :meth:`encode` cannot have made; that client's reply is then not used.
        """
        ...


@runtime_checkable
class TakesBack(Protocol, metaclass=ByClass):
    """Corrects its client slot if the server did not use the client's reply."""

    def unused(self, before: Slot, after: Slot, sent: Arrays) -> Slot:
        """Return the client slot, given those before and after the round, and the update that was sent.

        A term without this ability goes back to `before`.
        """
        ...


@runtime_checkable
class Recovers(Protocol, metaclass=ByClass):
    """Has a broadcast that follows from the last global step, so that it need not travel."""

    def recover(self, step: Arrays, lr: float) -> Slot:
        """Return the broadcast, computed from ``w_t − w_{t−1}`` and the η of that round.

        On a ``"delta"`` downlink, a client that took part in the last round receives only these two.
        """
        ...


@runtime_checkable
class Addresses(Protocol, metaclass=ByClass):
    """Sends each client something of its own."""

    def broadcast_to(self, pid: int, server: Slot, ctx: ServerContext) -> Slot:
        """Return one client's own entries; they are added to those of `broadcast`."""
        ...


@runtime_checkable
class Withholds(Protocol, metaclass=ByClass):
    """Keeps entries of the model on the clients."""

    def private(self, names: Collection[str]) -> set[str]:
        """Return the ``state_dict`` names that never leave a client; no hook sees these."""
        ...


@runtime_checkable
class Freezes(Protocol, metaclass=ByClass):
    """Holds parameters still."""

    def frozen(self, names: Collection[str]) -> set[str]:
        """Return the ``state_dict`` names whose parameters are not trained; no hook sees these."""
        ...


@runtime_checkable
class Personalises(Protocol, metaclass=ByClass):
    """Gives each client a model of its own."""

    def personal(self, params: Arrays, ctx: ClientContext) -> Arrays:
        """Return the parameters that this client evaluates as its own, given the global ones."""
        ...


@runtime_checkable
class FineTunes(Protocol, metaclass=ByClass):
    """Evaluates as each client's own the global model, trained further on the client's data."""

    def fine_tuning(self) -> Mapping[str, Any]:
        """Return what an `evaluate_config` would say: ``"personalise"``, ``"personal-epochs"``, ...

        Without ``"personal-lr"``, the learning rate is that of the last round.
        """
        ...

    def head(self, names: Collection[str]) -> set[str]:
        """Return the ``state_dict`` names of the output layer."""
        ...


@runtime_checkable
class Checks(Protocol, metaclass=ByClass):
    """Checks each upload; all terms with uploads should."""

    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        """Raise for one client's upload (of `probe`, if the term probes) that is unusable."""
        ...


@runtime_checkable
class Agrees(Protocol, metaclass=ByClass):
    """Has uploads that must fit each other."""

    def agree(self, uploads: Mapping[int, Slot]) -> Mapping[int, str]:
        """Return why, by partition id, for uploads that do not fit those of the others."""
        ...


@runtime_checkable
class Steers(Protocol, metaclass=ByClass):
    """Has a say in the client's optimiser."""

    def client_optimizer(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return the optimiser factory for the local steps, given the client's own.

        A term that returns `make` itself has only looked at it. It is asked again at the end, with what
        the other terms have made of it.
        """
        ...


@runtime_checkable
class Restricts(Protocol, metaclass=ByClass):
    """Does not go with every train config."""

    def restrict(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError for a train config that the term cannot work with.

        Asked on the server before any client is contacted, there again before each round with its own
        config (``"lr"`` is then the round's), and by a client for its round's config. What config and
        client make of the optimiser is for :class:`Steers`.
        """
        ...


ABILITIES: frozenset[str] = frozenset(
    name
    for kind in (
        *(Weighs, Folds, Adds, Probes, AnswersRobustly, Compresses, TakesBack, Recovers, Addresses),
        *(Withholds, Freezes, Personalises, FineTunes, Checks, Agrees, Steers, Restricts),
    )
    for name in vars(kind)
    if not name.startswith("_")
)
"""The methods of all abilities."""
