"""The seam: a `Term` is one part of a federated optimisation method. chain.py composes several.

A method transforms gradients in two places, a client's step and the server's step, and defines what the
two sides send each other. This file is plain Python over arrays: torch tensors on a client, numpy arrays
on the server, batched tensors under ``torch.func.vmap``. It imports neither flwr nor torch.

State and messages live in four slots. Each is a plain ``dict`` of arrays, keyed by parameter name or by
any key that the term needs: the server keeps **server** between rounds; the server sends **broadcast** to
the clients beside the global model; a client sends **upload** beside its own model; a client keeps
**client** between rounds, and it may be missing (``{}``) at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

Arrays = dict[str, Any]  # parameter name -> array; trainable parameters only, never buffers
Slot = dict[str, Any]  # one of the four slots of one term: key -> array


@dataclass(frozen=True)
class ClientContext:
    """What a term may read during a client's round. Read-only.

    Attributes
    ----------
    start, lr, num_steps : Arrays, float, int
        ``w_t``, the client's learning rate η and its number of local steps ``K_k`` of this round.
    broadcast, client : Slot
        The term's own slots; ``{}`` if there is none (first round, lost state).
    forward : callable
        ``forward(params, inputs) -> output`` at any parameters, with the model's current buffers.
    inputs, targets, output, start_output : Any
        The batch and the model's output on it. If a term `needs_start_output`: the global model's
        output on it, in eval mode. None outside a step.
    label_counts : Any
        If a term `needs_label_counts`: examples of each class in the client's data, ``(classes,)``.
    features, feature_mean : Any
        If a term `needs_features`: the input of the output layer, ``(batch, d)``, and a function
        ``feature_mean(params, batches or None) -> (d,)``, its mean over the client's data at these
        parameters.
    fisher : callable
        ``fisher(params, max_samples or None) -> Arrays``, the diagonal of the empirical Fisher information
        over the client's data at these parameters.
    client_id, batch_size : int
        The client's partition id (-1 if it has none), and the number of examples in its first batch.
    """

    start: Arrays
    lr: Any
    num_steps: Any
    broadcast: Slot = field(default_factory=dict)
    client: Slot = field(default_factory=dict)
    forward: Callable[[Arrays, Any], Any] | None = None
    inputs: Any = None
    targets: Any = None
    output: Any = None
    start_output: Any = None
    label_counts: Any = None
    features: Any = None
    feature_mean: Callable[[Arrays, int | None], Any] | None = None
    fisher: Callable[[Arrays, int | None], Arrays] | None = None
    client_id: Any = -1
    batch_size: int = 0


@dataclass(frozen=True)
class ServerContext:
    """What a term may read on the server. Read-only.

    The round t, counted from 1, and the clients' learning rate η in it; ``w_t``, trainable parameters only;
    the last global step ``w_t − w_{t−1}`` and the η of the round that made it (both None in round 1).
    """

    round: int
    lr: float
    params: Arrays = field(default_factory=dict)
    previous_step: Arrays | None = None
    previous_lr: float | None = None


@dataclass(frozen=True)
class Declared:
    """A frozen dataclass whose fields (int, float, bool or str) go into each round's config."""

    name: ClassVar[str]
    owns_step: ClassVar[bool] = False
    """True if `update` replaces the averaged delta by a server optimiser's step."""
    keeps_delta: ClassVar[bool] = False
    """True if `update` returns `delta` unchanged; an `update` that changes it stands right of the owner."""
    compresses: ClassVar[bool] = False
    """True if `finish` or `release` makes the update lossy; such a term must be last."""
    needs_start_output: ClassVar[bool] = False
    needs_label_counts: ClassVar[bool] = False
    needs_features: ClassVar[bool] = False
    needs_fisher: ClassVar[bool] = False
    excludes: ClassVar[tuple[str, ...]] = ()
    """Names of terms that are other versions of this one; a chain holds only one version."""
    probes: ClassVar[bool] = False
    """True if the round has a first exchange: clients upload `probe` at ``w_t`` before they train."""
    server_only: ClassVar[bool] = False
    """True if only the server runs it: it has no client hook, and its fields do not travel."""

    @property
    def uploads(self) -> bool:
        """Whether clients send anything beside their update; clipping and noise do not cover that."""
        return self.probes

    def config(self) -> dict[str, Any]:
        """Return ``"<name>.<field>" -> value``, without the fields that are None."""
        pairs = {f"{self.name}.{f.name}": getattr(self, f.name) for f in fields(self)}
        return {} if self.server_only else {k: v for k, v in pairs.items() if v is not None}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Build the term from a round's config; raise KeyError naming a missing key."""
        keys = {f.name: f"{cls.name}.{f.name}" for f in fields(cls)}
        optional = {f.name for f in fields(cls) if f.default is None}
        if missing := [key for f, key in keys.items() if key not in config and f not in optional]:
            raise KeyError(f"the round's config lacks {missing}, which term '{cls.name}' needs")
        return cls(**{f: config[key] for f, key in keys.items() if key in config})


