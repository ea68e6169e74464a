"""What methods refuse: settings at their bounds, terms beside each other, configs, clients' optimisers."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.client import LocalTraining
from flwr_regs.methods.parts.sgd import unlike_sgd
from flwr_regs.term import Term
from flwr_regs.testing.problem import app_of, train
from flwr_regs.wire import keys
from tests.conftest import Watching, make_clients, make_model

BOUNDS: list[tuple[str, float, str]] = [
    # what a number must be, one just beyond, and whose it is
    (
        "a positive number",
        0.0,
        "FedADC.alpha FedADCPlus.temperature FedAMP.alpha FedAMP.sigma FedAdagrad.server_lr "
        "FedAdam.server_lr FedAdam.tau FedAvgM.server_lr FedDyn.alpha FedExP.eps FedGAMMA.server_lr "
        "FedGATE.server_lr FedSMOO.lam FedSpeed.lam FedYogi.server_lr SCAFFOLD.server_lr "
        "Ditto.personal_lr RFedAvgPlus.clip_norm",
    ),
    ("a number from 0 to below 1", 1.0, "FedACG.lam FedADC.beta FedAdam.beta_1 FedNova.momentum"),
    ("a number from 0 to below 1", 1.0, "Mime.beta MimeLite.beta SlowMo.beta"),
    ("a number from 0 to 1", 1.1, "APFL.alpha FedADCPlus.lam FedSpeed.alpha"),
    ("a number above 0, up to 1", 0.0, "EFL.density_up EFL.sums_density FedCM.alpha"),
    ("a number above 0, up to 1", 1.1, "EFL.density_down FedCM.alpha"),
    ("a number of at least 0", -0.1, "FedAdamW.gamma FedDecorr.beta FedInit.beta FedSMOO.rho"),
    ("a whole number of at least 1", 0, "EFL.sums_every FedBABU.personal_epochs"),
    ("a whole number of at least 1", 0, "RFedAvg.delta_batches"),
]
NEEDED = {"EFL": "lam", "FedGAMMA": "rho", "RFedAvg": "lam", "RFedAvgPlus": "lam"}
"""Methods with a number that has no default."""


@pytest.mark.parametrize(("must_be", "beyond", "names"), BOUNDS)
def test_a_number_beyond_its_bound_is_refused(must_be: str, beyond: float, names: str) -> None:
    for method, _, name in (n.partition(".") for n in names.split()):
        needed = {NEEDED[method]: 0.1} if method in NEEDED else {}
        said = rf"{name} must be {must_be}(, or None)?, not {beyond}"
        with pytest.raises(ValueError, match=said):
            getattr(fr, method)(**{**needed, name: beyond})
        within = 1 if "whole" in must_be else 0.5
        of_torch, plain = (
            repr(getattr(fr, method)(**{**needed, name: number, "seed": 1}).term)
            for number in (torch.tensor(within), within)
        )
        assert of_torch == plain


SETTINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: fr.APFL(adaptive=1), "adaptive must be True or False"),
    (lambda: fr.APFL(alpha_every="epoch"), "must be 'round' or 'step', not 'epoch'"),
    (lambda: fr.EFL(0.1, sums_bits=8), "EFL: sums_bits must be 16 or 32, or None, not 8"),
    (lambda: fr.FedADC(variant="red"), "variant must be 'nesterov' or 'heavy-ball', not 'red'"),
    (lambda: fr.FedADC(beta_local=1.0, beta_global=0.5), "FedADC: beta_local must be .* below 1"),
    (lambda: fr.FedADC(local_momentum=0.5, beta_local=0.1, beta_global=0.2), "has one beta"),
    (lambda: fr.AdaptiveServer("Adam", 0.1, 0.9, 0.99, 0.001), "rule must be"),
    (lambda: fr.FedBABU("tail"), "personal_part must be 'head' or .*, not 'tail'"),
    (lambda: fr.FedBABU(layer="a,,b"), "layer must be a string of names"),
    (lambda: fr.FedNova(momentum=0.5, mu=0.1), r"but got momentum=0.5 and mu=0.1: leave"),
    (lambda: fr.RFedAvgPlus(1.0, noise_std=1.0), "give both"),
    (lambda: fr.SCAFFOLD(option=3), "option must be 1 or 2, not 3"),
    (lambda: fr.SCAFFOLD(state="both"), "state must be 'client' or 'server', not 'both'"),
    (lambda: fr.TrimmedMean(0.5), "TrimmedMean: share must be a number from 0 to below"),
    (lambda: fr.NormBound(0.0), "NormBound: max_norm must be a positive number, or"),
    (lambda: fr.FedAvg(weighting="equal"), "must be 'num-examples' or 'uniform', not 'equal'"),
    (lambda: fr.FedAvg(seed=7.0), "seed must be a whole number of at least 0, not 7.0"),
    (lambda: fr.FedAvg(aggregator=fr.Krum), r"aggregator must be .*, such as Mean\(\) .*, not <cl"),
    (lambda: fr.FedAvg(checkpoint_every=0), "must be at least 1 round, or a positive timedelta"),
    (lambda: client(keep_optimizer=1), "keep_optimizer must be True or False, not 1"),
    (lambda: fr.FedAvg(terms=[fr.Proximal(0.1)]), "FedAvg fixes its terms; use RegStrategy for"),
    (lambda: fr.FedExP(terms=[]), "FedExP fixes its terms; use RegStrategy for"),
    (lambda: fr.FedAvg(term=1), "FedAvg takes no argument 'term'$"),
    (lambda: chain([fr.Proximal]), "chain's terms are instances, such as .*, not the class Prox"),
    (lambda: train_alone(lr=math.nan, steps=1), "LocalTraining: lr must be a positive number, not"),
    (lambda: train_alone(lr=0.1, epochs=1.5), "LocalTraining: epochs must be a whole number"),
    (lambda: fr.client_app(client, once="no"), "client_app: once must be True or False"),
    (lambda: fr.RegClientApp(label_counts=[3]), "label_counts must be a function"),
    (lambda: fr.trainable(fr.FedAvg), "trainable takes a model, a torch.nn.Module, not "),
    (lambda: fr.float32_arrays({}), "float32_arrays takes a model, a torch.nn.Module, not dict"),
    (lambda: client(share_label_counts="no"), "share_label_counts must be True or False, not 'no'"),
    (lambda: client(step_budget=-1), "FedAvgClient: step_budget must be .*of at least 0, or None"),
    (lambda: client(time_budget=-0.1), "FedAvgClient: time_budget must be .*of at least 0, or"),
]


def test_a_strategy_that_hands_its_terms_on_takes_them() -> None:
    hands_on: Any = lambda self, **how: fr.RegStrategy.__init__(self, **how)  # noqa: E731
    kind: Any = type("Mine", (fr.RegStrategy,), {"method": "mine", "__init__": hands_on})
    assert kind(terms=[fr.Proximal(0.1)]).term.terms == (fr.Proximal(0.1),)


def client(**settings: Any) -> fr.FedAvgClient:
    return fr.FedAvgClient(make_model(), make_clients()[0], **settings)


def train_alone(**settings: Any) -> Any:
    return LocalTraining(make_model(), chain([]), make_clients()[0], **settings)


@pytest.mark.parametrize(("build", "why"), SETTINGS)
def test_a_setting_that_is_none_of_those_is_refused(build: Callable[[], Any], why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        build()


def test_whom_a_method_weighs_alike_unless_it_is_told() -> None:
    newer = (fr.FedSpeed, fr.FedSMOO, fr.FedInit, fr.FedDecorr, fr.FedVARP, fr.FedAdamW)
    for make in (fr.SCAFFOLD, partial(fr.FedDyn, 0.1), fr.VRLSGD, fr.FedGATE, *newer):
        assert make().weighting == "uniform"
    for make in (fr.FedNova, fr.MOON, fr.FedGKD, fr.FedNTD):
        assert make().weighting == "num-examples"


DRIFT, DYN = fr.ControlVariates(), fr.DynamicRegulariser(0.1)
GATE, NOVA = fr.GradientTracking(), fr.NormalizedAveraging()
ADC = fr.EmbeddedMomentum(0.5, 0.5)
ELSEWHERE = "elsewhere than at w_t, which the other counts from"
BESIDE: list[tuple[list[Term], str]] = [  # in either order
    ([DYN, DRIFT], r"'feddyn' excludes 'scaffold': .*same drift.*keep one"),
    ([GATE, DRIFT], "'gradient-tracking' excludes 'scaffold': .*same drift"),
    ([GATE, DYN], "'gradient-tracking' excludes 'feddyn': .*same drift"),
    ([GATE, NOVA], "'fednova' weighs the updates anew, but 'gradient-tracking' counts"),
    ([NOVA, fr.Proximal(0.1)], r"'fednova' excludes 'proximal': .*give FedNova mu="),
    ([NOVA, ADC], "'fednova' excludes 'fedadc': .*would multiply FedADC's momentum"),
    ([NOVA, fr.FairWeights(1.0)], "only one term can weigh"),
    ([NOVA, fr.LastUpdates()], "'fednova' weighs the updates anew, but 'fedvarp' counts on their"),
    ([GATE, fr.LastUpdates()], "'fedvarp' excludes 'gradient-tracking': .*mean.*keep one"),
    ([GATE, fr.RelaxedStart(0.1)], f"'fedinit' excludes 'gradient-tracking': .*{ELSEWHERE}"),
    ([fr.LocalPerturbation(0.1), fr.CommonPerturbation()], "would count twice: keep one"),
    ([fr.LocalPerturbation(0.1), fr.GlobalPerturbation(0.1)], "would count twice: keep one"),
    ([fr.Extrapolation(), fr.SlowMomentum(0.5)], "only one term can own the server's step"),
    ([fr.LogitCalibration(0.8), fr.RestrictedSoftmax(0.3)], "together would count twice"),
    ([fr.PersonalModel(), fr.MixedModel()], "only one term can give the clients models of their"),
    ([fr.CloudModel(), DRIFT], ELSEWHERE),
    ([fr.CloudModel(), NOVA], ELSEWHERE),
    ([fr.CloudModel(), fr.Extrapolation()], ELSEWHERE),
]


@pytest.mark.parametrize(("terms", "why"), BESIDE)
def test_terms_that_do_not_go_together_are_refused(terms: list[Term], why: str) -> None:
    for order in (terms, terms[::-1]):
        with pytest.raises(ValueError, match=why):
            fr.RegStrategy(order)


OTHER, ADDS_UP = "may take other steps", "SGD without momentum of their own"
NOVA_BALL = partial(fr.FedNova, 0.5)
MIME, LITE = partial(fr.Mime, 0.5), partial(fr.MimeLite, 0.5)
CONFIGS: list[tuple[Any, Any, dict[str, Any], str]] = [
    (fr.FedADC, fr.FedADCClient, {"momentum": 0.9}, ADDS_UP),
    (fr.SCAFFOLD, fr.SCAFFOLDClient, {"momentum": 0.9}, f"option 2.*SGD with momentum {OTHER}"),
    (fr.SCAFFOLD, fr.SCAFFOLDClient, {"clip-norm": 1.0}, "'clip-norm' .* clips their gradients"),
    (MIME, fr.MimeClient, {"momentum": 0.9}, f"by plain SGD, but SGD with momentum {OTHER}"),
    (MIME, fr.MimeClient, {"weight-decay": 0.1}, f"SGD with weight_decay {OTHER}"),
    (LITE, fr.MimeLiteClient, {"optimizer": "Adam"}, f"by plain SGD, but Adam {OTHER}"),
    (NOVA_BALL, fr.FedNovaClient, {"momentum": 0.9}, "SGD with momentum weighs"),
    (fr.FedNova, fr.FedNovaClient, {"optimizer": "Adam"}, "Adam weighs their"),
    (partial(fr.FedNova, mu=6.0), fr.FedNovaClient, {}, r"lr · mu < 1.*1\.2"),
    (fr.FedAdamW, fr.FedAdamWClient, {"weight-decay": 0.1}, "but SGD with weight_decay steps in"),
]


@pytest.mark.parametrize("row", range(len(CONFIGS)))
def test_a_config_is_refused_before_any_client_is_contacted(row: int) -> None:
    make, client, config, why = CONFIGS[row]
    grid, strategy = Watching(app_of(client, make_clients()), 4), make(seed=1)
    with pytest.raises(ValueError, match=why):
        train(strategy, client, grid=grid, length={"local-epochs": 1, **config})
    assert not {"train", keys.PROBE} & {*grid.kinds}


def test_a_users_optimiser_counts_as_sgd_if_its_class_declares_so() -> None:
    own = type("Own", (torch.optim.Adagrad,), {})
    assert "set plain_sgd = True in its class" in unlike_sgd(own)
    own.plain_sgd = True  # type: ignore[attr-defined]
    assert unlike_sgd(own) == ""


@pytest.mark.parametrize("other", [{"momentum": 0.9}, {"lr": 0.5}])
def test_each_group_of_an_optimisers_parameters_must_be_plain_sgd(other: dict[str, float]) -> None:
    def make(params: Any, lr: float) -> torch.optim.Optimizer:
        groups = [{"params": params[:1]}, {"params": params[1:], **other}]
        return torch.optim.SGD(groups, lr=lr)

    assert unlike_sgd(make)
    assert not unlike_sgd(lambda params, lr: torch.optim.SGD([{"params": params}], lr=lr))


@pytest.mark.parametrize(
    "make", [partial(fr.FedADC, local_momentum=0.5), partial(fr.FedNova, momentum=0.5)]
)
def test_an_optimiser_that_cannot_take_what_the_method_sets_is_refused(make: Any) -> None:
    (term,) = make().term.terms
    assert term.client_optimizer(torch.optim.SGD).keywords["momentum"] == 0.5
    with pytest.raises(ValueError, match=r"the method sets momentum.* does not take"):
        term.client_optimizer(lambda params, lr: torch.optim.SGD(params, lr=lr))


def test_a_config_that_changes_no_weight_of_a_gradient_is_taken() -> None:
    """SCAFFOLD's option 1 takes any optimiser; a pull may pass its limit in a later round alone."""
    config = {"local-steps": 1, "momentum": 0.9, "clip-norm": 1.0}
    train(fr.SCAFFOLD(seed=1, option=1), fr.SCAFFOLDClient, rounds=1, length=config)
    config = {"local-steps": 1, "weight-decay": 0.1}
    for name in ("SCAFFOLD", "VRLSGD", "FedGATE"):  # it is a part of the gradient that they correct
        train(getattr(fr, name)(seed=1), getattr(fr, f"{name}Client"), rounds=1, length=config)
    config |= {"clip-norm": 1.0}
    strategy = fr.FedNova(mu=2.0, seed=1, lr_schedule=lambda t: 3.0 if t == 2 else 1.0)
    with pytest.raises(ValueError, match=r"lr=0\.6 and mu=2 make 1\.2: use a smaller mu"):
        train(strategy, fr.FedNovaClient, length=config)
    assert ["failed" in entry for entry in strategy.history] == [False, True]


