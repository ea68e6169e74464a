"""The registry: one row per method. A new method adds its row here, and its file to the imports below.

The public names of the methods, ``flwr-regs methods`` and docs/methods.md come from the rows. Tests check
the tables of the documents, and what a row says against small trainings.

Plain data: importing this file loads neither torch nor Flower.
"""

from __future__ import annotations

from collections.abc import Iterator
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
"""Method -> what it does not compose with -> why; ``python docs/hooks/compositions.py`` writes it."""
TERMS: dict[str, str] = {"SparseTernary": "parts.ternary"}
"""Terms that are no method's own, but compose with any: name -> file in ``flwr_regs/methods/``."""


def _rows() -> Iterator[Method]:
    yield Method(
        example="FedAvg()",
        module="server_step.fedavg",
        terms=(),
        paper="McMahan et al. 2017; Wang et al. 2021, Alg. 1",
    )
    yield Method(
        example="FedProx(mu=0.1)",
        module="client_step.fedprox",
        terms=("Proximal",),
        paper="Li et al. 2020, Alg. 2",
    )
    yield Method(
        example="FedFOR()",
        module="client_step.fedfor",
        terms=("FirstOrder",),
        paper="Tian, Smith, Kira 2022, Alg. 1",
        down=2,
        down_delta=1,
    )
    yield Method(
        example="FedCM(alpha=0.1)",
        module="client_step.fedcm",
        terms=("ClientMomentum",),
        paper="Xu, Wang et al. 2021, Alg. 2",
        down=2,
        down_delta=1,
    )
    yield Method(
        example="FedSAM(rho=0.05)",
        module="client_step.sam",
        terms=("LocalPerturbation",),
        paper="Qu et al. 2022, Alg. 1",
        gradients="a second gradient a step",
    )
    yield Method(
        example="FedLESAM(rho=0.05)",
        module="client_step.sam",
        terms=("GlobalPerturbation",),
        paper="Fan et al. 2024",
        state="the global model that it last received",
    )
    yield Method(
        example="MoFedSAM(rho=0.1, alpha=0.1)",
        module="compositions.mofedsam",
        terms=("LocalPerturbation", "ClientMomentum"),
        paper="Qu et al. 2022",
        down=2,
        down_delta=1,
        gradients="a second gradient a step",
    )
    yield Method(
        example="FedExP(eps=0.001)",
        module="server_step.fedexp",
        terms=("Extrapolation",),
        paper="Jhunjhunwala et al. 2023, Alg. 1",
        reads="clients",
    )
    yield Method(
        example="FedVARP()",
        module="server_step.fedvarp",
        terms=("LastUpdates",),
        paper="Jhunjhunwala, Sharma et al. 2022, Alg. 1",
        server="its last update, a model",
        reads="clients",
        robust=False,
    )
    yield Method(
        example="QFedAvg(q=1.0)",
        module="server_step.qfedavg",
        terms=("FairWeights",),
        paper="Li, Sanjabi et al. 2020, Alg. 2",
        beside="its loss at the global model, up",
        gradients="the loss of all its data once a round",
        reads="clients",
        streams=False,
    )
    yield Method(
        example="FedADC(beta=0.9)",
        module="client_step.fedadc",
        terms=("EmbeddedMomentum",),
        paper="Ozfatura et al. 2021, Alg. 3, 4",
        down=2,
        down_delta=1,
    )
    yield Method(
        example="FedADCPlus(beta=0.9, lam=0.35)",
        module="client_step.fedadc",
        terms=("SelfDistillation", "EmbeddedMomentum"),
        paper="Ozfatura et al. 2021, Sec. III, Eq. 7",
        down=2,
        down_delta=1,
        gradients="a forward pass of the global model a step",
    )
    yield Method(
        example="SlowMo(beta=0.9)",
        module="client_step.fedadc",
        terms=("SlowMomentum",),
        paper="Wang et al. 2019; Ozfatura et al. 2021, Alg. 2",
    )
    yield Method(
        example="FedACG(lam=0.85, mu=0.01)",
        module="compositions.fedacg",
        terms=("Proximal", "LookaheadMomentum"),
        paper="Kim, Kim, Han 2024, Alg. 1",
    )
    yield Method(
        example="SCAFFOLD()",
        module="client_step.scaffold",
        terms=("ControlVariates",),
        paper="Karimireddy et al. 2020, Alg. 1",
        state="its control variate",
        down=2,
        reads="clients",
    )
    yield Method(
        example="FedDyn(alpha=0.1)",
        module="client_step.feddyn",
        terms=("DynamicRegulariser",),
        paper="Acar et al. 2021, Alg. 1",
        state="its linear term",
        reads="sums",
    )
    yield Method(
        example="FedGAMMA(rho=0.05)",
        module="compositions.fedgamma",
        terms=("LocalPerturbation", "ControlVariates"),
        paper="Dai et al. 2023",
        state="its control variate",
        down=2,
        gradients="a second gradient a step",
        reads="clients",
    )
    yield Method(
        example="FedLESAMS(rho=0.05)",
        module="compositions.fedlesam_sd",
        terms=("GlobalPerturbation", "ControlVariates"),
        paper="Fan et al. 2024, Alg. 1",
        state="the global model that it last received, and its control variate",
        down=2,
        reads="clients",
    )
    yield Method(
        example="FedLESAMD(rho=0.05, alpha=0.1)",
        module="compositions.fedlesam_sd",
        terms=("GlobalPerturbation", "DynamicRegulariser"),
        paper="Fan et al. 2024, Alg. 1",
        state="the global model that it last received, and its linear term",
        reads="sums",
    )
    yield Method(
        example="FedSpeed(lam=0.1, rho=0.1)",
        module="compositions.fedspeed",
        terms=("LocalPerturbation", "DynamicRegulariser"),
        paper="Sun, Shen, Huang et al. 2023, Alg. 1",
        state="its linear term",
        gradients="a second gradient a step",
        reads="sums",
    )
    yield Method(
        example="FedSMOO(lam=0.1, rho=0.1)",
        module="compositions.fedsmoo",
        terms=("CommonPerturbation", "DynamicRegulariser"),
        paper="Sun, Shen, Chen et al. 2023, Alg. 1",
        state="its linear term, and its dual variable",
        down=2,
        up=2,
        gradients="a second gradient a step",
        reads="sums",
    )
    yield Method(
        example="FedNova()",
        module="server_step.fednova",
        terms=("NormalizedAveraging",),
        paper="Wang et al. 2020, Sec. 4",
        reads="clients",
    )
    yield Method(
        example="FedInit(beta=0.1)",
        module="client_step.fedinit",
        terms=("RelaxedStart",),
        paper="Sun, Shen, Tao 2023, Alg. 1",
        state="its last local model",
    )
    yield Method(
        example="VRLSGD()",
        module="client_step.gate",
        terms=("GradientTracking",),
        paper="Liang et al. 2019, Alg. 1",
        state="its correction",
        server="the round of its last turn",
        down=2,
    )
    yield Method(
        example="FedGATE(server_lr=1.5)",
        module="client_step.gate",
        terms=("GradientTracking",),
        paper="Haddadpour et al. 2021, Alg. 2",
        state="its correction",
        server="the round of its last turn",
        down=2,
    )
    yield Method(
        example="FedOpt(server_optimizer='SGD', lr=0.7, momentum=0.9, nesterov=True)",
        module="server_step.fedopt",
        terms=("TorchServerOptimizer",),
        paper="Wang et al. 2021, Alg. 1",
    )
    yield Method(
        example="FedAvgM(server_lr=1.0, momentum=0.9)",
        module="server_step.fedopt",
        terms=("TorchServerOptimizer",),
        paper="Hsu et al. 2019",
    )
    yield Method(
        example="FedAdagrad(server_lr=0.1)",
        module="server_step.fedopt",
        terms=("AdaptiveServer",),
        paper="Reddi et al. 2021, Alg. 2",
    )
    yield Method(
        example="FedAdam(server_lr=0.1)",
        module="server_step.fedopt",
        terms=("AdaptiveServer",),
        paper="Reddi et al. 2021, Alg. 2",
    )
    yield Method(
        example="FedYogi(server_lr=0.1)",
        module="server_step.fedopt",
        terms=("AdaptiveServer",),
        paper="Reddi et al. 2021, Alg. 2",
    )
    yield Method(
        example="FedAdamW(gamma=0.5)",
        module="client_step.fedadamw",
        terms=("SharedMoments",),
        paper="Liu et al. 2026",
        down=3,
        up=2,
        beside="a step count down, one up",
        reads="sums",
    )
    yield Method(
        example="Mime(beta=0.9)",
        module="client_step.mime",
        terms=("CorrectedMomentum",),
        paper="Karimireddy, Jaggi et al. 2021, Alg. 1",
        down=3,
        up=2,
        gradients="a second gradient a step, and the gradient over all its data once a round",
        exchanges=2,
        reads="sums",
        streams=False,
    )
    yield Method(
        example="MimeLite(beta=0.9)",
        module="client_step.mime",
        terms=("FixedMomentum",),
        paper="Karimireddy, Jaggi et al. 2021, Alg. 1",
        down=2,
        up=2,
        gradients="the gradient over all its data once a round",
        reads="sums",
    )
    yield Method(
        example="RFedAvg(lam=0.001)",
        module="client_loss.rfedavg",
        terms=("FeatureTable",),
        paper="Wang, Tong et al. 2023, Alg. 1",
        server="its feature mean",
        silo=True,
        beside="a feature mean of each client of the federation down, one up",
        gradients="the features of all its data once a round",
        reads="clients",
        streams=False,
    )
    yield Method(
        example="RFedAvgPlus(lam=0.1)",
        module="client_loss.rfedavg",
        terms=("LeaveOneOutMean",),
        paper="Wang, Tong et al. 2023, Alg. 2",
        beside="a feature mean down, one up",
        gradients="the features of all its data once a round",
        exchanges=2,
        reads="clients",
        streams=False,
    )
    yield Method(
        example="MOON(mu=5.0)",
        module="client_loss.moon",
        terms=("ModelContrast",),
        paper="Li, He, Song 2021, Sec. 3, Alg. 1",
        state="its last local model",
        gradients="the features of two other models a step",
    )
    yield Method(
        example="FedNTD(beta=1.0)",
        module="client_loss.fedntd",
        terms=("NotTrueDistillation",),
        paper="Lee et al. 2022, Sec. 3, Alg. 1",
        gradients="a forward pass of the global model a step",
    )
    yield Method(
        example="FedDecorr(beta=0.1)",
        module="client_loss.feddecorr",
        terms=("Decorrelation",),
        paper="Shi et al. 2023, Sec. 4",
    )
    yield Method(
        example="FedLC(tau=1.0)",
        module="client_loss.logits",
        terms=("LogitCalibration",),
        paper="Zhang et al. 2022, Sec. 4",
    )
    yield Method(
        example="FedRS(alpha=0.5)",
        module="client_loss.logits",
        terms=("RestrictedSoftmax",),
        paper="Li, Zhan 2021, Sec. 4",
    )
    yield Method(
        example="FedGKD(gamma=0.2)",
        module="client_loss.fedgkd",
        terms=("PastModels",),
        paper="Yao et al. 2021",
        down=2,
        gradients="a forward pass of the teacher a step",
    )
    yield Method(
        example="EFL(lam=1.0, density_up=0.01, density_down=0.01)",
        module="client_step.efl",
        terms=("Elastic", "SparseTernary"),
        paper="Ma et al. 2021, Alg. 1-2, Eqs. 2-6",
        state="the model, and the rest of its update",
        down=2,
        up=2,
        beside="the coded step down, the coded update up",
        gradients="a gradient of each of its samples once a round",
        reads="clients",
    )
    yield Method(
        example="FedCurv(lam=1.0)",
        module="client_step.fedcurv",
        terms=("Curvature",),
        paper="Shoham et al. 2019, Eqs. 4-6",
        state="its Fisher information, and that times its model",
        down=3,
        up=2,
        beside="whether its last reply was used, down",
        gradients="a gradient of each of its samples once a round",
        reads="clients",
    )
    yield Method(
        example="FedBN()",
        module="personal.fedbn",
        terms=("LocalBatchNorm",),
        paper="Li, Jiang et al. 2021, Alg. 1",
        state="BatchNorm's parameters and statistics",
    )
    yield Method(
        example="FedPer(patterns='head.*')",
        module="personal.fedbn",
        terms=("Private",),
        paper="Arivazhagan et al. 2019",
        state="the entries that it names",
    )
    yield Method(
        example="Ditto(lam=0.1)",
        module="personal.ditto",
        terms=("PersonalModel",),
        paper="Li, Hu et al. 2021, Alg. 1",
        state="its own model",
        gradients="a gradient of its own model a step",
    )
    yield Method(
        example="APFL(alpha=0.5)",
        module="personal.apfl",
        terms=("MixedModel",),
        paper="Deng et al. 2020, Alg. 1",
        state="its own model, and that one's share",
        gradients="two gradients a step, of the global model and of the mixture",
    )
    yield Method(
        example="FedBABU()",
        module="personal.fedbabu",
        terms=("FixedHead",),
        paper="Oh et al. 2022, Alg. 1",
    )
    yield Method(
        example="FedAMP(lam=0.1, alpha=0.1, sigma=1.0)",
        module="personal.fedamp",
        terms=("CloudModel",),
        paper="Huang et al. 2021, Alg. 1",
        state="its own model",
        server="its last model",
        down=2,
        reads="clients",
    )


METHODS: dict[str, Method] = {row.name: row for row in _rows()}
"""Name of the strategy -> row, in the order of the tables."""
HOMES: dict[str, str] = {
    t: row.module for row in [*METHODS.values()][::-1] for t in row.terms
} | TERMS
"""Term -> file in ``flwr_regs/methods/``: that of the first row that has the term."""
