"""How implementations of FedAvg, FedProx and SCAFFOLD differ from their papers.

Each is a change to the loops of `loops.py`, and nothing else. docs/conformity.md says where each was read.
"""

from __future__ import annotations

from dataclasses import dataclass

METHODS = ("FedAvg", "FedProx", "SCAFFOLD", "SCAFFOLD-1")
"""``SCAFFOLD`` is the paper's option II, ``SCAFFOLD-1`` its option I."""
SCAFFOLD = METHODS[2:]


@dataclass(frozen=True)
class Behaviour:
    """One difference: what the implementation does, and the methods that can have it."""

    says: str
    methods: tuple[str, ...] = METHODS


BEHAVIOURS = {
    "one-batch": Behaviour("takes one mini-batch where the paper takes an epoch"),
    "drop-last": Behaviour("leaves out an epoch's last batch if it is not full"),
    "run-on": Behaviour("lets batches run on over the end of an epoch, and fills the last one"),
    "uniform": Behaviour("gives all clients the same weight", METHODS[:2]),
    "by-examples": Behaviour("weighs clients, and control variates, by examples", SCAFFOLD),
    "no-penalty": Behaviour("has a proximal term whose gradient is zero", ("FedProx",)),
    "norm": Behaviour(
        "sums the norms of the tensors' differences, not their squares", ("FedProx",)
    ),
    "twice-mu": Behaviour("leaves out the half of mu/2", ("FedProx",)),
    "outside-momentum": Behaviour("adds the correction outside the momentum", SCAFFOLD),
    "from-weights": Behaviour("starts control variates from the model's weights", SCAFFOLD),
    "wrong-sign": Behaviour("corrects the wrong way: c and all c_k have the other sign", SCAFFOLD),
    "c-of-cohort": Behaviour("divides the change of c by the cohort, not by all clients", SCAFFOLD),
    "one-epoch-steps": Behaviour(
        "divides by one epoch's steps, whatever the epochs", ("SCAFFOLD",)
    ),
    "new-at-once": Behaviour(
        "corrects by this round's c_k, not the last one's, and so does not change c",
        ("SCAFFOLD-1",),
    ),
    "own-buffers": Behaviour("takes BatchNorm's statistics from the first client", ("FedAvg",)),
}


def apply_to(method: str, *, momentum: float, batch_norm: bool) -> list[str]:
    """Return the behaviours that can show in a method's run."""
    found = [name for name, b in BEHAVIOURS.items() if method in b.methods]
    if not momentum:  # nothing to be outside of
        found = [name for name in found if name != "outside-momentum"]
    return found if batch_norm else [name for name in found if name != "own-buffers"]