SGD, AMSGRAD = torch.optim.SGD, partial(torch.optim.AdamW, amsgrad=True)
ODD = partial(SGD, weight_decay=0.5, momentum=0.5, maximize=True)
WEIGHS = "weighs their gradients in another way"


def slower(params: Any, lr: float) -> torch.optim.Optimizer:
    return SGD(params, lr=lr / 2)


def by_shape(params: Any, lr: float) -> torch.optim.Optimizer:
    assert len(params) > 1  # those of the model
    return SGD([{"params": p, "momentum": 0.9 * (p.ndim > 1)} for p in params], lr=lr)


OPTIMIZERS: list[tuple[Any, Any, Any, str]] = [
    (fr.FedADC, fr.FedADCClient, slower, f"{ADDS_UP}.*learning rate of its own may"),
    (fr.SCAFFOLD, fr.SCAFFOLDClient, by_shape, f"SGD with momentum {OTHER}"),
    (fr.FedADC, fr.FedADCClient, torch.optim.Adam, ADDS_UP),
    (partial(fr.FedADC, local_momentum=0.5), fr.FedADCClient, partial(SGD, momentum=0.9), ADDS_UP),
    (fr.SCAFFOLD, fr.SCAFFOLDClient, ODD, "SGD with momentum and maximize may take"),
    (MIME, fr.MimeClient, torch.optim.AdamW, f"AdamW with weight_decay {OTHER}"),
    (fr.FedNova, fr.FedNovaClient, partial(SGD, dampening=0.5), WEIGHS),
    (fr.VRLSGD, fr.VRLSGDClient, partial(SGD, momentum=0.5), r"drift.*SGD with momentum may take"),
    (fr.FedAdamW, fr.FedAdamWClient, torch.optim.Adam, "run AdamW without amsgrad, but Adam steps"),
    (fr.FedAdamW, fr.FedAdamWClient, AMSGRAD, "AdamW with weight_decay and amsgrad"),
    (fr.FedFOR, fr.FedFORClient, ODD, "'first-order' adds is to be min.* has maximize=True"),
    (fr.Ditto, fr.DittoClient, ODD, "'ditto' adds is to be minimised, but"),
]


@pytest.mark.parametrize("row", range(len(OPTIMIZERS)))
def test_a_clients_own_optimiser_is_refused(row: int) -> None:
    make, client, optimizer, why = OPTIMIZERS[row]
    with pytest.raises(fr.RoundFailed, match=why):
        train(make(seed=1), client, rounds=1, optimizer=optimizer)
