"""Clients' own models (Ditto, APFL, FedBABU, FedAMP, calibration): trained, evaluated, lost, saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import nn

import flwr_regs as fr
from flwr_regs.term import ServerContext, Term
from flwr_regs.testing import spies
from flwr_regs.testing.problem import SerialisingGrid, app_of, start_weights, train
from flwr_regs.wire import keys
from tests.conftest import budgeted, close, make_clients, make_model, to_numpy
from tests.oracles.model import Params, log_softmax, logits
from tests.oracles.personal.apfl import apfl, mixed
from tests.oracles.personal.ditto import ditto
from tests.oracles.personal.fedamp import fedamp
from tests.oracles.personal.fedbabu import fedbabu, fine_tuned
from tests.sampling import sampled

SOME = {"seed": 8, "fraction_train": 0.6, "min_train_nodes": 1}
SHORT = [{}, {1: 2, 3: 1}, {0: 3}, {2: 4, 4: 1}]  # round -> client -> steps that it has time for
ROUNDS, LOST, FORGETS = 6, 2, 4  # client 2 forgets before round 4


@dataclass(frozen=True)
class Method:
    """A method, its oracle, and how a client's own model follows from what the oracle gives out."""

    strategy: Callable[..., fr.RegStrategy]
    client: Any
    oracle: Callable[..., list[Params]]
    settings: dict[str, Any]
    own: Callable[[Any, Params], Params] = lambda kept, w: kept


METHODS = {
    "Ditto": Method(fr.Ditto, fr.DittoClient, ditto, {"lam": 0.4}),
    "Ditto-lr": Method(fr.Ditto, fr.DittoClient, ditto, {"lam": 0.4, "personal_lr": 0.05}),
    "APFL": Method(
        fr.APFL, fr.APFLClient, apfl, {"alpha": 0.4}, lambda kept, w: mixed(kept[0], w, kept[1])
    ),
    "APFL-fixed": Method(
        lambda learn, **s: fr.APFL(adaptive=learn, **s), fr.APFLClient, apfl,
        {"alpha": 0.7, "learn": False}, lambda kept, w: mixed(kept[0], w, kept[1]),
    ),
    "APFL-clipped": Method(
        fr.APFL, fr.APFLClient, apfl, {"alpha": 1.0}, lambda kept, w: mixed(kept[0], w, kept[1])
    ),
    "FedBABU": Method(fr.FedBABU, fr.FedBABUClient, fedbabu, {"personal_part": "all"}),
    "FedBABU-head": Method(
        fr.FedBABU, fr.FedBABUClient, fedbabu,
        {"personal_part": "head", "personal_epochs": 2, "personal_lr": 0.4},
    ),
    "FedBABU-body": Method(fr.FedBABU, fr.FedBABUClient, fedbabu, {"personal_part": "body"}),
    "FedAMP": Method(
        fr.FedAMP, fr.FedAMPClient, fedamp, {"lam": 0.3, "alpha": 0.2, "sigma": 0.7}
    ),
}  # fmt: skip


class Forgetful(fr.InProcessGrid):
    """One client loses its context before the messages of a round."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        config = messages[0].content.config_records.get("config", {})
        training = messages[0].metadata.message_type == "train"
        if training and config.get(keys.ROUND_KEY) == FORGETS:
            self._contexts[1000 + LOST].state = RecordDict()
        return super().push_messages(messages)


def measured(w: Params, client: Any) -> tuple[float, float]:
    """The mean loss and the accuracy of a model on a client's data."""
    x, y = (np.concatenate(each) for each in zip(*client, strict=True))
    z = logits(w, x)
    return float(-log_softmax(z)[range(len(y)), y].mean()), float((z.argmax(1) == y).mean())


MAIN = ["Ditto", "APFL", "FedBABU", "FedAMP"]
OTHERS = list(product([name for name in METHODS if name not in MAIN], ["average", "drop"]))


@pytest.mark.full
@pytest.mark.parametrize(("name", "incomplete"), OTHERS)
def test_own_models_of_other_settings_are_the_oracles(name: str, incomplete: str) -> None:
    test_own_models_are_the_oracles(name, incomplete)


