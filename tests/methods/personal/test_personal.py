"""Clients' own models (Ditto, APFL, FedBABU, FedAMP, calibration): trained, evaluated, lost, saved."""

import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.client import memory
from flwr_regs.client.local_training import local_round
from flwr_regs.client.measure.context_functions import Measures
from flwr_regs.client.personal import calibrate, trained_model
from flwr_regs.client.train.task import Task
from flwr_regs.term import ClientContext, ServerContext, Term
from flwr_regs.testing import Method
from flwr_regs.testing.problem import app_of, to_numpy, train
from tests.conftest import close, dropping, make_clients, make_model, norm_model, start, still
from tests.methods.early_stops import FORGETS, equals_the_oracle
from tests.oracles.model import Params, log_softmax, logits
from tests.oracles.personal.apfl import apfl, mixed
from tests.oracles.personal.ditto import ditto
from tests.oracles.personal.fedamp import fedamp
from tests.oracles.personal.fedbabu import fedbabu, fine_tuned
from tests.sampling import sampled


def case(name: str, oracle: Any, settings: dict[str, Any], **oracles: Any) -> Method:
    """A method; `oracles`: what its oracle takes in place of the settings."""
    strategy, client = getattr(fr, name), getattr(fr, f"{name}Client")
    how = {"settings": settings, "oracle_settings": oracles or settings}
    return Method(strategy, client, [], oracle, **how)


HEAD = {"personal_part": "head", "personal_epochs": 2, "personal_lr": 0.4}
EVERY = {"alpha": 0.4, "alpha_every": "round"}
METHODS = {
    "Ditto": case("Ditto", ditto, {"lam": 0.4}),
    "Ditto-lr": case("Ditto", ditto, {"lam": 0.4, "personal_lr": 0.05}),
    "APFL": case("APFL", apfl, {"alpha": 0.4}),
    "APFL-fixed": case("APFL", apfl, {"alpha": 0.7, "adaptive": False}, alpha=0.7, learn=False),
    "APFL-every": case("APFL", apfl, EVERY, alpha=0.4, every="round"),
    "APFL-clipped": case("APFL", apfl, {"alpha": 1.0}),
    "FedBABU": case("FedBABU", fedbabu, {"personal_part": "all"}),
    "FedBABU-head": case("FedBABU", fedbabu, HEAD),
    "FedBABU-body": case("FedBABU", fedbabu, {"personal_part": "body"}),
    "FedAMP": case("FedAMP", fedamp, {"lam": 0.3, "alpha": 0.2, "sigma": 0.7}),
}


def measured(w: Params, client: Any) -> tuple[float, float]:
    """The mean loss and the accuracy of a model on a client's data."""
    x, y = (np.concatenate(each) for each in zip(*client, strict=True))
    z = logits(w, x)
    return float(-log_softmax(z)[range(len(y)), y].mean()), float((z.argmax(1) == y).mean())


@sampled("name,how", list(product(METHODS, ["used", "drop"])), 4)
def test_own_models_are_the_oracles(name: str, how: str) -> None:
    """Where some clients stop early, and client 2 forgets what it kept before round 4."""
    own: list[dict[int, Any]] = []
    strategy, models = equals_the_oracle(METHODS[name], how, personal=own)
    clients = to_numpy(make_clients(5))
    apart, back = 0.0, False  # has client 2 its model again?
    for t, (entry, w) in enumerate(zip(strategy.history, models, strict=True)):
        back = back or (t + 1 >= FORGETS and 2 in entry["cohort"])
        for k, metrics in entry["evaluate"]["clients"].items():
            gone = name == "FedAMP" and k == 2 and t + 1 >= FORGETS and not back
            kept = w if gone else own[t].get(k, w)
            kept = mixed(kept[0], w, kept[1]) if isinstance(kept, tuple) else kept
            loss, accuracy = measured(kept, clients[k])
            assert metrics["personal-loss"] == pytest.approx(loss, abs=1e-9)
            assert metrics["personal-accuracy"] == pytest.approx(accuracy, abs=1e-9)
            assert metrics["loss"] == pytest.approx(measured(w, clients[k])[0], abs=1e-9)
            apart = max(apart, abs(metrics["loss"] - loss))
    assert apart > 1e-3


# beside other methods


def shuffling(pid: int) -> Any:
    g = torch.Generator().manual_seed(pid)
    x = torch.randn(15 + 5 * pid, 4, generator=g).double()
    data = torch.utils.data.TensorDataset(x, torch.randint(0, 3, (len(x),), generator=g))
    return torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)


def ends(terms: list[Term]) -> tuple[dict[str, np.ndarray], list[float]]:
    """The global model, and the clients' own losses."""
    strategy = fr.RegStrategy(terms, seed=4)
    client = partial(fr.RegClient, terms=[type(t) for t in terms])
    grid = fr.InProcessGrid(app_of(client, [shuffling(k) for k in range(3)], dropping), 3)
    models = train(strategy, client, rounds=3, grid=grid, model=dropping)
    assert [e["replies"] for e in strategy.history] == [[0, 1, 2]] * 3
    told = strategy.history[-1]["evaluate"]["clients"].values()
    return models[-1], [metrics.get("personal-loss", math.nan) for metrics in told]


