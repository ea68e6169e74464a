"""FedBN and FedPer: entries of the model that never leave the client.

| *Init*       the shared entries only; each client starts from its own model's private entries
| *Broadcast*  the shared entries of ``w_t``
| *Step*       the method's step on shared parameters; the client's optimiser alone on private parameters
| *Upload*     the shared entries of ``v_k``; private entries stay in the client's ``Context.state``
| *Update*     the method's

**FedBN** keeps BatchNorm's parameters and statistics on the client. **FedPer** keeps named entries there,
usually the classifier's. Both are terms that compose:
``[FirstOrder(), LocalBatchNorm()]`` is the FedFOR paper's composition under covariate shift.

The server never holds private entries, so the model that it returns lacks them. A client that has never
trained, or that lost its state, uses the private entries that its model was built with. So evaluate on
clients.

Sources: Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated learning on non-IID features via local batch
normalization" (2021), Alg. 1; Arivazhagan et al., "Federated learning with personalization layers" (2019).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_regs.abilities import Withholds
from flwr_regs.methods.parts.method import MethodClient, MethodStrategy
from flwr_regs.term import Range, Ranges, Term
from flwr_regs.wire.arrays import matching, split_patterns

__all__ = ["FedBN", "FedBNClient", "FedPer", "FedPerClient", "LocalBatchNorm", "Private"]

STATISTIC = "running_mean"


@dataclass(frozen=True)
class LocalBatchNorm(Term, Withholds):
    """BatchNorm's parameters and statistics are private.

    The term finds a BatchNorm layer by its ``running_mean``, because the server sees names and no modules.
    It misses a layer with ``track_running_stats=False``: name that one with :class:`Private`. Raises
    ValueError if it finds none.
    """

    name: ClassVar[str] = "local-bn"

    def private(self, names: Collection[str]) -> set[str]:
        layers = {n.removesuffix(STATISTIC) for n in names if n.rpartition(".")[2] == STATISTIC}
        if not layers:
            raise ValueError(
                "the model has no BatchNorm layer (no array named running_mean); for other layers use "
                "Private(patterns)"
            )
        return {n for n in names if n.rpartition(".")[0] + "." * ("." in n) in layers}


@dataclass(frozen=True)
class Private(Term, Withholds):
    """Named entries of the model are private.

    Parameters
    ----------
    patterns : str
        Shell patterns on ``state_dict`` names, separated by commas, e.g. ``"head.*,*.norm?.*"``.
        Raises ValueError if one of them matches nothing.
    """

    name: ClassVar[str] = "private"
    ranges: ClassVar[Ranges] = {"patterns": Range("a string of names", kind=str)}
    patterns: str

    def __post_init__(self) -> None:
        super().__post_init__()
        split_patterns(self.patterns, "patterns")

    def private(self, names: Collection[str]) -> set[str]:
        return matching(split_patterns(self.patterns, "patterns"), names)


class FedBN(MethodStrategy):
    """FedAvg with BatchNorm kept on the clients.

    Parameters
    ----------
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__([LocalBatchNorm()], **kwargs)


class FedBNClient(MethodClient):
    """The client of :class:`FedBN`."""

    terms = (LocalBatchNorm,)


class FedPer(MethodStrategy):
    """FedAvg with named layers, such as the classifier, kept on the clients.

    Parameters
    ----------
    patterns : str
        See :class:`Private`.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, patterns: str, **kwargs: Any) -> None:
        super().__init__([Private(patterns)], **kwargs)


class FedPerClient(MethodClient):
    """The client of :class:`FedPer`."""

    terms = (Private,)