@sampled("name,incomplete", list(product(MAIN, ["average", "drop"])), 4)
def test_own_models_are_the_oracles(name: str, incomplete: str) -> None:
    """3 of 5 unequal clients a round, of which some stop early, and one forgets what it kept."""
    method = METHODS[name]
    strategy = method.strategy(**method.settings, incomplete=incomplete, **SOME)
    client, data = budgeted(method.client, SHORT), make_clients(5)
    models = train(strategy, client, rounds=ROUNDS, grid=Forgetful(app_of(client, data), 5))
    history, clients = strategy.history, to_numpy(data)
    cohorts = [e["cohort"] for e in history]
    unused = [set(e["cohort"]) - set(e["replies"]) for e in history]
    assert any(unused) == (incomplete == "drop")
    own: list[dict[int, Any]] = []
    lost = [{LOST} if t == FORGETS else set[int]() for t in range(1, ROUNDS + 1)]
    expected = method.oracle(
        start_weights(), clients, ROUNDS, lambda t: 0.2, 2, cohorts=cohorts, unused=unused,
        steps_done=[SHORT[t % 4] for t in range(ROUNDS)], lost=lost, personal=own,
        **method.settings,
    )  # fmt: skip
    apart = 0.0
    for t, entry in enumerate(history):
        close(models[t], expected[t], 1e-10)
        for k, metrics in entry["evaluate"]["clients"].items():
            w = expected[t]
            forgot = method.oracle is fedamp and k == LOST and not _since(cohorts, t)
            mine = method.own(own[t][k], w) if k in own[t] and not forgot else w
            loss, accuracy = measured(mine, clients[k])
            assert metrics["personal-loss"] == pytest.approx(loss, abs=1e-9)
            assert metrics["personal-accuracy"] == pytest.approx(accuracy, abs=1e-9)
            assert metrics["loss"] == pytest.approx(measured(w, clients[k])[0], abs=1e-9)
            apart = max(apart, abs(metrics["loss"] - loss))
    assert apart > 1e-3
    again = next(t for t in range(FORGETS - 1, ROUNDS) if LOST in cohorts[t])
    keeps = method.oracle is not fedbabu and any(LOST in e["replies"] for e in history[:3])
    assert [e["lost_state"] for e in history] == [
        [LOST] if keeps and t == again else [] for t in range(ROUNDS)
    ]


def _since(cohorts: list[list[int]], t: int) -> bool:
    """Whether the client that forgot has its model again after round t, counted from 0; or still."""
    return t + 1 < FORGETS or any(LOST in c for c in cohorts[FORGETS - 1 : t + 1])


# beside other methods

SHUFFLED = {"lr": 0.1, "local-epochs": 1}


def shuffling(pid: int) -> Any:
    g = torch.Generator().manual_seed(pid)
    x = torch.randn(15 + 5 * pid, 4, generator=g)
    data = torch.utils.data.TensorDataset(x, torch.randint(0, 3, (len(x),), generator=g))
    return torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)


def dropping() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)
        return nn.Sequential(*layers)


def ends(terms: list[Term]) -> dict[str, np.ndarray]:
    kinds = [type(t) for t in terms if not t.server_only]
    strategy = fr.RegStrategy(terms, seed=4)
    app = app_of(partial(fr.RegClient, terms=kinds), [shuffling(k) for k in range(3)], dropping)
    grid = fr.InProcessGrid(app, 3)
    found = train(
        strategy, fr.RegClient, rounds=3, clients=range(3), grid=grid, model=dropping,
        length=SHUFFLED, lr=0.1,
    )  # fmt: skip
    assert [e["replies"] for e in strategy.history] == [[0, 1, 2]] * 3
    own = [p["personal-loss"] for p in strategy.history[-1]["evaluate"]["clients"].values()] if any(
        isinstance(t, fr.PersonalModel | fr.MixedModel) for t in terms
    ) else []  # fmt: skip
    assert all(map(math.isfinite, own))
    return found[-1]


