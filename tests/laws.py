"""The methods under test: every law of flwr_regs.testing runs for each of these cases."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import flwr_regs as fr
from flwr_regs.abilities import Steps
from flwr_regs.term import Term
from flwr_regs.testing import Exempt, Method
from flwr_regs.testing.problem import settled, sgd_pull
from tests.oracles.client_loss.distillation import fedadc_plus
from tests.oracles.client_loss.feddecorr import feddecorr
from tests.oracles.client_loss.fedgkd import fedgkd
from tests.oracles.client_loss.fedntd import fedntd
from tests.oracles.client_loss.logits import fedlc, fedrs
from tests.oracles.client_loss.moon import moon
from tests.oracles.client_loss.rfedavg import rfedavg, rfedavg_plus
from tests.oracles.client_step import sam
from tests.oracles.client_step.efl import efl
from tests.oracles.client_step.fedadamw import fedadamw
from tests.oracles.client_step.fedadc import fedadc
from tests.oracles.client_step.fedcm import fedcm
from tests.oracles.client_step.fedcurv import fedcurv
from tests.oracles.client_step.feddyn import feddyn
from tests.oracles.client_step.fedfor import fedfor
from tests.oracles.client_step.fedinit import fedinit
from tests.oracles.client_step.fedprox import fedprox
from tests.oracles.client_step.fedspeed import fedsmoo, fedspeed
from tests.oracles.client_step.gate import fedgate, vrlsgd
from tests.oracles.client_step.mime import mime, mimelite
from tests.oracles.client_step.scaffold import scaffold
from tests.oracles.personal.apfl import apfl
from tests.oracles.personal.ditto import ditto
from tests.oracles.personal.fedamp import fedamp
from tests.oracles.personal.fedbabu import fedbabu
from tests.oracles.server_step.fedacg import fedacg
from tests.oracles.server_step.fedavg import fedavg
from tests.oracles.server_step.fedexp import fedexp
from tests.oracles.server_step.fednova import fednova
from tests.oracles.server_step.fedopt import fedopt
from tests.oracles.server_step.fedvarp import fedvarp
from tests.oracles.server_step.qfedavg import qfedavg
from tests.oracles.server_step.slowmo import slowmo

Numbers = Sequence[float]


def case(
    name: str,
    terms: Any,
    oracle: Any,
    settings: dict[str, Any],
    neutral: dict[str, Any] | str,
    oracle_settings: dict[str, Any] | None = None,
    *,
    unmoved: str = "",
    unsettled: Exempt | None = None,
    **more: Any,
) -> Method:
    """A method, named by its class, and by a variant behind a hyphen.

    With hyper-parameters that are not neutral, the neutral ones, terms and oracle, which has the same
    settings by default. `terms` is a list, or the class of the one that has these settings; a `downlink` is
    the strategy's alone. `neutral` may say why no settings are FedAvg's, `unmoved` why it moves as FedAvg
    does. It settles at FedAvg's fixed point, unless it is `unsettled`.
    """
    method = name.partition("-")[0]
    wire = {n: v for n, v in settings.items() if n == "downlink"}
    own = {n: v for n, v in settings.items() if n != "downlink"}
    reasons = {
        "neutral": Exempt(neutral) if isinstance(neutral, str) else None,
        "moves": Exempt(unmoved) if unmoved else None,
        "fixed-point": unsettled,
    }
    return Method(
        getattr(fr, method),
        getattr(fr, f"{method}Client"),
        terms if isinstance(terms, list) else [terms(**own)],
        oracle,
        name=name,
        settings=settings,
        neutral=settings if isinstance(neutral, str) else wire | neutral,
        oracle_settings=own if oracle_settings is None else oracle_settings,
        exempt={law: reason for law, reason in reasons.items() if reason},
        **{
            "neutral_is_exact": True,
            "fixed_point": partial(settled, pull=partial(pulled, **pull_of(settings))),
            **more,
        },
    )


def pull_of(settings: dict[str, Any]) -> dict[str, float]:
    """The settings that change how far a client is pulled."""
    return {n: settings[n] for n in ("mu", "implicit", "local_momentum") if n in settings}


def pulled(
    a: float,
    lr: float,
    steps: int,
    mu: float = 0.0,
    local_momentum: float = 0.0,
    implicit: bool = False,
) -> float:
    """D_K for c − w = 1: K steps of gradient descent down a/2 (v − c)² + μ/2 (v − w)².

    D_{i+1} = (1 − η(a + μ)) D_i + η a  gives  D_K = a (1 − (1 − η(a + μ))^K)/(a + μ). Implicit steps have
    η/(1 + ημ) in place of η; with Alg. 4's momentum φ there is no such form, but the recursion.
    """
    lr = lr / (1 + lr * mu) if implicit else lr
    if not local_momentum:
        return a * (1 - (1 - lr * (a + mu)) ** steps) / (a + mu)
    moved, momentum = 0.0, -a
    for _ in range(steps):
        momentum = local_momentum * momentum + (1 - local_momentum) * a * (moved - 1)
        moved -= lr * momentum
    return moved


NEARLY = {"neutral_is_exact": False}
NO_CLASSES = Exempt("Its loss is one of class probabilities.", "label counts need integer class")
NO_FEATURES = Exempt("It compares what enters the output layer.", "no nn.Linear as its out")
OTHER_CLIENTS = Exempt(
    "The pull towards the clients' models stays: it settles elsewhere, by their Fisher information."
)
NEVER_AT_REST = Exempt(
    "Its perturbation stays ρ long, whichever way w moves last; test_sam.py has where that ends."
)


def adc(name: str, **settings: Any) -> Method:
    """A FedADC case."""
    full = {"beta_local": 0.7, "beta_global": 0.7, "variant": "nesterov", "alpha": 1.0, **settings}
    return case(name, fr.EmbeddedMomentum, fedadc, full, {"beta": 0.0}, **NEARLY)


def adaptive(name: str) -> Method:
    """A case of Reddi et al.'s Alg. 2."""
    settings = {"server_lr": 0.02, "beta_1": 0.8, "tau": 0.01}
    if name != "FedAdagrad":
        settings["beta_2"] = 0.95
    rule = name.removeprefix("Fed").lower()
    oracle = {key.replace("_1", "1").replace("_2", "2"): v for key, v in settings.items()}
    return case(
        name,
        [fr.AdaptiveServer(rule, 0.02, 0.8, settings.get("beta_2", 0.0), 0.01)],
        fedopt,
        settings,
        # the adaptivity gone: Δ · η/(√v + τ) with η = τ, both beyond any √v
        {"server_lr": 1e9, "tau": 1e9, "beta_1": 0.0, "initial_v": 0.0},
        {**oracle, "server": rule},
        settling={"server_lr": 1.0, "tau": 1.0, "beta_1": 0.5},
        **NEARLY,
    )


