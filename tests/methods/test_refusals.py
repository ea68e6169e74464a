"""What methods refuse: settings at their bounds, terms beside each other, configs, clients' optimisers."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import Message

import flwr_regs as fr
from flwr_regs.term import Term
from flwr_regs.testing.problem import app_of, train
from flwr_regs.wire import keys
from tests.conftest import make_clients, make_model

SETTINGS: list[tuple[Callable[[], Any], str]] = [
    (lambda: fr.APFL(alpha=1.1), "APFL: alpha must be a number from 0 to 1, not 1.1"),
    (lambda: fr.APFL(adaptive=1), "adaptive must be True or False"),
    (lambda: fr.Ditto(personal_lr=0), "personal_lr must be a positive number, or None"),
    (lambda: fr.EFL(0.1, density_up=0.0), "density_up must be a number above 0, up to 1, or None"),
    (lambda: fr.EFL(0.1, density_down=1.1), "density_down must be a number above 0, up to 1"),
    (lambda: fr.EFL(0.1, sums_bits=8), "EFL: sums_bits must be 16 or 32, or None, not 8"),
    (lambda: fr.EFL(0.1, sums_every=0), "sums_every must be a whole number of at least 1"),
    (lambda: fr.EFL(0.1, sums_density=0.0), "sums_density must be a number above 0, up to 1"),
    (lambda: fr.FedADC(beta=1.0), "FedADC: beta must be a number from 0 to below 1, not 1.0"),
    (lambda: fr.FedADC(alpha=0.0), "FedADC: alpha must be a positive number, not 0.0"),
    (lambda: fr.FedADC(variant="red"), "variant must be 'nesterov' or 'heavy-ball', not 'red'"),
    (lambda: fr.FedADC(beta_local=1.0, beta_global=0.5), "FedADC: beta_local must be .* below 1"),
    (lambda: fr.FedADC(local_momentum=0.5, beta_local=0.1, beta_global=0.2), "has one beta"),
    (lambda: fr.FedADCPlus(lam=1.5), "FedADCPlus: lam must be a number from 0 to 1, not 1.5"),
    (lambda: fr.FedADCPlus(temperature=0.0), "temperature must be a positive number, not 0.0"),
    (lambda: fr.APFL(alpha_every="epoch"), "must be 'round' or 'step', not 'epoch'"),
    (lambda: fr.FedACG(lam=1.0), "FedACG: lam must be a number from 0 to below 1, not 1.0"),
    (lambda: fr.FedGAMMA(0.1, server_lr=0), "FedGAMMA: server_lr must be a positive number, not 0"),
    (lambda: fr.FedAMP(alpha=0), "alpha must be a positive number"),
    (lambda: fr.FedAMP(sigma=0), "sigma must be a positive number"),
    (lambda: fr.FedAdagrad(server_lr=0.0), "FedAdagrad: server_lr must be a positive number"),
    (lambda: fr.FedAdam(server_lr=0.0), "FedAdam: server_lr must be a positive number, not 0.0"),
    (lambda: fr.FedYogi(server_lr=0.0), "FedYogi: server_lr must be a positive number, not 0.0"),
    (lambda: fr.FedAdam(tau=0.0), "FedAdam: tau must be a positive number, not 0.0"),
    (lambda: fr.FedAdam(beta_1=1.0), "beta_1 must be a number from 0 to below 1, not 1.0"),
    (lambda: fr.AdaptiveServer("Adam", 0.1, 0.9, 0.99, 0.001), "rule must be"),
    (lambda: fr.FedAdamW(-0.1), "FedAdamW: gamma must be a number of at least 0, not -0.1"),
    (lambda: fr.FedAvgM(server_lr=0.0), "FedAvgM: server_lr must be a positive number, not 0.0"),
    (lambda: fr.FedBABU("tail"), "personal_part must be one of .*, not 'tail'"),
    (lambda: fr.FedBABU(personal_epochs=0), "personal_epochs must be a whole number"),
    (lambda: fr.FedBABU(layer="a,,b"), "layer must be a string of names"),
    (lambda: fr.Private("a,,b"), "patterns must be a string of names"),
    (lambda: fr.FedCM(0.0), "FedCM: alpha must be a number above 0, up to 1, not 0.0"),
    (lambda: fr.FedCM(1.5), "FedCM: alpha must be"),
    (lambda: fr.FedDecorr(-1), "FedDecorr: beta must be a number of at least 0, not -1"),
    (lambda: fr.FedDyn(0), "alpha must be a positive number"),
    (lambda: fr.FedExP(0), "FedExP: eps must be a positive number, not 0"),
    (lambda: fr.FedGATE(0), "server_lr must be a positive number, not 0"),
    (lambda: fr.FedInit(-0.1), "FedInit: beta must be a number of at least 0, not -0.1"),
    (lambda: fr.FedNova(momentum=1), "momentum must be a number from 0 to below 1, not 1"),
    (lambda: fr.FedNova(momentum=0.5, mu=0.1), r"but got momentum=0.5 and mu=0.1: leave"),
    (lambda: fr.FedSMOO(lam=0), "FedSMOO: lam must be a positive number, not 0"),
    (lambda: fr.FedSMOO(rho=-1), "FedSMOO: rho must be a number of at least 0, not -1"),
    (lambda: fr.FedSpeed(lam=0), "FedSpeed: lam must be a positive number, not 0"),
    (lambda: fr.FedSpeed(alpha=1.1), "FedSpeed: alpha must be a number from 0 to 1, not 1.1"),
    (lambda: fr.Mime(1.0), "beta must be a number from 0 to below 1, not"),
    (lambda: fr.MimeLite(1.0), "beta must be a number from 0 to below 1, not"),
    (lambda: fr.RFedAvg(1.0, delta_batches=0), "delta_batches must be a whole number"),
    (lambda: fr.RFedAvgPlus(1.0, noise_std=1.0), "give both"),
    (lambda: fr.RFedAvgPlus(1.0, clip_norm=0.0), "clip_norm must be a positive number, or None"),
    (lambda: fr.SCAFFOLD(option=3), "option must be 1 or 2, not 3"),
    (lambda: fr.SCAFFOLD(state="both"), "state must be 'client' or 'server', not 'both'"),
    (lambda: fr.SCAFFOLD(server_lr=0), "SCAFFOLD: server_lr must be a positive number, not 0"),
    (lambda: fr.SlowMo(beta=1.0), "SlowMo: beta must be a number from 0 to below 1, not 1.0"),
    (
        lambda: fr.FedAvgClient(make_model(), make_clients()[0], step_budget=-1),
        "FedAvgClient: step_budget must be .*of at least 0, or None",
    ),
    (
        lambda: fr.FedAvgClient(make_model(), make_clients()[0], time_budget=-0.1),
        "FedAvgClient: time_budget must be .*of at least 0, or None",
    ),
]


@pytest.mark.parametrize("row", range(len(SETTINGS)))
def test_a_setting_at_its_bound_is_refused(row: int) -> None:
    build, why = SETTINGS[row]
    with pytest.raises(ValueError, match=why):
        build()


def test_whom_a_method_weighs_alike_unless_it_is_told() -> None:
    newer = (fr.FedSpeed, fr.FedSMOO, fr.FedInit, fr.FedDecorr, fr.FedVARP, fr.FedAdamW)
    for make in (fr.SCAFFOLD, partial(fr.FedDyn, 0.1), fr.VRLSGD, fr.FedGATE, *newer):
        assert make().weighting == "uniform"
    for make in (fr.FedNova, fr.MOON, fr.FedGKD, fr.FedNTD):
        assert make().weighting == "num-examples"


DRIFT, DYN = fr.ControlVariates(), fr.DynamicRegulariser(0.1)
GATE, NOVA = fr.GradientTracking(), fr.NormalizedAveraging()
ADC, OWN = fr.EmbeddedMomentum(0.5, 0.5), fr.PersonalModel()
ONE_OWN = "only one term can give the clients models of their own"
ELSEWHERE = "elsewhere than at w_t, which the other counts from"
BESIDE: list[tuple[list[Term], str]] = [  # in either order
    ([DYN, DRIFT], r"'feddyn' excludes 'scaffold': .*same drift.*keep one"),
    ([GATE, DRIFT], "'gradient-tracking' excludes 'scaffold': .*same drift"),
    ([GATE, DYN], "'gradient-tracking' excludes 'feddyn': .*same drift"),
    ([GATE, NOVA], "'gradient-tracking' excludes 'fednova': its weights do not sum to 1"),
    ([NOVA, fr.Proximal(0.1)], r"'fednova' excludes 'proximal': .*give FedNova mu="),
    ([NOVA, ADC], "'fednova' excludes 'fedadc': .*would multiply FedADC's momentum"),
    ([NOVA, fr.FairWeights(1.0)], "only one term can weigh"),
    ([NOVA, fr.LastUpdates()], "'fedvarp' excludes 'fednova': .*weighs them anew: leave it out"),
    ([GATE, fr.LastUpdates()], "'fedvarp' excludes 'gradient-tracking': .*mean.*keep one"),
    ([GATE, fr.RelaxedStart(0.1)], f"'fedinit' excludes 'gradient-tracking': .*{ELSEWHERE}"),
    ([fr.LocalPerturbation(0.1), fr.CommonPerturbation()], "would count twice: keep one"),
    ([fr.LocalPerturbation(0.1), fr.GlobalPerturbation(0.1)], "would count twice: keep one"),
    ([fr.Extrapolation(), fr.SlowMomentum(0.5)], "only one term can own the server's step"),
    ([fr.LogitCalibration(0.8), fr.RestrictedSoftmax(0.3)], "together would count twice"),
    ([OWN, fr.MixedModel()], ONE_OWN),
    ([OWN, fr.FixedHead()], ONE_OWN),
    ([OWN, fr.CloudModel()], ONE_OWN),
    ([fr.CloudModel(), DRIFT], ELSEWHERE),
    ([fr.CloudModel(), NOVA], ELSEWHERE),
    ([fr.CloudModel(), fr.Extrapolation()], ELSEWHERE),
]


@pytest.mark.parametrize("row", range(len(BESIDE)))
def test_terms_that_do_not_go_together_are_refused(row: int) -> None:
    terms, why = BESIDE[row]
    for order in (terms, terms[::-1]):
        with pytest.raises(ValueError, match=why):
            fr.RegStrategy(order)


OTHER, ADDS_UP = "takes other ones", "SGD without momentum of their own"
NOVA_BALL = partial(fr.FedNova, 0.5)
MIME, LITE = partial(fr.Mime, 0.5), partial(fr.MimeLite, 0.5)
CONFIGS: list[tuple[Any, Any, dict[str, Any], str]] = [
    (fr.FedADC, fr.FedADCClient, {"momentum": 0.9}, ADDS_UP),
    (fr.SCAFFOLD, fr.SCAFFOLDClient, {"momentum": 0.9}, f"option 2.*SGD with momentum {OTHER}"),
    (fr.SCAFFOLD, fr.SCAFFOLDClient, {"optimizer": "Adam"}, f"Adam {OTHER}: leave that out"),
    (fr.SCAFFOLD, fr.SCAFFOLDClient, {"clip-norm": 1.0}, "'clip-norm' .* clips their gradients"),
    (MIME, fr.MimeClient, {"momentum": 0.9}, f"by plain SGD, but SGD with momentum {OTHER}"),
    (MIME, fr.MimeClient, {"weight-decay": 0.1}, f"SGD with weight_decay {OTHER}"),
    (LITE, fr.MimeLiteClient, {"optimizer": "Adam"}, f"by plain SGD, but Adam {OTHER}"),
    (NOVA_BALL, fr.FedNovaClient, {"momentum": 0.9}, "SGD with momentum weighs"),
    (fr.FedNova, fr.FedNovaClient, {"optimizer": "Adam"}, "Adam weighs their"),
    (partial(fr.FedNova, mu=6.0), fr.FedNovaClient, {}, r"lr · mu < 1.*1\.2"),
    (partial(fr.VRLSGD, incomplete="scale"), fr.VRLSGDClient, {}, "'scale' does"),
    (partial(fr.FedVARP, incomplete="scale"), fr.FedVARPClient, {}, "use incomplete='average'"),
    (fr.FedAdamW, fr.FedAdamWClient, {"weight-decay": 0.1}, "but SGD with weight_decay steps in"),
]


@pytest.mark.parametrize("row", range(len(CONFIGS)))
def test_a_config_is_refused_before_any_client_is_contacted(row: int) -> None:
    make, client, config, why = CONFIGS[row]
    contacted: list[str] = []

    class Noting(fr.InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            contacted.extend(m.metadata.message_type for m in messages)
            return super().push_messages(messages)

    grid, strategy = Noting(app_of(client, make_clients()), 4), make(seed=1)
    with pytest.raises(ValueError, match=why):
        train(strategy, client, grid=grid, length={"local-epochs": 1, **config})
    assert not {"train", keys.PROBE} & {*contacted}


def test_a_config_that_changes_no_weight_of_a_gradient_is_taken() -> None:
    """SCAFFOLD's option 1 takes any optimiser; a pull may pass its limit in a later round alone."""
    config = {"local-steps": 1, "momentum": 0.9, "clip-norm": 1.0}
    train(fr.SCAFFOLD(seed=1, option=1), fr.SCAFFOLDClient, rounds=1, length=config)
    config = {"local-steps": 1, "weight-decay": 0.1, "clip-norm": 1.0}
    strategy = fr.FedNova(mu=2.0, seed=1, lr_schedule=lambda t: 3.0 if t == 2 else 1.0)
    with pytest.raises(ValueError, match=r"lr=0\.6 and mu=2 make 1\.2: use a smaller mu"):
        train(strategy, fr.FedNovaClient, length=config)
    assert len(strategy.history) == 1