BESIDE: dict[str, list[Term]] = {
    "FedAvg": [],
    "FedBN": [fr.LocalBatchNorm()],
    "FedFOR": [fr.FirstOrder(0.5)],
    "SCAFFOLD": [fr.ControlVariates()],
    "FedADC, ternary": [fr.EmbeddedMomentum(0.5, 0.5), fr.SparseTernary(0.5, 0.5)],
}


@sampled("name,own", list(product(BESIDE, [fr.PersonalModel(0.3), fr.MixedModel(0.3)])), 2, str)
def test_the_global_model_is_the_methods_to_the_bit(name: str, own: Term) -> None:
    """With shuffled batches, dropout and BatchNorm; the own model may stand first or behind."""
    terms = BESIDE[name]
    rest = [t for t in terms if not isinstance(t, fr.SparseTernary)]
    plain = ends(terms)
    close(ends([*rest, own, *terms[len(rest) :]]), plain, 0.0)


def test_ditto_beside_fedprox_is_the_oracles() -> None:
    terms, data, own = [fr.Proximal(0.7), fr.PersonalModel(0.4)], make_clients(3), list[Any]()
    strategy = fr.RegStrategy(terms, seed=3)
    kinds = [fr.Proximal, fr.PersonalModel]
    found = train(strategy, partial(fr.RegClient, terms=kinds), rounds=3, clients=data)
    clients = to_numpy(data)
    expected = ditto(start_weights(), clients, 3, lambda t: 0.2, 2, lam=0.4, mu=0.7, personal=own)
    close(found[-1], expected[-1], 1e-10)
    for k, metrics in strategy.history[-1]["evaluate"]["clients"].items():
        assert metrics["personal-loss"] == pytest.approx(
            measured(own[-1][k], clients[k])[0], abs=1e-9
        )


def test_private_entries_and_buffers_of_an_own_model() -> None:
    """Beside FedBN they are the client's, as training left them."""
    terms, build = (
        [fr.LocalBatchNorm(), fr.PersonalModel(0.3)],
        partial(make_model, batch_norm=True),
    )
    data = make_clients(3)
    app = app_of(partial(fr.RegClient, terms=[type(t) for t in terms]), data, build)
    grid, strategy = SerialisingGrid(app, 3), fr.RegStrategy(terms, seed=3)
    train(strategy, fr.RegClient, rounds=3, grid=grid, model=build)
    for k, metrics in strategy.history[-1]["evaluate"]["clients"].items():
        records = grid._contexts[1000 + k].state.array_records
        entries: dict[str, torch.Tensor] = {}
        for end in (keys.PRIVATE_KEY, "ditto.always.client"):
            (name,) = (n for n in records if n.endswith(end))
            entries |= records[name].to_torch_state_dict()
        model = build()
        assert entries.keys() == model.state_dict().keys()
        model.load_state_dict(entries)
        model.eval()
        x, y = (torch.cat(each) for each in zip(*data[k], strict=True))
        loss = nn.functional.cross_entropy(model(x), y).item()
        assert metrics["personal-loss"] == pytest.approx(loss, abs=1e-12)