BESIDE: dict[str, list[Term]] = {
    "FedAvg": [],
    "FedBN": [fr.LocalBatchNorm()],
    "SCAFFOLD": [fr.ControlVariates()],
    "FedADC, ternary": [fr.EmbeddedMomentum(0.5, 0.5), fr.SparseTernary(0.5, 0.5)],
}


@sampled("name,own", list(product(BESIDE, [fr.PersonalModel(0.3), fr.MixedModel(0.3)])), 2, str)
def test_the_global_model_is_the_methods_to_the_bit(name: str, own: Term) -> None:
    """With shuffled batches, dropout and BatchNorm; the own model may stand first or behind.

    And whatever the process's random state is: the seed alone decides.
    """
    terms = BESIDE[name]
    rest = [t for t in terms if not isinstance(t, fr.SparseTernary)]
    both, losses = ends([*rest, own, *terms[len(rest) :]])
    torch.rand(1)
    close(both, ends(terms)[0], 0.0)
    assert all(map(math.isfinite, losses))


# evaluation, and calibration of any method


def evaluated(strategy: Any, client: Any, config: dict[str, Any] | None = None, **more: Any) -> Any:
    """The last evaluation's metrics by client, and the global model."""
    data, build = make_clients(3), more.pop("model", make_model)
    grid, length = fr.InProcessGrid(app_of(client, data, build, **more), 3), {"local-epochs": 2}
    evaluate = ConfigRecord(config or {})
    result = start(strategy, grid, 2, build, {"lr": 0.2, **length}, evaluate_config=evaluate)
    return strategy.history[-1]["evaluate"]["clients"], result.arrays.to_torch_state_dict()


PLAIN = {"personalise": "plain", "personal-lr": 0.3, "personal-epochs": 3}


@pytest.mark.parametrize("part", ["head", "body", "all", None])
def test_any_method_can_train_a_part_further_for_its_evaluation(part: str | None) -> None:
    more = {} if part is None else {"personal-part": part}
    metrics, w = evaluated(fr.FedAvg(seed=2), fr.FedAvgClient, {**PLAIN, **more})
    model = {n: v.numpy() for n, v in w.items()}
    for k, client in enumerate(to_numpy(make_clients(3))):
        loss, accuracy = measured(fine_tuned(model, client, 0.3, part or "head", 3), client)
        assert metrics[k]["personal-loss"] == pytest.approx(loss, abs=1e-9)
        assert metrics[k]["personal-accuracy"] == pytest.approx(accuracy, abs=1e-9)


@pytest.mark.parametrize("kind", ["proximal", "distil", "both"])
def test_calibration_leaves_the_global_model(kind: str) -> None:
    _, plain = evaluated(fr.FedAvg(seed=2), fr.FedAvgClient)
    own, w = evaluated(fr.FedAvg(seed=2), fr.FedAvgClient, {**PLAIN, "personalise": kind})
    close(w, plain, 0.0)
    for metrics in own.values():
        assert metrics["personal-loss"] < metrics["loss"]  # own training data is the test data here


def test_calibration_trains_the_classifier_alone() -> None:
    """The last linear layer, or the one that is named; not what is frozen."""

    def own(model: nn.Module) -> Any:
        measures = Measures(model, make_clients()[0], Task(), torch.device("cpu"))
        return calibrate(measures, PLAIN, torch.optim.SGD)

    model = norm_model()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    after = own(model).state_dict()
    close(model.state_dict(), before, 0.0)
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed == {"3.weight", "3.bias"}
    bare = nn.Linear(4, 3, dtype=torch.float64)  # the whole model is its classifier
    assert not torch.equal(own(bare).weight, bare.weight)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="'1' shares parameters with '0'"):
        own(tied)
    frozen = make_model()
    frozen[2].bias.requires_grad_(False)
    assert torch.equal(own(frozen)[2].bias, frozen[2].bias)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"personalize": "plain"}, "unknown evaluate_config key 'personalize'.*'personalise'"),
        ({"personalise": "full", "personal-lr": 0.1}, "must be one of plain, .*not 'full'"),
        ({"personalise": "plain"}, "'personal-lr' must be a positive number, not None"),
        ({"personal-lr": 0.1}, "but not 'personalise'"),
        ({**PLAIN, "personal-epochs": 2.5}, "'personal-epochs' must be a positive integer"),
        ({**PLAIN, "personal-mu": 1.0}, "'personal-mu' has no meaning for personalise = 'plain'"),
        ({**PLAIN, "personal-part": "tail"}, "'personal-part' must be one of .*, not 'tail'"),
    ],
)
def test_a_wrong_evaluate_config_is_refused_at_once(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluated(fr.FedAvg(seed=2), fr.FedAvgClient, config)


def test_what_calibration_does_not_go_with() -> None:
    with pytest.raises(fr.RoundFailed, match="nothing there has requires_grad=True"):
        evaluated(fr.FedAvg(seed=2), fr.FedAvgClient, PLAIN, model=lambda: still(make_model(), "2"))
    for strategy in (fr.Ditto(seed=1), fr.FedBABU(seed=1)):
        with pytest.raises(ValueError, match="each client a model of its own"):
            strategy.prepare(1, None, {"lr": 0.1, "local-steps": 1}, PLAIN)


# saving

OWN_BN = [fr.LocalBatchNorm(), fr.PersonalModel(0.3)]
OWN_BN_CLIENT = partial(fr.RegClient, terms=[type(t) for t in OWN_BN])
SAVED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "Ditto": (fr.Ditto, fr.DittoClient, {}),
    "APFL": (fr.APFL, fr.APFLClient, {}),
    "FedBABU": (fr.FedBABU, fr.FedBABUClient, {}),
    "FedAMP": (fr.FedAMP, fr.FedAMPClient, {}),
    "calibration": (fr.FedAvg, fr.FedAvgClient, PLAIN),
    "FedBN": (fr.FedBN, fr.FedBNClient, {}),
    "FedBN+Ditto": (partial(fr.RegStrategy, OWN_BN), OWN_BN_CLIENT, {}),
}