SGD = torch.optim.SGD
WEIGHS = "weighs their gradients in another way"


def slower(params: Any, lr: float) -> torch.optim.Optimizer:
    return SGD(params, lr=lr / 2)


OPTIMIZERS: list[tuple[Any, Any, Any, str]] = [
    (fr.FedADC, fr.FedADCClient, torch.optim.Adam, ADDS_UP),
    (partial(fr.FedADC, local_momentum=0.5), fr.FedADCClient, partial(SGD, momentum=0.9), ADDS_UP),
    (fr.SCAFFOLD, fr.SCAFFOLDClient, torch.optim.Adam, f"Adam {OTHER}"),
    (
        fr.SCAFFOLD,
        fr.SCAFFOLDClient,
        partial(SGD, weight_decay=0.5, momentum=0.5, maximize=True),
        "SGD with momentum and maximize takes",
    ),
    (fr.SCAFFOLD, fr.SCAFFOLDClient, slower, "SGD with a learning rate of its own"),
    (MIME, fr.MimeClient, torch.optim.AdamW, f"AdamW with weight_decay {OTHER}"),
    (LITE, fr.MimeLiteClient, torch.optim.AdamW, f"weight_decay {OTHER}"),
    (fr.FedNova, fr.FedNovaClient, partial(SGD, momentum=0.5), WEIGHS),
    (fr.FedNova, fr.FedNovaClient, partial(SGD, dampening=0.5), WEIGHS),
    (fr.VRLSGD, fr.VRLSGDClient, partial(SGD, momentum=0.5), r"drift.*SGD with momentum takes"),
    (fr.FedAdamW, fr.FedAdamWClient, torch.optim.Adam, "run AdamW without amsgrad, but Adam steps"),
    (
        fr.FedAdamW,
        fr.FedAdamWClient,
        partial(torch.optim.AdamW, amsgrad=True),
        "AdamW with weight_decay and amsgrad",
    ),
]


@pytest.mark.parametrize("row", range(len(OPTIMIZERS)))
def test_a_clients_own_optimiser_is_refused(row: int) -> None:
    make, client, optimizer, why = OPTIMIZERS[row]
    with pytest.raises(fr.RoundFailed, match=why):
        train(make(seed=1), client, rounds=1, optimizer=optimizer)