def test_only_one_term_gives_clients_models_of_their_own() -> None:
    for other in (fr.MixedModel(), fr.FixedHead(), fr.CloudModel()):
        with pytest.raises(
            ValueError, match="only one term can give the clients models of their own"
        ):
            fr.RegStrategy([fr.PersonalModel(), other])
    for strategy in (fr.Ditto(seed=1), fr.FedBABU(seed=1)):
        with pytest.raises(
            ValueError, match="gives each client one of its own: leave 'personalise'"
        ):
            strategy.prepare(
                1, None, {"lr": 0.1, "local-steps": 1}, {"personalise": "plain", "personal-lr": 0.1}
            )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: fr.Ditto(lam=-1), "lam must be a number of at least 0"),
        (lambda: fr.Ditto(personal_lr=0), "personal_lr must be a positive number, or None"),
        (lambda: fr.APFL(alpha=1.1), "alpha must be a number from 0 to 1"),
        (lambda: fr.APFL(adaptive=1), "adaptive must be True or False"),
        (lambda: fr.FedBABU("tail"), "personal_part must be one of .*, not 'tail'"),
        (lambda: fr.FedBABU(personal_epochs=0), "personal_epochs must be a whole number"),
        (lambda: fr.FedBABU(layer="a,,b"), "layer must be a string of names"),
        (lambda: fr.FedAMP(alpha=0), "alpha must be a positive number"),
        (lambda: fr.FedAMP(sigma=0), "sigma must be a positive number"),
        (lambda: fr.FedAMP(lam=-1), "lam must be a number of at least 0"),
    ],
)
def test_wrong_parameters(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


# evaluation


def evaluated(strategy: Any, client: Any, config: dict[str, Any] | None = None, **more: Any) -> Any:
    """The last evaluation's metrics by client, and the global model."""
    data, build = make_clients(3), more.pop("model", make_model)
    result = strategy.start(
        grid=fr.InProcessGrid(app_of(client, data, build, **more), 3),
        initial_arrays=ArrayRecord(build().state_dict()),
        num_rounds=2,
        train_config=ConfigRecord({"lr": 0.2, "local-epochs": 2}),
        evaluate_config=ConfigRecord(config or {}),
    )
    return strategy.history[-1]["evaluate"]["clients"], result.arrays.to_torch_state_dict()


@pytest.mark.parametrize("part", ["head", "body", "all", None])
def test_any_method_can_train_a_part_further_for_its_evaluation(part: str | None) -> None:
    config = {"personalise": "plain", "personal-lr": 0.3, "personal-epochs": 3}
    more = {} if part is None else {"personal-part": part}
    found, w = evaluated(fr.FedAvg(seed=2), fr.FedAvgClient, {**config, **more})
    model = {n: v.numpy() for n, v in w.items()}
    for k, client in enumerate(to_numpy(make_clients(3))):
        loss, accuracy = measured(fine_tuned(model, client, 0.3, part or "head", 3), client)
        assert found[k]["personal-loss"] == pytest.approx(loss, abs=1e-9)
        assert found[k]["personal-accuracy"] == pytest.approx(accuracy, abs=1e-9)


def test_a_wrong_part_is_refused() -> None:
    config = {"personalise": "plain", "personal-lr": 0.3, "personal-part": "tail"}
    with pytest.raises(ValueError, match=r"'personal-part' must be one of .*, not 'tail'"):
        evaluated(fr.FedAvg(seed=2), fr.FedAvgClient, config)

    def still() -> nn.Module:
        model = make_model()
        model[2].requires_grad_(False)
        return model

    config["personal-part"] = "head"
    with pytest.raises(fr.RoundFailed, match="nothing there has requires_grad=True"):
        evaluated(fr.FedAvg(seed=2), fr.FedAvgClient, config, model=still)


# saving

SAVED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "Ditto": (fr.Ditto, fr.DittoClient, {}),
    "APFL": (fr.APFL, fr.APFLClient, {}),
    "FedBABU": (fr.FedBABU, fr.FedBABUClient, {}),
    "FedAMP": (fr.FedAMP, fr.FedAMPClient, {}),
    "calibration": (fr.FedAvg, fr.FedAvgClient, {"personalise": "plain", "personal-lr": 0.3}),
    "FedBN": (fr.FedBN, fr.FedBNClient, {}),
}


@pytest.mark.parametrize("name", SAVED)
def test_the_evaluated_own_model_can_be_loaded(name: str, tmp_path: Path) -> None:
    make, client, config = SAVED[name]
    build = partial(make_model, batch_norm=True)
    found, w = evaluated(make(seed=2), client, config, model=build, save_private=tmp_path)
    for k, batches in enumerate(make_clients(3)):
        model = build().eval()
        model.load_state_dict(w, strict=False)
        own = fr.load_private(tmp_path, k)
        assert name == "FedBN" or own.keys() == model.state_dict().keys()
        model.load_state_dict(own, strict=False)
        x, y = (torch.cat(each) for each in zip(*batches, strict=True))
        loss = nn.functional.cross_entropy(model(x), y).item()
        assert found[k]["personal-loss"] == pytest.approx(loss, abs=1e-9)


