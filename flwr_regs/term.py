"""The seam: what a federated optimisation method is here. (chain.py composes several.)

A method is two gradient transformations, one for a client's step and one for the server's step, and
what they tell each other. This file is plain Python over arrays: torch tensors on a client, numpy
arrays on the server, batched tensors under ``torch.func.vmap``. It imports neither flwr nor torch.

State and messages live in four slots, each a plain ``dict`` of arrays keyed by parameter name (or by
whatever else the term needs): **server**, kept by the server between rounds; **broadcast**, server to
clients beside the global model; **upload**, client to server beside the client's model; **client**,
kept by a client between rounds, whose absence (``{}``) is always legal.
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
        The term's own slots; ``{}`` where there is none (first round, lost state).
    forward : callable
        ``forward(params, inputs) -> output`` at any parameters, buffers as they are now.
    inputs, targets, output, start_output : Any
        The batch, and the model's and (if a term `needs_start_output`) the global model's output on
        it, the latter in eval mode; None outside a step.
    label_counts : Any
        Examples of each class in the client's data, ``(classes,)``, if a term `needs_label_counts`.
    features, feature_mean : Any
        If a term `needs_features`: what enters the output layer, ``(batch, d)``, and a function
        ``feature_mean(params, batches or None) -> (d,)``, its mean over the client's data at these
        parameters.
    fisher : callable
        ``fisher(params, max_samples or None) -> Arrays``, the diagonal of the empirical Fisher information
        over the client's data at these parameters.
    client_id, batch_size : int
        The client's partition id (-1 where nobody gave one), and the examples in its first batch.
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

    The round t, from 1, and the clients' learning rate η in it; ``w_t``, trainable parameters only; the
    last step of the global model, ``w_t − w_{t−1}``, and the η of the round that made it (None in round 1).
    """

    round: int
    lr: float
    params: Arrays = field(default_factory=dict)
    previous_step: Arrays | None = None
    previous_lr: float | None = None


@dataclass(frozen=True)
class Declared:
    """A frozen dataclass whose fields, int, float, bool or str, go into each round's config."""

    name: ClassVar[str]
    owns_step: ClassVar[bool] = False
    """True if `update` replaces the averaged delta by a server optimiser's step."""
    keeps_delta: ClassVar[bool] = False
    """True if `update` returns `delta` as it came; if not, it stands right of a step owner."""
    compresses: ClassVar[bool] = False
    """True if `finish` or `release` makes the update lossy; such a term comes last."""
    needs_start_output: ClassVar[bool] = False
    needs_label_counts: ClassVar[bool] = False
    needs_features: ClassVar[bool] = False
    needs_fisher: ClassVar[bool] = False
    excludes: ClassVar[tuple[str, ...]] = ()
    """Names of terms that are another version of this one."""
    probes: ClassVar[bool] = False
    """True if clients answer a question at ``w_t`` before anyone trains."""
    server_only: ClassVar[bool] = False
    """True if clients need not know of it: it has no client hook and nothing of it travels."""

    @property
    def uploads(self) -> bool:
        """Whether clients send anything beside their update: what clipping and noise do not cover."""
        return self.probes

    def config(self) -> dict[str, Any]:
        """Return ``"<name>.<field>" -> value``; one that is None stays at home."""
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

    Hooks are pure: they change no input, return no view of one, call no ``.item()`` and take no Python
    branch on an array's value, so that one file serves a Flower client, a user's own loop and a cohort
    stacked under ``torch.func.vmap``. Server hooks use operators only.
    """

    name: ClassVar[str] = "identity"

    def private(self, names: Collection[str]) -> set[str]:
        """Return the ``state_dict`` names that never leave a client; no hook sees these."""
        return set()

    @property
    def averages(self) -> bool:
        """Whether the model moves by the very mean of the updates (noise added later then fits it)."""
        plain = self.keeps_delta or type(self).update is Term.update
        return plain and type(self).release is Term.release

    @property
    def ternary(self) -> tuple[bool, bool]:
        """Whether (what `finish` sends, what `release` returns) is ternary: then it travels coded."""
        return False, False

    def init(self, params: Arrays) -> Slot:
        """Return the server slot before round 1."""
        return {}

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        """Return what every client of the round receives beside the global model."""
        return {}

    def recover(self, step: Arrays, lr: float) -> Slot | None:
        """Return the broadcast as it follows from ``w_t − w_{t−1}`` and the η that made it, or None.

        On a ``"delta"`` downlink a client that was there last round receives no more than these.
        """
        return None

    def start(self, params: Arrays, ctx: ClientContext) -> Arrays:
        """Return where the local steps start from, given ``w_t``."""
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
        """Return (server slot, step as it is made and sent), once every term has had its `update`."""
        return server, step

    def probe(self, ctx: ClientContext) -> tuple[Slot, Slot]:
        """Return (upload, client slot) at ``w_t``, before training: the round's first exchange."""
        return {}, {}

    def answer(self, probes: Mapping[int, Slot]) -> dict[int, Slot]:
        """Return each client's own broadcast, given the uploads of `probe` by partition id."""
        return {}

    def client_optimizer(self, optimizer: Any) -> Any:
        """Return the optimiser factory for the local steps, given the client's own."""
        return optimizer