@pytest.mark.parametrize("name", SAVED)
def test_the_evaluated_own_model_can_be_loaded(name: str, tmp_path: Path) -> None:
    """With its BatchNorm: averaged, or the client's as training left it."""
    make, client, config = SAVED[name]
    how: Any = {"model": norm_model, "save_private": tmp_path}
    for share in (0.7, 1.0):  # the later training counts
        metrics, w = evaluated(make(seed=2, fraction_train=share), client, config, **how)
    for k, batches in enumerate(make_clients(3)):
        model = norm_model().eval()
        model.load_state_dict(w, strict=False)
        own = fr.load_private(tmp_path, k)
        assert name == "FedBN" or own.keys() == model.state_dict().keys()
        model.load_state_dict(own, strict=False)
        x, y = (torch.cat(each) for each in zip(*batches, strict=True))
        loss = nn.functional.cross_entropy(model(x), y).item()
        assert metrics[k]["personal-loss"] == pytest.approx(loss, abs=1e-9)


def test_the_own_model_can_be_loaded_without_an_evaluation(tmp_path: Path) -> None:
    client = partial(OWN_BN_CLIENT, save_private=tmp_path)
    strategy = fr.RegStrategy(OWN_BN, seed=2, fraction_evaluate=0.0)
    train(strategy, client, rounds=2, clients=make_clients(3), model=norm_model)
    for k in range(3):
        assert fr.load_private(tmp_path, k).keys() == norm_model().state_dict().keys()


def test_a_disk_that_fails_costs_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = memory.write_atomically

    def fails(path: Path, chunks: Any) -> None:
        if path.name == "personal.safetensors":
            raise OSError(28, "No space left on device")
        write(path, chunks)

    monkeypatch.setattr(memory, "write_atomically", fails)
    strategy, client = fr.Ditto(seed=2), partial(fr.DittoClient, save_private=tmp_path)
    train(strategy, client, rounds=2, clients=make_clients(3))
    assert [e["not_saved"] for e in strategy.history] == [[0, 1, 2]] * 2
    assert len(strategy.history[-1]["evaluate"]["clients"]) == 3
    with pytest.raises(ValueError, match="clients of this method keep no entries of the model"):
        fr.load_private(tmp_path, 0)


def test_what_is_saved_leaves_the_clients_model_as_the_round_did() -> None:
    """``w_t`` and the client's update, in the mode in which it trained."""
    model, data, term = make_model(), make_clients()[0], chain([fr.PersonalModel(0.4)])
    result = local_round(model, term, data, lr=0.1, steps=3, device="cpu")
    how = {"lr": 0.1, "config": {}}
    saved = trained_model(term, Measures(model, data, Task(), torch.device("cpu")), result, **how)
    assert any(np.any(a != result.state[n].numpy()) for n, a in saved.items())
    close(model.state_dict(), result.state, 0.0)
    assert model.training


# FedAMP's clouds


def test_a_cloud_model_stays_among_the_clients_models() -> None:
    """Where the paper's weights sum to more than 1."""
    ctx = ServerContext(2, 0.1, {"w": np.zeros(1)})
    others = {f"v{k}.w": np.array([v]) for k, v in enumerate((0.0, 0.01, 0.03))}
    u = fr.CloudModel(alpha=50.0, sigma=1.0).broadcast_to(0, others, ctx)["w"]
    np.testing.assert_allclose(u, [0.02], rtol=1e-2)


@pytest.mark.parametrize(("left", "starts"), [(True, 3.0 + 0.5 * 1.0), (False, 3.0 + 0.5 * 3.0)])
def test_a_start_beside_fedamps_counts_on_either_side(left: bool, starts: float) -> None:
    w, v, u = ({"w": torch.tensor([x])} for x in (1.0, 0.0, 3.0))
    terms = [fr.RelaxedStart(0.5), fr.CloudModel()]
    ctx = ClientContext(w, 0.1, 1, client={"fedinit": v}, broadcast={"fedamp": u})
    assert chain(terms if left else terms[::-1]).start(w, ctx)["w"].item() == starts