def test_a_disk_that_fails_costs_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr_regs.client.memory import saved

    write = saved.Generation.write

    def fails(self: Any, path: Path) -> None:
        if path.name == "personal.safetensors":
            raise OSError(28, "No space left on device")
        write(self, path)

    monkeypatch.setattr(saved.Generation, "write", fails)
    strategy = fr.Ditto(seed=2)
    train(
        strategy, partial(fr.DittoClient, save_private=tmp_path), rounds=2, clients=make_clients(3)
    )
    assert [e["not_saved"] for e in strategy.history] == [[0, 1, 2]] * 2
    assert len(strategy.history[-1]["evaluate"]["clients"]) == 3
    with pytest.raises(ValueError, match="clients of Ditto keep no entries of the model"):
        fr.load_private(tmp_path, 0)


# FedBABU


def test_the_output_layer_is_held_still() -> None:
    strategy = fr.FedBABU(seed=2, fraction_evaluate=0.0)
    found = train(
        strategy, fr.FedBABUClient, rounds=3,
        length={"local-epochs": 1, "momentum": 0.9, "weight-decay": 0.1},
    )  # fmt: skip
    start = start_weights()
    for w in found:
        for n, a in w.items():
            assert np.array_equal(a, start[n]) == n.startswith("2.")


# FedAMP


def test_each_client_is_sent_its_own_cloud_model() -> None:
    """And one that is new starts at the global model."""
    settings = {"lam": 0.3, "alpha": 0.2, "sigma": 0.7}
    calls: list[spies.LocalCall] = []
    strategy, data = fr.FedAMP(**settings, **SOME), make_clients(5)
    with spies.recorded(calls):
        train(strategy, fr.FedAMPClient, rounds=4, clients=data)
    cohorts, sent = [e["cohort"] for e in strategy.history], list[Any]()
    fedamp(
        start_weights(), to_numpy(data), 4, lambda t: 0.2, 2, cohorts=cohorts, sent=sent, **settings
    )
    seen = 0
    for call in calls:
        t = call.settings["config"]["server-round"]
        got = call.settings["broadcast"].get("fedamp", {})
        expected = sent[t - 2].get(call.client, {}) if t > 1 else {}
        close({n: a.numpy() for n, a in got.items()}, expected, 1e-10)
        seen += bool(got)
    assert 3 < seen < len(calls)


def table(**models: Any) -> dict[str, np.ndarray]:
    return {f"{who}.w": np.asarray(v, dtype=np.float64) for who, v in models.items()}


def test_a_client_moves_another_boundedly_and_far_ones_not_at_all() -> None:
    term = fr.CloudModel(alpha=0.2, sigma=0.5)
    ctx = ServerContext(2, 0.1, {"w": np.zeros(2)})
    most = 0.2 / math.sqrt(2 * math.e * 0.5)
    moved = []
    for far in (0.1, 0.5, 1.0, 3.0, 1e6):
        u = term.broadcast_to(0, table(v0=[0, 0], v1=[far, 0]), ctx)["w"]
        moved.append(u[0])
        assert u[1] == 0
    assert max(moved) <= most
    assert moved[1] > 0.99 * most
    assert moved[-1] == 0
    assert term.broadcast_to(2, table(v0=[0, 0]), ctx) == {}


def test_a_cloud_model_stays_among_the_clients_models() -> None:
    """Where the paper's weights sum to more than 1."""
    ctx = ServerContext(2, 0.1, {"w": np.zeros(1)})
    others = table(v0=[0.0], v1=[0.01], v2=[0.03])
    u = fr.CloudModel(alpha=50.0, sigma=1.0).broadcast_to(0, others, ctx)["w"]
    np.testing.assert_allclose(u, [0.02], rtol=1e-2)


def test_a_start_of_its_own_does_not_go_with_methods_that_count_from_the_global_model() -> None:
    for name in ("SCAFFOLD", "FedNova", "FedExP"):
        terms = getattr(fr, name)(seed=1).term.terms
        with pytest.raises(ValueError, match="elsewhere than at w_t, which the other counts from"):
            fr.RegStrategy([fr.CloudModel(), *terms])
    with pytest.raises(ValueError, match="expected none"):
        fr.CloudModel().check({"w": np.zeros(1)}, {}, {})
