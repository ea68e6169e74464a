"""FedBABU: clients train the body of the model; its output layer stays as it was at first.

| *Init*       the output layer of ``w_1``, which never changes
| *Broadcast*  ``w_t``: the body, and that layer beside it
| *Step*       ``v ← ClientOpt(v, ∇f_k(v))`` on the body alone
| *Upload*     ``v_k``, ``n_k``
| *Update*     as FedAvg, on the body

The output layer is held still against the optimiser's momentum and weight decay, too. Clients keep nothing
between rounds.

In an evaluation each client trains a copy of the global model further on its own data, with its own
optimiser or plain SGD: all of it, its head or its body, for some epochs (the paper's fine-tuning). That is
the client's own model: ``"personal-accuracy"``.

Source: Oh, Kim, Yun, "FedBABU: Toward enhanced representation for federated image classification" (2022),
Alg. 1; Sec. 4 for the parts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.abilities import FineTunes, Freezes
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.term import COUNT, POSITIVE, Ranges, Term, one_of
from flwr_regs.wire.arrays import matching, split_patterns
from flwr_regs.wire.config import PARTS

__all__ = ["FedBABU", "FedBABUClient", "FixedHead"]


@dataclass(frozen=True)
class FixedHead(Term, Freezes, FineTunes):
    """The output layer is not trained; an evaluation trains the global model further (Alg. 1).

    Parameters
    ----------
    personal_part : {"all", "head", "body"}
        What a client trains further in an evaluation.
    personal_epochs : int
        For how many epochs.
    personal_lr : float, optional
        With which learning rate. None: that of the last round.
    layer : str, optional
        Shell patterns on ``state_dict`` names of the output layer, separated by commas, e.g. ``"fc.*"``.
        None: the last layer of the ``state_dict`` that has a weight and no running statistics.
    """

    name: ClassVar[str] = "fedbabu"
    ranges: ClassVar[Ranges] = {
        "personal_part": one_of(*PARTS),
        "personal_epochs": COUNT,
        "personal_lr": POSITIVE,
    }
    personal_part: str = "all"
    personal_epochs: int = 5
    personal_lr: float | None = None
    layer: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer is not None:
            split_patterns(self.layer, "layer")

    def head(self, names: Collection[str]) -> set[str]:
        if self.layer is not None:
            return matching(split_patterns(self.layer, "layer"), names)
        layers = [n.removesuffix("weight") for n in names if n.rpartition(".")[2] == "weight"]
        weighted = [layer for layer in layers if f"{layer}running_mean" not in names]
        if not weighted:
            raise ValueError(
                "FedBABU found no layer with a weight: name the output layer by layer="
            )
        return {n for n in names if n.rpartition(".")[0] == weighted[-1].removesuffix(".")}

    def frozen(self, names: Collection[str]) -> set[str]:
        return self.head(names)

    def fine_tuning(self) -> dict[str, Any]:
        rate = {} if self.personal_lr is None else {"personal-lr": self.personal_lr}
        part, epochs = self.personal_part, self.personal_epochs
        return {"personalise": "plain", "personal-part": part, "personal-epochs": epochs, **rate}


class FedBABU(MethodStrategy):
    """FedAvg on the body of the model, under an output layer that stays as it was at first.

    Parameters
    ----------
    personal_part, personal_epochs, personal_lr, layer
        See :class:`FixedHead`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(
        self,
        personal_part: str = "all",
        personal_epochs: int = 5,
        personal_lr: float | None = None,
        layer: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__([FixedHead(personal_part, personal_epochs, personal_lr, layer)], **kwargs)


class FedBABUClient(MethodClient):
    """The client of :class:`FedBABU`."""

    terms = (FixedHead,)