def elastic(name: str, lam: float, densities: Sequence[float | None], **more: Any) -> Method:
    """A case of EFL, with or without the elastic term and compression."""
    densities = dict(zip(("density_up", "density_down"), densities, strict=True))
    return case(
        name,
        [fr.Elastic(lam, **more), fr.SparseTernary(**densities)],
        efl,
        {"lam": lam, **densities, **more},
        {"lam": 0.0},
        unsettled=OTHER_CLIENTS if lam else None,
    )


def curvature(name: str, **settings: Any) -> Method:
    """A case of FedCurv."""
    return case(name, fr.Curvature, fedcurv, settings, {"lam": 0.0}, unsettled=OTHER_CLIENTS)


def minimum(curvatures: Numbers, centres: Numbers, weights: Numbers, *_: Any) -> float:
    """Where ``Σ p_k a_k (v − c_k) = 0``: the minimum of the clients' common loss, whatever their steps."""
    parts = [(p * a, c) for a, c, p in zip(curvatures, centres, weights, strict=True)]
    return sum(part * c for part, c in parts) / sum(part for part, _ in parts)


def driftless(name: str, terms: Any, oracle: Any, *settings: dict[str, Any]) -> Method:
    """A case of a method that settles where no client drifts, whatever its settings."""
    given, *own = settings
    why = f"No setting of {name.partition('-')[0]} makes it FedAvg."
    return case(name, terms, oracle, given, why, *own, fixed_point=minimum)


def control(name: str, **settings: Any) -> Method:
    """A case of SCAFFOLD."""
    rates = {n: v for n, v in settings.items() if n != "server_lr"}
    sgd = [t for t in fr.SCAFFOLD(**settings).term.terms if isinstance(t, Steps)]
    own = {n: v for n, v in settings.items() if n != "state"}
    return driftless(name, [fr.ControlVariates(**rates), *sgd], scaffold, settings, own)


