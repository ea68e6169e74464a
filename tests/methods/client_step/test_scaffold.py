"""SCAFFOLD beyond the laws: control variates, what travels, what is refused, what clients may claim."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

import flwr_regs as fr
from flwr_regs.term import Term
from flwr_regs.testing import spies
from flwr_regs.testing.problem import app_of, start_weights, train
from flwr_regs.wire.arrays import pack, unpack
from tests.conftest import budgeted, close, make_clients, make_model, to_numpy
from tests.methods.watching import (
    LOST,
    SHORT,
    SOME,
    Arrays,
    Forgetful,
    Watched,
    untouched,
    watched,
)
from tests.oracles.client_step.scaffold import scaffold
from tests.oracles.model import Params
from tests.sampling import sampled


def variates(server: Arrays) -> Arrays:
    """c, of the server's slot."""
    return {key[2:]: a for key, a in server.items() if key.startswith("c.")}


def of(strategy: Any, client: Any = fr.SCAFFOLDClient, **more: Any) -> Watched:
    return watched(strategy, client, "scaffold", **more)


def expected(found: Watched, controls: list[tuple[Params, list[Params]]], **own: Any) -> Any:
    """The oracle's models for the cohorts and replies of a run; `controls` takes c and c_k."""
    return scaffold(
        start_weights(), to_numpy(make_clients(5)), 8, lambda t: 0.2, 2,
        controls=controls, **found.plan, **own,
    )  # fmt: skip


CELLS = list(product([1, 2], ["client", "server"], ["model", "delta"], ["average", "drop"]))


@sampled("option,state,downlink,incomplete", CELLS, 5)
def test_some_clients_of_which_some_stop_early(
    option: int, state: str, downlink: str, incomplete: str
) -> None:
    """3 of 5 clients a round. Models, c and each c_k are the oracle's, and Σ c_k / N is c."""
    strategy = fr.SCAFFOLD(
        option=option, state=state, downlink=downlink, incomplete=incomplete, **SOME
    )
    found = of(strategy, budgeted(fr.SCAFFOLDClient, SHORT))
    assert any(found.plan["unused"]) == (incomplete == "drop")
    controls: list[tuple[Params, list[Params]]] = []
    models = expected(found, controls, option=option, steps_done=[SHORT[t % 4] for t in range(8)])
    last: dict[int, Arrays] = {}
    for t, (c, own) in enumerate(controls):
        close(found.models[t], models[t], 1e-10)
        close(variates(found.server[t]), c, 1e-10)
        used = found.history[t]["replies"]
        last |= {k: found.kept[t + 1, k] for k in used if state == "client"}
        for k, mine in last.items():
            close(mine, own[k], 1e-10)
        for n in c if last else ():
            mean = sum(mine[n] for mine in last.values()) / 5
            np.testing.assert_allclose(found.server[t][f"c.{n}"], mean, rtol=0, atol=1e-12)
    assert set(last) == (set(range(5)) if state == "client" else set())


def test_the_server_can_keep_all_control_variates() -> None:
    """It trains the same model, and the clients keep nothing."""
    runs = [of(fr.SCAFFOLD(state=state, **SOME)) for state in ("client", "server")]
    for a, b in zip(*(r.models for r in runs), strict=True):
        close(a, b, 1e-12)
    assert any(runs[0].kept.values())
    assert not any(runs[1].kept.values())


def test_a_client_that_lost_its_control_variate_is_named() -> None:
    """It begins at 0, and its old share stays in c."""

    strategy = fr.SCAFFOLD(seed=3, fraction_evaluate=0.0)
    found = of(strategy, grid=Forgetful)
    assert [set(e["lost_state"]) for e in found.history] == LOST
    controls: list[tuple[Params, list[Params]]] = []
    models = expected(found, controls, lost=LOST)
    close(found.models[-1], models[-1], 1e-10)
    c = variates(found.server[-1])
    close(c, controls[-1][0], 1e-10)
    mean = sum(found.kept[8, k]["0.weight"] for k in range(5)) / 5
    assert abs(c["0.weight"] - mean).max() > 1e-3


# what travels


