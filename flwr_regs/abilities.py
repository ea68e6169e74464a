"""What few methods need beyond the hooks of `Term`: a base class for each ability.

A term has the abilities that it inherits, ``class MyTerm(Term, Folds)``, and defines their abstract
methods. Whoever runs terms asks ``isinstance(term, Folds)``, never for a term by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

from flwr_regs.hook_contexts import Arrays, ClientContext, ServerContext, Slot


class Steps:
    """Replaces the averaged delta by a server optimiser's step in `update`; one term of a chain may."""


class CountsOnMean:
    """Goes with nothing that weighs the updates anew: its step counts on their mean by ``p_k``."""


class Averages:
    """Is judged by another model than the global one: the history has that model's metrics too.

    At most one term of a chain is.
    """

    def averaged(self, model: Arrays, step: Arrays, server: Slot) -> Arrays:
        """Return that model: by default the mean of the last two.

        `model` and `step` are ``w_{t+1}`` and ``w_{t+1} − w_t``, buffers of floats among them; `server` is
        the term's slot after the round.
        """
        return {n: a - step[n] / 2 for n, a in model.items()}


class Weighs(ABC):
    """Sets the weights of the updates; at most one term of a chain does.

    Attributes
    ----------
    bounds_steps : bool
        Whether ``ctx.max_scale`` bounds its weights. Then `weigh` may be asked twice in a round: the server
        says once that the bound acts.
    """

    bounds_steps: ClassVar[bool] = False

    @abstractmethod
    def weigh(
        self, weights: Mapping[int, float], uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> Mapping[int, float]:
        """Return ``ω_k`` by partition id, given ``p_k``; they need not sum to 1.

        ``Δ = Σ ω_k (v_k − w_t)`` for trained parameters. Buffers keep ``p_k``.
        """


class Folds(ABC):
    """Takes the uploads one at a time, so that the server never holds those of a whole cohort."""

    @abstractmethod
    def fold(
        self, acc: Slot, pid: int, delta: Arrays, upload: Slot, weight: float, ctx: ServerContext
    ) -> Slot:
        """Return `acc` with one client's upload; called in the order of partition ids, first with ``{}``.

        `delta` is the client's ``v_k − w_t`` as it arrived, ``ctx.params`` the ``w_t`` that it got,
        `weight` its ``p_k``. `update` gets the last `acc` in place of the uploads. `acc` may be changed in
        place; the others may not.
        """

    def adds(self, key: str) -> bool:
        """Return whether `fold` adds up this entry over the clients; others are single clients' notes.

        A term that says so here goes with robust aggregators. `fold` is then called with ``{}`` for each
        client, and `update` gets, for these entries, n times the aggregate of the n that came, in place of
        the sum. ``ctx.counted`` of them count.
        """
        return False


class Probes(ABC):
    """Has a first exchange in each round, before clients train."""

    @abstractmethod
    def probe(self, ctx: ClientContext) -> tuple[Slot, Slot]:
        """Return (upload, client slot) at ``w_t``. `ctx` has the functions over the client's data."""

    @abstractmethod
    def answer(self, probes: Mapping[int, Slot]) -> Mapping[int, Slot]:
        """Return each client's own broadcast, given the uploads of `probe` by partition id."""

    def answer_in(self, probes: Mapping[int, Slot], ctx: ServerContext) -> Mapping[int, Slot]:
        """Return the answer in a round: by default `answer`.

        ``ctx.weights`` has ``p_k`` over the clients whose probes came. Where ``ctx.robust``, a term that is
        `robust` has ``ctx.aggregated`` in place of every mean over clients.
        """
        return self.answer(probes)


class Compresses(ABC):
    """Sends updates in a code of its own; comes last in a chain.

    A client's update is coded if the term acts in `finish`, the global step if it acts in `release`. The
    other end uses what `decode` returns; so does the server for its own step.
    """

    @abstractmethod
    def encode(self, update: Mapping[str, Any]) -> bytes:
        """Return the code of an update: numpy arrays by name, in an order that both ends know."""

    @abstractmethod
    def decode(self, data: bytes, like: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the update, with the names, order, shapes and dtypes of `like`.

        Raises on bytes that :meth:`encode` cannot have made; that client's reply is then not used.
        """


class TakesBack(ABC):
    """Corrects its client slot if the server did not use the client's reply."""

    @abstractmethod
    def unused(self, before: Slot, after: Slot) -> Slot:
        """Return the client slot after a round whose reply came, but was not used.

        `after` is what `finish` returned, `before` the slot of the last round that was used. What the round
        has sent is known only if `finish` has put it into its slot. Without this ability, the client goes
        back to `before`; so does every client whose reply did not come.
        """


class Recovers(ABC):
    """Has a broadcast that follows from the last global step, so that it need not travel."""

    @abstractmethod
    def recover(self, step: Arrays, lr: float) -> Slot:
        """Return the broadcast, computed from ``w_t − w_{t−1}`` and the η of that round.

        On a ``"delta"`` downlink, a client that took part in the last round receives only these two.
        """


class Addresses(ABC):
    """Sends each client something of its own."""

    @abstractmethod
    def broadcast_to(self, pid: int, server: Slot, ctx: ServerContext) -> Slot:
        """Return one client's own entries; they are added to those of `broadcast`."""


class Withholds(ABC):
    """Keeps entries of the model on the clients."""

    @abstractmethod
    def private(self, names: Collection[str]) -> set[str]:
        """Return the ``state_dict`` names that never leave a client; no hook sees these."""


class Freezes(ABC):
    """Holds parameters still."""

    @abstractmethod
    def frozen(self, names: Collection[str]) -> set[str]:
        """Return the ``state_dict`` names whose parameters are not trained; no hook sees these."""


class Personalises(ABC):
    """Gives each client a model of its own."""

    @abstractmethod
    def personal(self, params: Arrays, ctx: ClientContext) -> Arrays:
        """Return the parameters that this client evaluates as its own, given the global ones."""


class FineTunes(ABC):
    """Evaluates as each client's own the global model, trained further on the client's data."""

    @abstractmethod
    def fine_tuning(self) -> Mapping[str, Any]:
        """Return what an `evaluate_config` would say: ``"personalise"``, ``"personal-epochs"``, ...

        Without ``"personal-lr"``, the learning rate is that of the last round.
        """

    @abstractmethod
    def head(self, names: Collection[str]) -> set[str]:
        """Return the ``state_dict`` names of the output layer."""


class Checks(ABC):
    """Checks each upload; all terms with uploads should."""

    @abstractmethod
    def check(self, upload: Slot, params: Arrays, server: Slot) -> None:
        """Raise for one client's upload (of `probe`, if the term probes) that is unusable."""

    def tolerance(self, upload: Slot, lr: float | None) -> float:
        """Return how many times its cohort's median an array of an upload may be long.

        An upload with a longer one is taken for a sign of divergence. `lr` is the clients' learning rate η,
        None if only they know it.
        """
        return 1000.0


class Agrees(ABC):
    """Has uploads that must fit each other."""

    @abstractmethod
    def agree(self, uploads: Mapping[int, Slot]) -> Mapping[int, str]:
        """Return why, by partition id, for uploads that do not fit those of the others."""


class Steers(ABC):
    """Has a say in the client's optimiser.

    Attributes
    ----------
    counts_on_sgd : str
        Empty: a round's steps may be any. Else why each must be the round's learning rate times the
        corrected gradient: a sentence with ``{}`` for what a client does instead, which is refused.
    counts_on_rate : str
        Empty: the learning rate may change within a round. Else the sentence that refuses it.
    """

    counts_on_sgd: ClassVar[str] = ""
    counts_on_rate: ClassVar[str] = ""

    @abstractmethod
    def client_optimizer(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Return the optimiser factory for the local steps, given the client's own.

        A term that returns `make` itself has only looked at it. It is asked again at the end, with what
        the other terms have made of it.
        """


class Carries(ABC):
    """Says with which state the client's optimiser begins, and reads its state at the end.

    In `finish`, ``ctx.optimizer_state`` has that state: arrays under ``"<entry>.<parameter>"``, by torch's
    names, such as ``"exp_avg_sq.0.weight"``; ``"step"``, which all parameters share, stands alone.
    """

    @abstractmethod
    def optimizer_start(self, ctx: ClientContext) -> Arrays:
        """Return the state before the first step, in the same keys; ``{}`` for a fresh optimiser.

        What is given for a parameter is all of its state.
        """


class Evolves(ABC):
    """Has a client slot that changes in each step of a round, and not at its end alone."""

    @abstractmethod
    def evolve(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Slot:
        """Return the client slot after a step, given what `correct` was given in it.

        It is ``ctx.client`` in the next step, and in `finish` after the last. Its keys and shapes are the
        same after each step. It counts after the round only as far as `finish` returns it.
        """


class Perturbs(ABC):
    """Takes the batch's loss and gradient elsewhere, in one forward and backward pass.

    Where the perturbation depends on the gradient at `params`, use ``ctx.gradient_at`` in `correct`.
    """

    @abstractmethod
    def point(self, params: Arrays, ctx: ClientContext) -> Arrays:
        """Return the parameters at which a step takes its loss and gradient, in place of `params`.

        `loss` hooks see these; `correct` and the optimiser go on from `params`. Several such terms follow
        each other from left to right. A parameter that is missing does not move. `ctx` has no batch yet.
        """


class Restricts(ABC):
    """Does not go with every train config."""

    @abstractmethod
    def restrict(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError for a train config that the term cannot work with.

        Asked on the server before any client is contacted, there again before each round with its own
        config (``"lr"`` is then the round's), and by a client for its round's config. What config and
        client make of the optimiser is for :class:`Steers`.
        """


ABILITIES: tuple[type[ABC], ...] = (
    *(Weighs, Folds, Probes, Compresses, TakesBack, Recovers, Addresses, Withholds, Freezes),
    *(Personalises, FineTunes, Checks, Agrees, Steers, Carries, Evolves, Perturbs, Restricts),
)
ABILITY_OF: dict[str, type] = {n: a for a in ABILITIES for n in sorted(a.__abstractmethods__)}
ABILITY_OF["averaged"] = Averages
"""The methods that make a term one of these -> the class."""
ON_CLIENTS = (
    *(Probes, Compresses, TakesBack, Recovers, Withholds, Freezes, Personalises, Steers),
    *(Carries, Evolves, Perturbs),
)
"""The abilities that a client runs."""
