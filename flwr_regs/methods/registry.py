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


FAMILIES: dict[str, str] = {
    "server": "a baseline, and optimisers on the server",
    "drift": "less client drift, and clients keep nothing",
    "memory": "less client drift, by what clients keep",
    "loss": "a local loss of its own: features, missing classes, distillation",
    "flat": "flat minima",
    "fair": "similar accuracy for all clients",
    "personal": "a model for each client",
}
"""What a method is for -> in words, in the order of README's table."""


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
    family : str
        A key of `FAMILIES`.
    use_when : str
        When to choose it: how the sentence "Use it when ..." goes on.
    state : str
        What a client keeps between rounds, in words; empty if nothing.
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
    family: str
    use_when: str = ""
    state: str = ""
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
        family="server",
        use_when="you need a baseline, or clients whose data are alike",
    )
    yield Method(
        example="FedProx(mu=0.1)",
        module="client_step.fedprox",
        terms=("Proximal",),
        paper="Li et al. 2020, Alg. 2",
        family="drift",
        use_when="local training is long and drifts, and you want one easily understood parameter",
    )
    yield Method(
        example="FedFOR()",
        module="client_step.fedfor",
        terms=("FirstOrder",),
        paper="Tian, Smith, Kira 2022, Alg. 1",
        family="drift",
        use_when="labels are skewed and clients run SGD, even if each takes part only once",
        down=2,
        down_delta=1,
    )
    yield Method(
        example="FedCM(alpha=0.1)",
        module="client_step.fedcm",
        terms=("ClientMomentum",),
        paper="Xu, Wang et al. 2021, Alg. 2",
        family="drift",
        use_when="few of many clients take part, keep no state, and run SGD without momentum",
        down=2,
        down_delta=1,
    )
    yield Method(
        example="FedSAM(rho=0.05)",
        module="client_step.sam",
        terms=("LocalPerturbation",),
        paper="Qu et al. 2022, Alg. 1",
        family="flat",
        use_when="the global model should lie in a flat minimum, and clients can compute twice as much",
        gradients="a second gradient a step",
    )
    yield Method(
        example="FedLESAM(rho=0.05)",
        module="client_step.sam",
        terms=("GlobalPerturbation",),
        paper="Fan et al. 2024",
        family="flat",
        use_when="you want the flat minimum of all clients' loss, and the same clients come back",
        state="the global model that it last received",
    )
    yield Method(
        example="MoFedSAM(rho=0.1, alpha=0.1)",
        module="compositions.mofedsam",
        terms=("LocalPerturbation", "ClientMomentum"),
        paper="Qu et al. 2022",
        family="flat",
        use_when="FedSAM fits, few of many clients take part, and they run SGD without momentum",
        down=2,
        down_delta=1,
        gradients="a second gradient a step",
    )
    yield Method(
        example="FedExP(eps=0.001)",
        module="server_step.fedexp",
        terms=("Extrapolation",),
        paper="Jhunjhunwala et al. 2023, Alg. 1",
        family="server",
        use_when="clients differ, so that their mean is a short step, and you can change nothing on them",
        reads="clients",
    )
    yield Method(
        example="FedVARP()",
        module="server_step.fedvarp",
        terms=("LastUpdates",),
        paper="Jhunjhunwala, Sharma et al. 2022, Alg. 1",
        family="server",
        use_when="few of some hundred clients take part, and the server can hold a model for each",
        reads="clients",
        robust=False,
    )
    yield Method(
        example="QFedAvg(q=1.0)",
        module="server_step.qfedavg",
        terms=("FairWeights",),
        paper="Li, Sanjabi et al. 2020, Alg. 2",
        family="fair",
        use_when="the loss should be spread evenly over the clients, at some cost to the mean",
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
        family="drift",
        use_when="labels are skewed, and clients can run SGD without momentum of their own",
        down=2,
        down_delta=1,
    )
    yield Method(
        example="FedADCPlus(beta=0.9, lam=0.35)",
        module="client_step.fedadc",
        terms=("SelfDistillation", "EmbeddedMomentum"),
        paper="Ozfatura et al. 2021, Sec. III, Eq. 7",
        family="drift",
        use_when="labels are skewed, and clients lack whole classes that the global model knows",
        down=2,
        down_delta=1,
        gradients="a forward pass of the global model a step",
    )
    yield Method(
        example="SlowMo(beta=0.9)",
        module="client_step.fedadc",
        terms=("SlowMomentum",),
        paper="Wang et al. 2019; Ozfatura et al. 2021, Alg. 2",
        family="server",
        use_when="you want momentum, but can change nothing on the clients",
    )
    yield Method(
        example="FedACG(lam=0.85, mu=0.01)",
        module="compositions.fedacg",
        terms=("Proximal", "LookaheadMomentum"),
        paper="Kim, Kim, Han 2024, Alg. 1",
        family="drift",
        use_when="you want momentum that clients start from, and to keep no state and send nothing more",
    )
    yield Method(
        example="SCAFFOLD()",
        module="client_step.scaffold",
        terms=("ControlVariates",),
        paper="Karimireddy et al. 2020, Alg. 1",
        family="memory",
        use_when="labels are skewed, and the same clients come back again and again and run plain SGD",
        state="its control variate",
        down=2,
        reads="clients",
    )
    yield Method(
        example="FedDyn(alpha=0.1)",
        module="client_step.feddyn",
        terms=("DynamicRegulariser",),
        paper="Acar et al. 2021, Alg. 1",
        family="memory",
        use_when="labels are skewed, the same clients come back again and again, and 1 model down must do",
        state="its linear term",
        reads="sums",
    )
    yield Method(
        example="FedGAMMA(rho=0.05)",
        module="compositions.fedgamma",
        terms=("LocalPerturbation", "ControlVariates"),
        paper="Dai et al. 2023",
        family="flat",
        use_when="SCAFFOLD fits, and clients can compute twice as much for a flat minimum",
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
        family="flat",
        use_when="SCAFFOLD fits, and the minimum should be flat without a second gradient",
        state="the global model that it last received, and its control variate",
        down=2,
        reads="clients",
    )
    yield Method(
        example="FedLESAMD(rho=0.05, alpha=0.1)",
        module="compositions.fedlesam_sd",
        terms=("GlobalPerturbation", "DynamicRegulariser"),
        paper="Fan et al. 2024, Alg. 1",
        family="flat",
        use_when="FedDyn fits, and the minimum should be flat without a second gradient",
        state="the global model that it last received, and its linear term",
        reads="sums",
    )
    yield Method(
        example="FedSpeed(lam=0.1, rho=0.1)",
        module="compositions.fedspeed",
        terms=("LocalPerturbation", "DynamicRegulariser"),
        paper="Sun, Shen, Huang et al. 2023, Alg. 1",
        family="flat",
        use_when="FedDyn fits, and the global model should lie in a flat minimum",
        state="its linear term",
        gradients="a second gradient a step",
        reads="sums",
    )
    yield Method(
        example="FedSMOO(lam=0.1, rho=0.1)",
        module="compositions.fedsmoo",
        terms=("CommonPerturbation", "DynamicRegulariser"),
        paper="Sun, Shen, Chen et al. 2023, Alg. 1",
        family="flat",
        use_when="FedSpeed fits, and the flat minimum should be that of all clients' loss",
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
        family="drift",
        use_when="clients take unequally many local steps, and none should count more for that",
        reads="clients",
    )
    yield Method(
        example="FedInit(beta=0.1)",
        module="client_step.fedinit",
        terms=("RelaxedStart",),
        paper="Sun, Shen, Tao 2023, Alg. 1",
        family="memory",
        use_when="the same clients come back, and nothing more may travel or be computed",
        state="its last local model",
    )
    yield Method(
        example="VRLSGD()",
        module="client_step.gate",
        terms=("GradientTracking",),
        paper="Liang et al. 2019, Alg. 1",
        family="memory",
        use_when="labels are skewed, and all clients take part in every round with equally many steps",
        state="its correction",
        down=2,
    )
    yield Method(
        example="FedGATE(server_lr=1.5)",
        module="client_step.gate",
        terms=("GradientTracking",),
        paper="Haddadpour et al. 2021, Alg. 2",
        family="memory",
        use_when="VRL-SGD fits, and the server should make longer or shorter steps",
        state="its correction",
        down=2,
    )
    yield Method(
        example="FedOpt(server_optimizer='SGD', lr=0.7, momentum=0.9, nesterov=True)",
        module="server_step.fedopt",
        terms=("TorchServerOptimizer",),
        paper="Wang et al. 2021, Alg. 1",
        family="server",
        use_when="you want an optimiser of torch on the server, or learning-rate schedules on both sides",
    )
    yield Method(
        example="FedAvgM(server_lr=1.0, momentum=0.9)",
        module="server_step.fedopt",
        terms=("TorchServerOptimizer",),
        paper="Hsu et al. 2019",
        family="server",
        use_when="you want server momentum in torch's form, and nothing else on the clients or the wire",
    )
    yield Method(
        example="FedAdagrad(server_lr=0.1)",
        module="server_step.fedopt",
        terms=("AdaptiveServer",),
        paper="Reddi et al. 2021, Alg. 2",
        family="server",
        use_when="some parameters get rare, sparse updates, and training is short",
    )
    yield Method(
        example="FedAdam(server_lr=0.1)",
        module="server_step.fedopt",
        terms=("AdaptiveServer",),
        paper="Reddi et al. 2021, Alg. 2",
        family="server",
        use_when="parameters need steps of different sizes, as embeddings and language models do",
    )
    yield Method(
        example="FedYogi(server_lr=0.1)",
        module="server_step.fedopt",
        terms=("AdaptiveServer",),
        paper="Reddi et al. 2021, Alg. 2",
        family="server",
        use_when="FedAdam fits, but updates are sparse and its second moment forgets too fast",
    )
    yield Method(
        example="FedAdamW(gamma=0.5)",
        module="client_step.fedadamw",
        terms=("SharedMoments",),
        paper="Liu et al. 2026",
        family="drift",
        use_when="clients need AdamW, as transformers do, and keep nothing",
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
        family="drift",
        use_when="clients take part rarely, local training is long, and a round may have two exchanges",
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
        family="drift",
        use_when="clients take part rarely, and momentum should act within their steps, too",
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
        family="loss",
        use_when="a few clients have differing features, and all of them take part again and again",
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
        family="loss",
        use_when="clients have differing features, and a second, small exchange per round is no problem",
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
        family="loss",
        use_when="the same clients come back, and the model learns features, as image models do",
        state="its last local model",
        gradients="the features of two other models a step",
    )
    yield Method(
        example="FedNTD(beta=1.0)",
        module="client_loss.fedntd",
        terms=("NotTrueDistillation",),
        paper="Lee et al. 2022, Sec. 3, Alg. 1",
        family="loss",
        use_when="clients forget the classes that they lack, and may take part only once",
        gradients="a forward pass of the global model a step",
    )
    yield Method(
        example="FedDecorr(beta=0.1)",
        module="client_loss.feddecorr",
        terms=("Decorrelation",),
        paper="Shi et al. 2023, Sec. 4",
        family="loss",
        use_when="labels are skewed, so that features collapse into few dimensions",
    )
    yield Method(
        example="FedLC(tau=1.0)",
        module="client_loss.logits",
        terms=("LogitCalibration",),
        paper="Zhang et al. 2022, Sec. 4",
        family="loss",
        use_when="clients have few examples of some classes, and nothing more may travel or be computed",
    )
    yield Method(
        example="FedRS(alpha=0.5)",
        module="client_loss.logits",
        terms=("RestrictedSoftmax",),
        paper="Li, Zhan 2021, Sec. 4",
        family="loss",
        use_when="clients lack whole classes, and nothing more may travel or be computed",
    )
    yield Method(
        example="FedGKD(gamma=0.2)",
        module="client_loss.fedgkd",
        terms=("PastModels",),
        paper="Yao et al. 2021",
        family="loss",
        use_when="the global model swings from round to round, and clients should remember the last ones",
        down=2,
        gradients="a forward pass of the teacher a step",
    )
    yield Method(
        example="EFL(lam=1.0, density_up=0.01, density_down=0.01)",
        module="client_step.efl",
        terms=("Elastic", "SparseTernary"),
        paper="Ma et al. 2021, Alg. 1-2, Eqs. 2-6",
        family="memory",
        use_when="the same clients come back, may stop early, and send compressed updates",
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
        family="memory",
        use_when="a few clients come back again and again, and overwrite what the others learnt",
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
        family="personal",
        use_when="the model has BatchNorm, and clients differ in their inputs rather than in their labels",
        state="BatchNorm's parameters and statistics",
    )
    yield Method(
        example="FedPer(patterns='head.*')",
        module="personal.fedbn",
        terms=("Private",),
        paper="Arivazhagan et al. 2019",
        family="personal",
        use_when="each client should have a model of its own, because clients differ in their labels",
        state="the entries that it names",
    )
    yield Method(
        example="Ditto(lam=0.1)",
        module="personal.ditto",
        terms=("PersonalModel",),
        paper="Li, Hu et al. 2021, Alg. 1",
        family="personal",
        use_when="each client should have a whole model of its own, beside any method for the global one",
        state="its own model",
        gradients="a gradient of its own model a step",
    )
    yield Method(
        example="APFL(alpha=0.5)",
        module="personal.apfl",
        terms=("MixedModel",),
        paper="Deng et al. 2020, Alg. 1",
        family="personal",
        use_when="each client should learn by itself how much of its model is its own",
        state="its own model, and that one's share",
        gradients="two gradients a step, of the global model and of the mixture",
    )
    yield Method(
        example="FedBABU()",
        module="personal.fedbabu",
        terms=("FixedHead",),
        paper="Oh et al. 2022, Alg. 1",
        family="personal",
        use_when="each client fits the final model to its own data, and keeps nothing in training",
    )
    yield Method(
        example="FedAMP(lam=0.1, alpha=0.1, sigma=1.0)",
        module="personal.fedamp",
        terms=("CloudModel",),
        paper="Huang et al. 2021, Alg. 1",
        family="personal",
        use_when="a few clients fall into groups with similar data, and nobody knows the groups",
        state="its own model",
        down=2,
        reads="clients",
    )


METHODS: dict[str, Method] = {row.name: row for row in _rows()}
"""Name of the strategy -> row, in the order of the tables."""
HOMES: dict[str, str] = {
    t: row.module for row in [*METHODS.values()][::-1] for t in row.terms
} | TERMS
"""Term -> file in ``flwr_regs/methods/``: that of the first row that has the term."""
