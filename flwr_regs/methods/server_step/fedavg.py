"""FedAvg: the baseline that every other method reduces to.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``
| *Step*       ``v ← ClientOpt(v, ∇f_k(v))``, from ``v = w_t``, ``K_k`` times
| *Upload*     ``v_k`` and the number of examples ``n_k``
| *Update*     ``w_{t+1} = w_t + Σ p_k (v_k − w_t)``,  ``p_k = n_k / Σ n`` or ``1/|S_t|``

Source: McMahan et al., "Communication-efficient learning of deep networks from decentralized data"
(2017), Alg. 1; Wang et al., "A field guide to federated optimization" (2021), Alg. 1 with ClientOpt
and ServerOpt both SGD and a server learning rate of 1.
"""

from __future__ import annotations

from typing import Any

from flwr_regs.methods.parts.method import MethodClient, MethodStrategy

__all__ = ["FedAvg", "FedAvgClient"]


class FedAvg(MethodStrategy):
    """Federated averaging.

    Parameters
    ----------
    weighting : {"num-examples", "uniform"}
        Aggregation weights ``p_k``: by number of examples (the paper's), or equal for every client.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.
    """

    def __init__(self, weighting: str = "num-examples", **kwargs: Any) -> None:
        super().__init__([], weighting=weighting, **kwargs)


class FedAvgClient(MethodClient):
    """The client of :class:`FedAvg`: plain local training."""
