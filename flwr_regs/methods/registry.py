"""The registry: one row per method, in registry.toml. A new method adds its row there, and its file below.

The public names of the methods, ``flwr-regs methods`` and docs/methods.md come from the rows. Tests check
the tables of the documents, and what a row says against small trainings.

Plain data: importing this file loads neither torch nor Flower.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # what type checkers see; a test compares it with the rows
    from flwr_regs.methods.client_loss.feddecorr import *
    from flwr_regs.methods.client_loss.fedgkd import *
    from flwr_regs.methods.client_loss.fedntd import *
    from flwr_regs.methods.client_loss.logits import *
    from flwr_regs.methods.client_loss.moon import *
    from flwr_regs.methods.client_loss.rfedavg import *
    from flwr_regs.methods.client_step.efl import *
    from flwr_regs.methods.client_step.fedadamw import *
    from flwr_regs.methods.client_step.fedadc import *
    from flwr_regs.methods.client_step.fedcm import *
    from flwr_regs.methods.client_step.fedcurv import *
    from flwr_regs.methods.client_step.feddyn import *
    from flwr_regs.methods.client_step.fedfor import *
    from flwr_regs.methods.client_step.fedinit import *
    from flwr_regs.methods.client_step.fedprox import *
    from flwr_regs.methods.client_step.gate import *
    from flwr_regs.methods.client_step.mime import *
    from flwr_regs.methods.client_step.sam import *
    from flwr_regs.methods.client_step.scaffold import *
    from flwr_regs.methods.compositions.fedacg import *
    from flwr_regs.methods.compositions.fedgamma import *
    from flwr_regs.methods.compositions.fedlesam_sd import *
    from flwr_regs.methods.compositions.fedsmoo import *
    from flwr_regs.methods.compositions.fedspeed import *
    from flwr_regs.methods.compositions.mofedsam import *
    from flwr_regs.methods.parts.ternary import *
    from flwr_regs.methods.personal.apfl import *
    from flwr_regs.methods.personal.ditto import *
    from flwr_regs.methods.personal.fedamp import *
    from flwr_regs.methods.personal.fedbabu import *
    from flwr_regs.methods.personal.fedbn import *
    from flwr_regs.methods.server_step.fedavg import *
    from flwr_regs.methods.server_step.fedexp import *
    from flwr_regs.methods.server_step.fednova import *
    from flwr_regs.methods.server_step.fedopt import *
    from flwr_regs.methods.server_step.fedvarp import *
    from flwr_regs.methods.server_step.qfedavg import *


@dataclass(frozen=True)
class Method:
    """One row.

    Attributes
    ----------
    example : str
        A call of the strategy with hyper-parameters that are not neutral; the columns below are its own.
    module : str
        The file in ``flwr_regs/methods/``, without ``.py``.
    terms : tuple of str
        The classes of its terms.
    paper : str
        Authors, year, and the part of the paper that the file implements.
    state : str
        What a client keeps between rounds, in words; empty if nothing.
    server : str
        What the server keeps of each client between rounds, in words; empty if nothing.
    silo : bool
        The same clients must take part again and again, even if they keep nothing.
    down, up : float
        Bytes that a client receives and sends in a round, in models, without what `beside` names.
    down_delta : float, optional
        `down` with ``downlink="delta"`` for a client that is in sync. Default: the same.
    beside : str
        What travels beside these, and is small against a model of usual size.
    gradients : str
        What a client computes beside one gradient a step.
    exchanges : int
        Requests to a client and replies in one round.
    reads : {"mean", "sums", "clients"}
        What of the clients the server needs: the mean of their updates, all weighing alike, which clipping
        and noise cover; sums over them of more than that; or a single client's update, upload or steps.
    robust : bool
        All that the server makes of the clients' uploads goes through the strategy's aggregator, so that a
        robust one covers it.
    streams : bool
        The server never holds the uploads of a whole cohort: there are none, or each is folded in.
    stacks : bool
        A cohort can run as one, under ``torch.func.vmap``: clients that run SGD by default then have an
        optimiser that treats each number alone, and the model does not come in a code.
    """

    example: str
    module: str
    terms: tuple[str, ...]
    paper: str
    state: str = ""
    server: str = ""
    silo: bool = False
    down: float = 1.0
    up: float = 1.0
    down_delta: float | None = None
    beside: str = ""
    gradients: str = ""
    exchanges: int = 1
    reads: Literal["mean", "sums", "clients"] = "mean"
    robust: bool = True
    streams: bool = True
    stacks: bool = True

    @property
    def name(self) -> str:
        """The Strategy's class."""
        return self.example.partition("(")[0]

    @property
    def setting(self) -> Literal["silo", "both"]:
        """Cross-silo, where clients take part again and again; or cross-device too, even only once."""
        return "silo" if self.silo or self.state else "both"

    @property
    def secure_aggregation(self) -> bool:
        """The server needs only sums over the clients."""
        return self.reads != "clients"

    @property
    def central_dp(self) -> bool:
        """Clipping and noise cover all that the server needs."""
        return self.reads == "mean"

    @property
    def client(self) -> str:
        """The Client's class."""
        return f"{self.name}Client"

    @property
    def names(self) -> tuple[str, ...]:
        """The public classes of its file, which are in its ``__all__`` too: Strategy, Client, terms."""
        return (self.name, self.client, *(t for t in self.terms if HOMES[t] == self.module))


COMPOSITIONS = Path(__file__).with_name("compositions.toml")
"""Method -> a reason -> what it refuses for that; ``python docs/hooks/compositions.py`` writes it."""
TERMS: dict[str, str] = {"SparseTernary": "parts.ternary"}
"""Terms that are no method's own, but compose with any: name -> file in ``flwr_regs/methods/``."""
METHODS: dict[str, Method] = {
    name: Method(**{**row, "terms": tuple(row["terms"])})
    for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8")).items()
}
"""Name of the strategy -> row, in the order of the tables."""
HOMES: dict[str, str] = {t: m.module for m in reversed(METHODS.values()) for t in m.terms} | TERMS
"""Term -> file in ``flwr_regs/methods/``: that of the first row that has the term."""