@dataclass(frozen=True)
class Term(Declared):
    """One ingredient of a method. Every hook is the identity by default.

    Hooks are pure: they change no input and return no view of one. They call no ``.item()`` and do not
    branch on an array's value. So one file serves a Flower client, a user's own loop and a cohort stacked
    under ``torch.func.vmap``. Server hooks use only operators on arrays.
    """

    name: ClassVar[str] = "identity"

    def private(self, names: Collection[str]) -> set[str]:
        """Return the ``state_dict`` names that never leave a client; no hook sees these."""
        return set()

    @property
    def ternary(self) -> tuple[bool, bool]:
        """Whether (the update of `finish`, the step of `release`) is ternary, and so travels coded."""
        return False, False

    def init(self, params: Arrays) -> Slot:
        """Return the server slot before round 1; again if the first replies show that less is trained."""
        return {}

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        """Return what every client of the round receives beside the global model."""
        return {}

    def recover(self, step: Arrays, lr: float) -> Slot | None:
        """Return the broadcast, computed from ``w_t − w_{t−1}`` and the η of that round, or None.

        On a ``"delta"`` downlink, a client that took part in the last round receives only these two.
        """
        return None

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        """Return the parameters from which the local steps start, given ``w_t``."""
        return params

    def loss(self, base: Any, params: Arrays, ctx: ClientContext) -> Any:
        """Return the local objective on a batch, given the plain loss `base` (a scalar)."""
        return base

    def correct(self, grads: Arrays, params: Arrays, ctx: ClientContext) -> Arrays:
        """Return the corrected gradients, after backward and before the client's optimiser."""
        return grads

    def finish(self, delta: Arrays, ctx: ClientContext) -> tuple[Arrays, Slot, Slot]:
        """Return (``v_k − w_t`` to be sent, upload slot, client slot) after the last local step."""
        return delta, {}, {}

    def check(self, upload: Slot, params: Arrays) -> None:
        """Raise ValueError if one client's upload (of `probe`, if the term `probes`) is unusable."""

    def update(
        self, server: Slot, delta: Arrays, uploads: Mapping[int, Slot], ctx: ServerContext
    ) -> tuple[Slot, Arrays]:
        """Return (server slot, step), given ``Σ p_k (v_k − w_t)`` and the uploads by partition id."""
        return server, delta

    def release(self, server: Slot, step: Arrays, ctx: ServerContext) -> tuple[Slot, Arrays]:
        """Return (server slot, the step that is made and sent); runs after every term's `update`."""
        return server, step

    def probe(self, ctx: ClientContext) -> tuple[Slot, Slot]:
        """Return (upload, client slot) of the round's first exchange: at ``w_t``, before training."""
        return {}, {}

    def answer(self, probes: Mapping[int, Slot]) -> dict[int, Slot]:
        """Return each client's own broadcast, given the uploads of `probe` by partition id."""
        return {}

    def client_optimizer(self, optimizer: Any) -> Any:
        """Return the optimiser factory for the local steps, given the client's own."""
        return optimizer