def sent(terms: list[Term], client: Any = None, **settings: Any) -> tuple[set[str], set[str]]:
    """The records of the last of three rounds' messages beside model, config and metrics: (down, up)."""
    down, up = set[str](), set[str]()

    class Noting(fr.InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            down.clear()
            down.update(key for m in messages for key in m.content.array_records)
            return super().push_messages(messages)

        def pull_messages(self, ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(ids))
            up.clear()
            up.update(key for m in replies for key in m.content.array_records)
            return replies

    strategy = fr.RegStrategy(terms, seed=5, fraction_evaluate=0.0, **settings)
    kinds = [type(t) for t in terms if not t.server_only]
    model = partial(make_model, torch.float32)
    data = make_clients(2, torch.float32)
    grid = Noting(app_of(partial(fr.RegClient, terms=kinds), data, model=model), 2)
    train(strategy, fr.RegClient, rounds=3, grid=grid, model=model)
    assert [e["replies"] for e in strategy.history] == [[0, 1]] * 3
    return down - {"arrays"}, up - {"arrays"}


def test_a_control_variate_travels_only_where_the_server_lacks_the_model() -> None:
    c, x = {"scaffold.broadcast"}, {"scaffold.upload"}
    assert sent([fr.ControlVariates()]) == (c, set())
    assert sent([fr.ControlVariates(state="server")]) == (c, set())
    assert sent([fr.ControlVariates(1)]) == (c, x)
    assert sent([fr.ControlVariates(), fr.SparseTernary(None, 0.5)]) == (c, set())
    assert sent([fr.ControlVariates(), fr.SparseTernary(0.5)]) == (c, x)
    assert sent([fr.ControlVariates()], wire_dtype="bfloat16") == (c, x)


@pytest.mark.parametrize("beside", [fr.SparseTernary(0.3), None], ids=["ternary", "bfloat16"])
def test_c_is_the_clients_own_mean_where_updates_are_rounded(beside: Any) -> None:
    """Else Σ c_k / N would differ from c by what compression leaves out."""
    terms = [fr.ControlVariates(), *([beside] if beside else [])]
    half = {} if beside else {"wire_dtype": "bfloat16"}
    strategy = fr.RegStrategy(terms, seed=3, fraction_evaluate=0.0, **half)
    single, calls = torch.float32, list[spies.LocalCall]()
    with spies.recorded(calls):
        train(
            strategy, partial(fr.RegClient, terms=[type(t) for t in terms]), rounds=6,
            clients=make_clients(4, single), model=partial(make_model, single),
        )  # fmt: skip
    c = strategy.training.model.server["scaffold"]
    for n in start_weights():
        mean = sum(call.result.client["scaffold"][n].numpy() for call in calls[-4:]) / 4
        np.testing.assert_allclose(c[f"c.{n}"], mean, rtol=0, atol=1e-6)


# what is refused


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("momentum", 0.9, "SGD with momentum takes other ones"),
        ("weight-decay", 0.1, "SGD with weight_decay takes other ones"),
        ("optimizer", "Adam", "Adam takes other ones"),
        ("clip-norm", 1.0, "'clip-norm' in the train config clips their gradients"),
    ],
)
def test_option_2_refuses_a_config_before_any_client_is_contacted(
    key: str, value: Any, why: str
) -> None:
    config = {"local-epochs": 1, key: value}
    with (
        untouched(fr.SCAFFOLDClient) as grid,
        pytest.raises(ValueError, match=f"option 2.*{why}: leave that out"),
    ):
        train(fr.SCAFFOLD(seed=1), fr.SCAFFOLDClient, grid=grid, length=config)
    strategy = fr.SCAFFOLD(seed=1, option=1)
    train(strategy, fr.SCAFFOLDClient, rounds=1, length=config)
    assert strategy.history[0]["replies"] == [0, 1, 2, 3]


def slower(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr / 2)


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (torch.optim.Adam, "Adam takes other ones"),
        (partial(torch.optim.SGD, momentum=0.5), "SGD with momentum"),
        (partial(torch.optim.SGD, weight_decay=0.5, maximize=True), "weight_decay and maximize"),
        (slower, "SGD with a learning rate of its own"),
    ],
)
def test_option_2_refuses_a_clients_own_optimiser(optimizer: Any, why: str) -> None:
    strategy = fr.SCAFFOLD(seed=1)
    with pytest.raises(fr.RoundFailed, match=why):
        train(strategy, fr.SCAFFOLDClient, rounds=1, optimizer=optimizer)
    train(fr.SCAFFOLD(seed=1, option=1), fr.SCAFFOLDClient, rounds=1, optimizer=optimizer)