def lesam(name: str, more: list[Term], oracle: Any, given: dict[str, Any], neutral: Any) -> Method:
    """A case of FedLESAM, alone or with another method."""
    terms, settings = [fr.GlobalPerturbation(0.1), *more], {"rho": 0.1, **given}
    return case(f"FedLESAM{name}", terms, oracle, settings, neutral, unsettled=NEVER_AT_REST)


def heavy_ball(a: float, lr: float, steps: int, momentum: float) -> float:
    """D_K for c − w = 1: K steps of heavy-ball SGD down a/2 (v − c)², from rest."""
    moved = speed = 0.0
    for _ in range(steps):
        speed = momentum * speed + a * (moved - 1)
        moved -= lr * speed
    return moved


def nova(name: str, **settings: Any) -> Method:
    """A case of FedNova, which settles where FedAvg does if all clients take equally many steps."""
    ball = partial(settled, pull=partial(heavy_ball, momentum=settings.get("momentum", 0.0)))
    why = "It weighs clients by their steps, which no setting switches off."
    point = {} if "mu" in settings else {"fixed_point": ball}
    return case(name, fr.NormalizedAveraging, fednova, settings, why, **point)


def blended(name: str, alpha: float, **wire: Any) -> Method:
    """A case of FedCM, which settles where FedAvg with a learning rate of αη does: Δ_t is gone there."""
    given = {"alpha": alpha, **wire}
    point = partial(settled, pull=lambda a, lr, steps: sgd_pull(a, alpha * lr, steps))
    return case(name, fr.ClientMomentum, fedcm, given, {"alpha": 1.0}, fixed_point=point)


def sharper(
    curvatures: Numbers, centres: Numbers, weights: Numbers, lr: float, steps: int, rho: float
) -> float:
    """FedSAM's fixed point, between the centres: each gradient is as of a centre that is ρ further out."""
    return settled(curvatures, further(centres, rho), weights, lr, steps)


def further(centres: Numbers, rho: float) -> list[float]:
    """The centres, ρ further out: as if there, FedSAM's gradients are between them."""
    middle = sum(centres) / len(centres)
    return [c + (rho if c > middle else -rho) for c in centres]


def fairer(
    curvatures: Numbers, centres: Numbers, weights: Numbers, lr: float, steps: int, q: float
) -> float:
    """q-FedAvg's fixed point: F_1^q D_1 (w − c_1) = F_2^q D_2 (c_2 − w), with F_k = a_k/2 (w − c_k)²."""
    one, two = (a**q * sgd_pull(a, lr, steps) for a in curvatures)
    ratio = (one / two) ** (1 / (1 + 2 * q))  # of c_2 − w to w − c_1
    return (centres[1] + ratio * centres[0]) / (1 + ratio)


def fair(name: str, q: float) -> Method:
    """A case of q-FedAvg."""
    point = partial(fairer, q=q)
    return case(name, fr.FairWeights, qfedavg, {"q": q}, {"q": 0.0}, fixed_point=point)


def features(name: str, term: Any, oracle: Any, settings: dict[str, Any], **more: Any) -> Method:
    """A case of a method whose loss is of features; 0 for its strength is neutral."""
    neutral = {key: 0.0 if key in ("lam", "mu", "beta") else v for key, v in settings.items()}
    return case(name, term, oracle, settings, neutral, **{"unsettled": NO_FEATURES, **more})


def contrast(name: str, **settings: Any) -> Method:
    """A case of MOON."""
    full = {"mu": 5.0, "temperature": 0.5, **settings}
    why = "'0' is not a layer of Point" if settings else NO_FEATURES.refusal
    told = {"mu": 5.0, "tau": 0.5, **settings}
    refused = Exempt(NO_FEATURES.why, why)
    return features(name, fr.ModelContrast, moon, full, unsettled=refused, oracle_settings=told)


def distilled(
    name: str, term: Any, oracle: Any, settings: Any, neutral: Any, *oracle_settings: Any
) -> Method:
    """A case of a method whose loss is one of class logits."""
    counts = term.needs is not Term.needs and "label_counts" in term.needs
    why = f"{name.partition('-')[0]} needs logits .batch, class"
    refused = NO_CLASSES if counts else Exempt(NO_CLASSES.why, why)
    return case(name, term, oracle, settings, neutral, *oracle_settings, unsettled=refused)


