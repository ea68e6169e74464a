"""How implementations differ from their papers.

Each is a change to the loops of `loops.py`, and nothing else. docs/conformity.md and docs/fidelity.md say
where each was read, and what it does.
"""

from __future__ import annotations

from dataclasses import dataclass

BY_EXAMPLES = (
    *("FedAvg", "FedProx", "FedNova-proximal", "FedCurv", "RFedAvg", "RFedAvgPlus", "MOON"),
    *("FedGKD", "FedLC", "FedRS", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "Ditto"),
)
SCAFFOLD = ("SCAFFOLD", "SCAFFOLD-1")
"""The paper's options II and I."""
UNIFORM = (
    *(*SCAFFOLD, "FedDyn", "FedADC-double", "FedLESAM", "FedExP"),
    *("FedSAM", "FedGAMMA", "FedSpeed", "FedSMOO", "FedInit"),
)
METHODS = (
    *("FedAvg", "FedProx", *SCAFFOLD, "FedDyn", "FedNova-proximal", "FedADC-double", "FedLESAM"),
    *("FedSAM", "FedGAMMA", "FedSpeed", "FedSMOO", "FedInit"),
    *("FedCurv", "RFedAvg", "RFedAvgPlus", "MOON", "FedGKD", "FedLC", "FedRS"),
    *("FedExP", "QFedAvg", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi"),
    *("Ditto", "APFL", "FedAMP"),
)


@dataclass(frozen=True)
class Behaviour:
    """One difference: what the implementation does, and the methods that can have it.

    `shows_with` is what the task must have for it to show: "momentum", "lr_decay" or "batch_norm".
    """

    says: str
    methods: tuple[str, ...] = METHODS
    shows_with: str = ""


BEHAVIOURS = {
    "one-batch": Behaviour("takes one mini-batch where the paper takes an epoch"),
    "drop-last": Behaviour("leaves out an epoch's last batch if it is not full"),
    "run-on": Behaviour("lets batches run on over the end of an epoch, and fills the last one"),
    "uniform": Behaviour("gives all clients the same weight", BY_EXAMPLES),
    "by-examples": Behaviour("weighs clients, and control variates, by examples", UNIFORM),
    "no-penalty": Behaviour("has a proximal term whose gradient is zero", ("FedProx",)),
    "norm": Behaviour(
        "sums the norms of the tensors' differences, not their squares", ("FedProx",)
    ),
    "twice-mu": Behaviour("leaves out the half of mu/2", ("FedProx",)),
    "outside-momentum": Behaviour("adds the correction outside the momentum", SCAFFOLD, "momentum"),
    "from-weights": Behaviour("starts control variates from the model's weights", SCAFFOLD),
    "wrong-sign": Behaviour("corrects the wrong way: c and all c_k have the other sign", SCAFFOLD),
    "c-of-cohort": Behaviour("divides the change of c by the cohort, not by all clients", SCAFFOLD),
    "one-epoch-steps": Behaviour(
        "divides by one epoch's steps, whatever the epochs", ("SCAFFOLD",)
    ),
    "first-clients-steps": Behaviour(
        "divides by the first client's number of steps, for all clients", ("SCAFFOLD", "FedGAMMA")
    ),
    "nova-steps": Behaviour(
        "divides by FedNova's a_k, not by the steps", ("SCAFFOLD",), "momentum"
    ),
    "undecayed-lr": Behaviour(
        "divides by the first round's learning rate in all rounds", ("SCAFFOLD",), "lr_decay"
    ),
    "no-correction": Behaviour("computes control variates and never adds them", SCAFFOLD),
    "new-at-once": Behaviour(
        "corrects by this round's c_k, not the last one's, and so does not change c",
        ("SCAFFOLD-1",),
    ),
    "own-buffers": Behaviour(
        "takes BatchNorm's statistics from the first client", ("FedAvg",), "batch_norm"
    ),
    "alpha-by-share": Behaviour(
        "divides alpha by the client's share of the examples, times N", ("FedDyn",)
    ),
    "root-of-penalty": Behaviour(
        "has the norm of v - w in the penalty, not its square", ("FedDyn",)
    ),
    "steps-as-tau": Behaviour(
        "takes the mean number of steps for tau_eff, not the mean of a_k", ("FedNova-proximal",)
    ),
    "over-one-plus-phi": Behaviour(
        "has (phi u + g)/(1 + phi) for the local momentum, not phi u + (1 - phi) g",
        ("FedADC-double",),
    ),
    "whole-momentum": Behaviour("embeds all of the momentum, beta_l = 1", ("FedADC-double",)),
    "servers-step": Behaviour(
        "perturbs along the server's last step, not along the client's w_old - w", ("FedLESAM",)
    ),
    "sum-of-norms": Behaviour(
        "divides by the sum of the tensors' norms, not by the norm of all", ("FedLESAM",)
    ),
    "one-entry": Behaviour(
        "shifts all of tensor i by entry i of the flattened direction", ("FedLESAM",)
    ),
    "relaxed-from-first": Behaviour(
        "takes the first model for a last one that is not there", ("FedInit",)
    ),
    "from-start": Behaviour(
        "adds the mean of what clients moved from their starts, not of their models", ("FedInit",)
    ),
    "old-fisher": Behaviour("keeps u_k of clients that did not reply last round", ("FedCurv",)),
    "batch-squares": Behaviour(
        "squares the gradients of batches, not those of examples", ("FedCurv",)
    ),
    "own-too": Behaviour(
        "compares a client with the mean of all delta, its own included", ("RFedAvg", "RFedAvgPlus")
    ),
    "delta-of-batch": Behaviour("takes delta from one batch", ("RFedAvg", "RFedAvgPlus")),
    "of-cohort": Behaviour("compares with this round's cohort alone", ("RFedAvg",)),
    "term-at-once": Behaviour("has the term before a table exists", ("RFedAvg",)),
    "untrained-last": Behaviour(
        "takes the first model for a last one that is not there", ("MOON",)
    ),
    "without-first-model": Behaviour(
        "never has the first model in the teacher, and no term in round 1", ("FedGKD",)
    ),
    "others-only": Behaviour("sums over the other classes alone, c != y", ("FedLC",)),
    "graded": Behaviour(
        "scales each class by alpha + (1 - alpha) n_c / max n, not only absent ones", ("FedRS",)
    ),
    "five-steps": Behaviour("takes at least five steps", ("FedRS",)),
    "eps-by-cohort": Behaviour("has S times eps, S the cohort's size", ("FedExP",)),
    "eps-decays": Behaviour("multiplies eps by 0.998^2 in each round", ("FedExP",)),
    "twice-the-power": Behaviour("has F^(2q) |Dw|^2 where the paper has |Dw|^2", ("QFedAvg",)),
    "bias-corrected": Behaviour("corrects the bias, with the exponent t + 1", ("FedAdam",)),
    "second-from-zero": Behaviour(
        "starts the second moment at 0, not at tau^2", ("FedAdagrad", "FedAdam", "FedYogi")
    ),
    "from-first-model": Behaviour(
        "starts a personal model at the first global model, not at the client's first", ("Ditto",)
    ),
    "alpha-once": Behaviour("learns alpha in a round's first step alone", ("APFL",)),
    "alpha-decays": Behaviour("adds 0.02 alpha to the gradient of alpha", ("APFL",)),
    "mixed-logits": Behaviour("mixes the models' logits, not their parameters", ("APFL",)),
    "no-pull": Behaviour("has a pull to the cloud model whose gradient is zero", ("FedAMP",)),
}


def apply_to(
    method: str, *, momentum: float = 0.0, lr_decay: float = 1.0, batch_norm: bool = False
) -> list[str]:
    """Return the behaviours that can show in a method's run."""
    there = {"": True, "momentum": momentum != 0, "lr_decay": lr_decay != 1}
    there["batch_norm"] = batch_norm
    return [n for n, b in BEHAVIOURS.items() if method in b.methods and there[b.shows_with]]
