"""Non-IID federated optimisation for Flower: each method a Strategy with a matching NumPyClient.

The methods' names come from their registry, `methods/registry.py`; ``flwr-regs methods`` prints it. Names
are loaded when first used, so that importing one file of the package loads no more than it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flwr_regs.methods.registry import METHODS as _METHODS
from flwr_regs.methods.registry import TERMS as _TERMS

if TYPE_CHECKING:
    from flwr_regs.client.memory import load_private as load_private
    from flwr_regs.client.train.trainable import trainable as trainable
    from flwr_regs.experiments.simulation import simulate as simulate
    from flwr_regs.flower.app import RegClientApp as RegClientApp
    from flwr_regs.flower.app import client_app as client_app
    from flwr_regs.flower.client import RegClient as RegClient
    from flwr_regs.flower.client_round import ClientRound as ClientRound
    from flwr_regs.flower.client_round import load_model as load_model
    from flwr_regs.flower.grids.in_process import InProcessGrid as InProcessGrid
    from flwr_regs.flower.grids.stacked_grid import StackedGrid as StackedGrid
    from flwr_regs.flower.simulated_clients import Clients as Clients
    from flwr_regs.flower.strategy import RegStrategy as RegStrategy
    from flwr_regs.flower.writers import JsonLines as JsonLines
    from flwr_regs.flower.writers import TensorBoard as TensorBoard
    from flwr_regs.methods.fedbuff import FedBuff as FedBuff
    from flwr_regs.methods.fedbuff import FedBuffClient as FedBuffClient
    from flwr_regs.methods.registry import *
    from flwr_regs.server.aggregate.aggregators import CenteredClipping as CenteredClipping
    from flwr_regs.server.aggregate.aggregators import CoordinateMedian as CoordinateMedian
    from flwr_regs.server.aggregate.aggregators import GeometricMedian as GeometricMedian
    from flwr_regs.server.aggregate.aggregators import Krum as Krum
    from flwr_regs.server.aggregate.aggregators import Mean as Mean
    from flwr_regs.server.aggregate.aggregators import NormBound as NormBound
    from flwr_regs.server.aggregate.aggregators import TrimmedMean as TrimmedMean
    from flwr_regs.server.checkpoint.checkpoint import CheckpointError as CheckpointError
    from flwr_regs.server.privacy import CentralDP as CentralDP
    from flwr_regs.server.round import RoundFailed as RoundFailed
    from flwr_regs.server.round import TooFewReplies as TooFewReplies
    from flwr_regs.server.stopping import Patience as Patience
    from flwr_regs.server.stopping import Target as Target
    from flwr_regs.term import ClientContext as ClientContext
    from flwr_regs.term import Range as Range
    from flwr_regs.term import ServerContext as ServerContext
    from flwr_regs.term import Term as Term
    from flwr_regs.wire.records import float32_arrays as float32_arrays

_MODULES = {
    "experiments.simulation": ("simulate",),
    "flower.app": ("RegClientApp", "client_app"),
    "flower.client": ("RegClient",),
    "flower.client_round": ("ClientRound", "load_model"),
    "client.memory": ("load_private",),
    "client.train.trainable": ("trainable",),
    "flower.grids.in_process": ("InProcessGrid",),
    "flower.grids.stacked_grid": ("StackedGrid",),
    "wire.records": ("float32_arrays",),
    "flower.simulated_clients": ("Clients",),
    "flower.strategy": ("RegStrategy",),
    "flower.writers": ("JsonLines", "TensorBoard"),
    "server.stopping": ("Patience", "Target"),
    "server.round": ("RoundFailed", "TooFewReplies"),
    "server.privacy": ("CentralDP",),
    "server.aggregate.aggregators": (
        *("CenteredClipping", "CoordinateMedian", "GeometricMedian", "Krum", "Mean"),
        *("NormBound", "TrimmedMean"),
    ),
    "server.checkpoint.checkpoint": ("CheckpointError",),
    "methods.registry": ("METHODS", "Method", "TERMS"),
    "methods.fedbuff": ("FedBuff", "FedBuffClient"),
    "term": ("ClientContext", "Range", "ServerContext", "Term"),
}
_HOME = {
    **{name: module for module, names in _MODULES.items() for name in names},
    **{name: f"methods.{row.module}" for row in _METHODS.values() for name in row.names},
    **{name: f"methods.{module}" for name, module in _TERMS.items()},
}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"flwr_regs.{_HOME[name]}"), name)
    why = f"module 'flwr_regs' has no attribute '{name}'"
    if name == "wrap":
        why += "; Flower's privacy wrappers are not supported, use privacy=CentralDP(...)"
    elif name == "check_method":
        why += "; it is in flwr_regs.testing"
    elif not name.startswith("_"):
        from flwr_regs.wire.config import nearest

        why += nearest(name, _HOME)
    raise AttributeError(why)


def __dir__() -> list[str]:
    return [*(name for name in globals() if name.startswith("__")), *_HOME]