def clouds(
    curvatures: Numbers, centres: Numbers, weights: Numbers, lr: float, steps: int, **amp: float
) -> float:
    """FedAMP's fixed point: each ``v_k`` is where K steps lead from the cloud model of both.

    ``u_k = v_k + ξ (v_j − v_k)``, ``ξ = α e^{−(v_1 − v_2)²/σ}/σ``; ``v_k = u_k + D_K (c_k − u_k)``.
    """
    lam, alpha, sigma = (amp[name] for name in ("lam", "alpha", "sigma"))
    v = [0.0, 0.0]
    for _ in range(10_000):
        xi = alpha * math.exp(-((v[0] - v[1]) ** 2) / sigma) / sigma
        u = [v[0] + xi * (v[1] - v[0]), v[1] + xi * (v[0] - v[1])]
        pull = [pulled(a, lr, steps, mu=lam / alpha) for a in curvatures]
        v = [x + d * (c - x) for x, d, c in zip(u, pull, centres, strict=True)]
    return sum(p * x for p, x in zip(weights, v, strict=True))


def lite_point(
    curvatures: Numbers, centres: Numbers, weights: Numbers, lr: float, steps: int, beta: float
) -> float:
    """Where MimeLite settles: ``Σ p_k D_k = 0`` with ``m = mean a_j (w − c_j)``, which stands still.

    ``v ← v − η ((1−β) a (v − c) + β m)`` moves by ``D_k = −s_k (w − c_k + β m / ((1−β) a_k))`` in K steps,
    ``s_k = 1 − (1 − η (1−β) a_k)^K``. Linear in w: the root from its values at 0 and 1.
    """

    def moved(w: float) -> float:
        m = sum(a * (w - c) for a, c in zip(curvatures, centres, strict=True)) / len(centres)
        return sum(
            p * (1 - (1 - lr * (1 - beta) * a) ** steps) * (w - c + beta * m / ((1 - beta) * a))
            for a, c, p in zip(curvatures, centres, weights, strict=True)
        )

    return moved(0.0) / (moved(0.0) - moved(1.0))


def server_sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Heavy-ball SGD as ServerOpt."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.6)


def served(name: str, settings: dict[str, Any], neutral: dict[str, Any]) -> Method:
    """A case of that on the server."""
    terms, told = [fr.TorchServerOptimizer(server_sgd)], {"server": "momentum", **BALL}
    return case(name, terms, fedopt, settings, neutral, told, **NEARLY)