def test_wrong_parameters() -> None:
    with pytest.raises(ValueError, match="option must be 1 or 2, not 3"):
        fr.SCAFFOLD(option=3)
    with pytest.raises(ValueError, match="state must be 'client' or 'server', not 'both'"):
        fr.SCAFFOLD(state="both")
    with pytest.raises(ValueError, match="SCAFFOLD: server_lr must be a positive number, not 0"):
        fr.SCAFFOLD(server_lr=0)
    assert fr.SCAFFOLD().weighting == "uniform"


# what clients may claim

PARAMS = {n: a.astype(np.float32) for n, a in start_weights().items()}


@pytest.mark.parametrize(
    ("upload", "why"),
    [
        ({}, "expected"),
        ({**PARAMS, "more": np.zeros(1, np.float32)}, "expected"),
        ({**PARAMS, "0.bias": np.zeros(1, np.float32)}, r"'0.bias' is float32 \(1,\)"),
        ({**PARAMS, "0.bias": np.zeros(6, np.int64)}, "'0.bias' is int64"),
    ],
)
def test_a_wrong_upload_costs_its_client(upload: Any, why: str) -> None:
    fr.ControlVariates(1).check(PARAMS, PARAMS, {})
    with pytest.raises(ValueError, match=why):
        fr.ControlVariates(1).check(upload, PARAMS, {})
    fr.ControlVariates(2).check({}, PARAMS, {})


def test_a_change_beyond_all_bounds_costs_its_client() -> None:
    """An update of 1e14 is within the wire's bounds; times 1 / (K η) it is not."""

    class Liar(fr.SCAFFOLDClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            sent, n, metrics = super().fit(parameters, config)
            if config["regs.partition"] == 2:
                sent[0][0, 0] = 5e14
            return sent, n, metrics

    strategy = fr.SCAFFOLD(seed=1, fraction_evaluate=0.0)
    train(strategy, Liar, rounds=2, length={"local-steps": 1})
    assert [e["replies"] for e in strategy.history] == [[0, 1, 3]] * 2
    why = strategy.history[0]["failures"][2]
    assert "its change of '0.weight' for each step is beyond 1e+15" in why


def test_a_client_cannot_claim_more_steps_than_its_round_has() -> None:
    class Liar(fr.SCAFFOLDClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            sent, n, metrics = super().fit(parameters, config)
            if config["regs.partition"] == 2:
                metrics |= {"local-steps": 10**9, "planned-steps": 10**9}
            return sent, n, metrics

    strategy = fr.SCAFFOLD(seed=1, fraction_evaluate=0.0)
    train(strategy, Liar, rounds=1, length={"local-steps": 3})
    assert strategy.history[0]["replies"] == [0, 1, 3]
    assert "where the round asked for 3" in strategy.history[0]["failures"][2]


AGGREGATORS = [fr.CoordinateMedian(), fr.Krum(1, keep=3), fr.NormBound()]


@sampled(
    "aggregator,option,state", list(product(AGGREGATORS, [1, 2], ["client", "server"])), 6, repr
)
def test_a_hostile_control_variate_does_not_pass_beside_a_robust_mean(
    aggregator: Any, option: int, state: str
) -> None:
    """Neither in the upload (option 1) nor in the update from which the server derives it (option 2)."""

    class Hostile(fr.SCAFFOLDClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            sent, n, metrics = super().fit(parameters, config)
            if config["regs.partition"] == 4:
                sent = [
                    w + 1e6 * np.sign(v - w + 1e-9) for v, w in zip(sent, parameters, strict=True)
                ]
                if option == 1:
                    x = {k: 1e6 + a for k, a in unpack(metrics["scaffold.upload"]).items()}
                    metrics["scaffold.upload"] = pack(x)
            return sent, n, metrics

    largest = {}
    for how in (aggregator, fr.Mean()):
        settings = {"seed": 1, "fraction_evaluate": 0.0, "aggregator": how}
        strategy = fr.SCAFFOLD(option=option, state=state, **settings)
        train(strategy, Hostile, rounds=2, clients=make_clients(5))
        server = strategy.training.model.server["scaffold"]
        largest[how] = max(abs(a).max() for key, a in server.items() if key.startswith("c."))
    assert largest[aggregator] < 2
    assert largest[fr.Mean()] > 1e4