AMP = {"lam": 0.3, "alpha": 0.2, "sigma": 0.7}
BALL = {"server_lr": 0.7, "momentum": 0.6}
GKD = {"gamma": 1.2, "models": 3, "temperature": 2.0}
BUFFER = {"gamma": 1.2, "buffer": 3, "temperature": 2.0}
PLUS = {"lam": 0.4, "temperature": 2.0}
LITE = partial(lite_point, beta=0.6)
RHO = {"rho": 0.05}
FURTHER = partial(sharper, rho=0.05)
HALF = {"lam": 0.5}
SUM = {"lam": 0.5, "sum_only": True}
SLOW = {"beta": 0.6, "alpha": 0.9}
NTD = {"beta": 1.5, "temperature": 2.0}
TAU = {"beta": 1.5, "tau": 2.0}
UNIT = {"server_optimizer": partial(torch.optim.SGD, lr=1.0)}
EVERYBODY = "It is FedAvg where all clients take part in every round."
ITS_OWN = "The global model is FedAvg's; each client's own is in test_personal.py."
owned = partial(case, unmoved=ITS_OWN)
DYN = "FedDyn is in it, which no setting makes FedAvg."
DRIFT = "No setting of SCAFFOLD makes it FedAvg."
OWN_START = "No setting makes each client start at the global model."
CASES = [
    case("FedAvg", [], fedavg, {}, {}, unmoved="It is FedAvg, and so moves as FedAvg does."),
    case("FedProx", fr.Proximal, fedprox, {"mu": 0.7}, {"mu": 0.0}),
    case("FedProx-implicit", fr.Proximal, fedprox, {"mu": 20.0, "implicit": True}, {"mu": 0.0}),
    case("FedFOR-model", fr.FirstOrder, fedfor, {"alpha": 0.6}, {"alpha": 0.0}),
    case("FedFOR-default", fr.FirstOrder, fedfor, {}, {"alpha": 0.0}, {"alpha": None}),
    case(
        "FedFOR-delta", fr.FirstOrder, fedfor, {"alpha": 0.6, "downlink": "delta"}, {"alpha": 0.0}
    ),
    blended("FedCM", 0.4),
    blended("FedCM-delta", 0.4, downlink="delta"),
    case("FedSAM", fr.LocalPerturbation, sam.fedsam, RHO, {"rho": 0.0}, fixed_point=FURTHER),
    lesam("", [], sam.fedlesam, {}, {"rho": 0.0}),
    case(
        "FedSpeed",
        [fr.LocalPerturbation(0.1, 0.7), fr.DynamicRegulariser(0.4)],
        fedspeed,
        {"lam": 0.4, "rho": 0.1, "alpha": 0.7},
        DYN,
        fixed_point=lambda a, c, p, *_: minimum(a, further(c, 0.07), p),
    ),
    case(
        "FedSMOO",
        [fr.CommonPerturbation(0.1), fr.DynamicRegulariser(0.4)],
        fedsmoo,
        {"lam": 0.4, "rho": 0.1},
        DYN,
        unsettled=Exempt("Its perturbations stay ρ long, and move the minimum by some of it."),
    ),
    case(
        "FedInit",
        fr.RelaxedStart,
        fedinit,
        {"beta": 0.3},
        {"beta": 0.0},
        # the end of a round solves v = (1 − s)(w + β(w − v)) + s c, with s = FedAvg's pull
        fixed_point=partial(settled, pull=lambda *at: (s := pulled(*at)) / (1 + 0.3 * (1 - s))),
    ),
    case(
        "FedAdamW",
        fr.SharedMoments,
        fedadamw,
        {"gamma": 0.5},
        "Its clients run AdamW, which no setting makes SGD.",
        unsettled=Exempt("AdamW's steps do not get shorter near the minimum."),
    ),
    case("FedVARP", fr.LastUpdates, fedvarp, {}, {}, unmoved=EVERYBODY, **NEARLY),
    case(
        "MoFedSAM",
        [fr.LocalPerturbation(0.05), fr.ClientMomentum(0.4)],
        sam.mofedsam,
        {"rho": 0.05, "alpha": 0.4},
        {"rho": 0.0, "alpha": 1.0},
        fixed_point=lambda a, c, p, lr, k: sharper(a, c, p, 0.4 * lr, k, 0.05),
    ),
    case(
        "FedGAMMA",
        [fr.LocalPerturbation(0.05), *control("SCAFFOLD", server_lr=0.8).terms],
        sam.fedgamma,
        {"rho": 0.05, "server_lr": 0.8},
        "No setting of FedGAMMA makes it FedAvg.",
        fixed_point=lambda a, c, p, *_: minimum(a, further(c, 0.05), p),
    ),
    lesam("S", [fr.ControlVariates()], sam.fedlesam_s, {}, DRIFT),
    lesam("D", [fr.DynamicRegulariser(0.4)], sam.fedlesam_d, {"alpha": 0.4}, DYN),
    case(
        "FedACG",
        [fr.Proximal(0.7), fr.LookaheadMomentum(0.6)],
        fedacg,
        {"lam": 0.6, "mu": 0.7},
        {"lam": 0.0, "mu": 0.0},
        **NEARLY,
    ),
    case("FedExP", fr.Extrapolation, fedexp, {"eps": 1e-3}, {"eps": 1e9}, settling={"eps": 0.2}),
    fair("QFedAvg", 1.0),
    fair("QFedAvg-small", 0.3),
    control("SCAFFOLD", server_lr=0.8),
    control("SCAFFOLD-option-1", option=1),
    control("SCAFFOLD-server", state="server"),
    control("SCAFFOLD-server-1", state="server", option=1),
    driftless("FedDyn", fr.DynamicRegulariser, feddyn, {"alpha": 0.4}),
    nova("FedNova"),
    nova("FedNova-momentum", momentum=0.6),
    nova("FedNova-proximal", mu=0.7),
    driftless("VRLSGD", fr.GradientTracking, vrlsgd, {}),
    driftless("FedGATE", [fr.GradientTracking(0.8)], fedgate, {"server_lr": 0.8}),
    adc("FedADC-nesterov"),
    adc("FedADC-heavy-ball", variant="heavy-ball", alpha=0.8),
    adc("FedADC-unequal-betas", beta_local=0.4, beta_global=0.8),
    adc("FedADC-unequal-heavy-ball", beta_local=0.8, beta_global=0.5, variant="heavy-ball"),
    adc("FedADC-delta", downlink="delta", beta_local=0.4),
    adc("FedADC-double-momentum", local_momentum=0.6),
    adc("FedADC-double-momentum-1", beta_local=1.0, beta_global=1.0, local_momentum=0.6),
    case(
        "FedADCPlus",
        [fr.SelfDistillation(**PLUS), fr.EmbeddedMomentum(0.7, 0.7)],
        fedadc_plus,
        {"beta": 0.7, **PLUS},
        {"beta": 0.0, "lam": 0.0},
        {"beta_local": 0.7, "beta_global": 0.7, **PLUS},
        unsettled=NO_CLASSES,
        **NEARLY,
    ),
    case("SlowMo", fr.SlowMomentum, slowmo, SLOW, {"beta": 0.0}, **NEARLY),
    served("FedOpt", {"server_optimizer": server_sgd}, UNIT),
    served("FedAvgM", BALL, {"momentum": 0.0}),
    features("RFedAvg", fr.FeatureTable, rfedavg, HALF),
    features("RFedAvgPlus", fr.LeaveOneOutMean, rfedavg_plus, HALF),
    features("RFedAvgPlus-sum", fr.LeaveOneOutMean, rfedavg_plus, SUM, oracle_settings=HALF),
    contrast("MOON"),
    contrast("MOON-projection", projection="0"),
    features("FedDecorr", fr.Decorrelation, feddecorr, {"beta": 0.7}),
    distilled("FedNTD", fr.NotTrueDistillation, fedntd, NTD, {"beta": 0.0}, TAU),
    distilled("FedLC", fr.LogitCalibration, fedlc, {"tau": 0.8}, {"tau": 0.0}),
    distilled(
        "FedLC-absent", fr.LogitCalibration, fedlc, {"tau": 0.8, "absent": 1.0}, {"tau": 0.0}
    ),
    distilled("FedRS", fr.RestrictedSoftmax, fedrs, {"alpha": 0.4}, {"alpha": 1.0}),
    distilled("FedGKD", fr.PastModels, fedgkd, GKD, {"gamma": 0.0}, BUFFER),
    curvature("FedCurv", lam=0.5),
    curvature("FedCurv-implicit", lam=3.0, implicit=True),
    elastic("EFL", 0.5, (0.3, 0.4)),
    elastic("EFL-implicit", 5.0, (0.4, None), implicit=True),
    elastic("EFL-up", 0.0, (0.2, None)),
    elastic("EFL-down", 0.3, (None, 0.2)),
    elastic("EFL-signs", 0.0, (1.0, 1.0)),
    elastic("EFL-sums", 0.5, (0.3, 0.4), sums_bits=16, sums_every=2, sums_density=0.3),
    elastic("EFL-sums-16", 0.5, (None, None), sums_bits=16),
    adaptive("FedAdagrad"),
    adaptive("FedAdam"),
    adaptive("FedYogi"),
    owned("Ditto", fr.PersonalModel, ditto, {"lam": 0.4, "personal_lr": 0.3}, {"lam": 0.0}),
    owned("APFL", fr.MixedModel, apfl, {"alpha": 0.3}, {"alpha": 0.0, "adaptive": False}),
    case(
        "FedBABU",
        fr.FixedHead,
        fedbabu,
        {},
        "No setting of FedBABU trains the output layer.",
        unsettled=Exempt("The one parameter there is in no layer.", "found no layer with a weight"),
    ),
    case("FedAMP", fr.CloudModel, fedamp, AMP, OWN_START, fixed_point=partial(clouds, **AMP)),
    driftless("Mime", fr.CorrectedMomentum, mime, {"beta": 0.6}),
    driftless("Mime-without-momentum", fr.CorrectedMomentum, mime, {"beta": 0.0}),
    case("MimeLite", fr.FixedMomentum, mimelite, {"beta": 0.6}, {"beta": 0.0}, fixed_point=LITE),
]
