"""Mime and MimeLite beyond the laws: two exchanges, what is refused, what clients claim, other terms."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Error, Message
from torch import nn

import flwr_regs as fr
from flwr_regs.client.local_training import local_round
from flwr_regs.term import ServerContext
from flwr_regs.testing.problem import (
    Point,
    SerialisingGrid,
    app_of,
    half_squared_error,
    quadratic_clients,
    start_weights,
    train,
)
from flwr_regs.wire import keys
from tests.conftest import budgeted, close, make_clients, make_model, to_numpy
from tests.oracles.mime import mime
from tests.oracles.model import Params, gradient
from tests.sampling import sampled

BOTH: dict[str, tuple[Any, Any]] = {
    "mime": (fr.Mime, fr.MimeClient),
    "mime-lite": (fr.MimeLite, fr.MimeLiteClient),
}
SOME = {"seed": 8, "fraction_train": 0.6, "min_train_nodes": 1, "fraction_evaluate": 0.0}
QUIET: dict[str, Any] = {"seed": 3, "fraction_evaluate": 0.0}
SHORT = [{}, {1: 2, 3: 1}, {0: 3}, {2: 4, 4: 1}]  # round -> client -> steps that it has time for
PARAMS = {n: a.astype(np.float32) for n, a in start_weights().items()}


def expected(history: Any, name: str, cohorts: Any = None, **settings: Any) -> Any:
    """The oracle's models for the cohorts and replies of a run with 5 clients."""
    cohorts = cohorts or [e["cohort"] for e in history]
    unused = [set(c) - set(e["replies"]) for c, e in zip(cohorts, history, strict=True)]
    return mime(
        start_weights(), to_numpy(make_clients(5)), len(history), lambda t: 0.2, 2,
        cohorts=cohorts, unused=unused, lite=name == "mime-lite", c_weighting="uniform", **settings,
    )  # fmt: skip


# whole runs


CELLS = list(product(BOTH, ["model", "delta"], ["average", "drop"]))


@sampled("name,downlink,incomplete", CELLS, 5)
def test_some_clients_of_which_some_stop_early(name: str, downlink: str, incomplete: str) -> None:
    """3 of 5 clients in each of 4 rounds. Models, and m after each round, are the oracle's.

    In Mime a reply that is dropped counts in c: its gradient came in the first exchange.
    """
    make, client = BOTH[name]
    strategy = make(0.7, downlink=downlink, incomplete=incomplete, **SOME)
    momenta: list[Params] = []

    def after(number: int) -> None:
        slot = strategy.training.model.server[name] if number else {}
        momenta.append({key[2:]: a.copy() for key, a in slot.items()})

    places = SerialisingGrid(app_of(budgeted(client, SHORT), make_clients(5)), 5)
    models = train(strategy, client, rounds=4, grid=places, on_round=after)
    dropped = [set(e["cohort"]) - set(e["replies"]) for e in strategy.history]
    assert any(dropped) == (incomplete == "drop")
    controls: list[tuple[Params, Params]] = []
    want = expected(strategy.history, name, beta=0.7, steps_done=SHORT, controls=controls)
    for t, (_, m) in enumerate(controls):
        close(models[t], want[t], 1e-10)
        close(momenta[t + 1], m, 1e-10)


class Silent(fr.InProcessGrid):
    """Client 1 fails in the exchange `where`, in rounds 2 and 3."""

    where = ""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        out = []
        for reply in super().pull_messages(message_ids):
            node, config = reply.metadata.src_node_id, reply.metadata
            if config.message_type == self.where and node == 1001:
                self.seen = getattr(self, "seen", 0) + 1
                if self.seen in (2, 3):
                    reply = Message(Error(2, "gone"), reply_to=reply)
                    reply.metadata.__dict__["_src_node_id"] = node
            out.append(reply)
        return out


@pytest.mark.parametrize("where", [keys.PROBE, "train"])
def test_a_client_that_drops_out_between_the_exchanges_stays_in_c(where: str) -> None:
    """One that drops out before the first does not."""
    grid = type("Grid", (Silent,), {"where": where})(app_of(fr.MimeClient, make_clients(5)), 5)
    strategy = fr.Mime(0.7, **QUIET)
    models = train(strategy, fr.MimeClient, rounds=4, grid=grid)
    replies = [e["replies"] for e in strategy.history]
    assert replies == [[0, 1, 2, 3, 4], [0, 2, 3, 4], [0, 2, 3, 4], [0, 1, 2, 3, 4]]
    want = expected(
        strategy.history, "mime", beta=0.7, cohorts=replies if where == keys.PROBE else None
    )
    close(models[-1], want[-1], 1e-10)


def test_the_gradient_at_w_is_of_the_same_batch_and_dropout_mask() -> None:
    """Without movement the correction is exact: with β = 0 the first step is c, to the bit of a sum."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    c = {f"c.{n}": torch.randn_like(p) for n, p in before.items()}
    data = make_clients()[0]
    done = local_round(
        model, fr.CorrectedMomentum(0.0), data, lr=0.1, steps=1, broadcast=c, device="cpu"
    )
    for n, d in done.delta.items():
        torch.testing.assert_close(d, -0.1 * c[f"c.{n}"], rtol=0, atol=1e-12)


def test_batchnorms_statistics_are_those_of_the_steps_alone() -> None:
    """Neither the full gradient nor the second gradient of a step moves them."""
    model = partial(make_model, batch_norm=True)
    runs = {}
    for name, kind, terms in (
        ("FedAvg", fr.FedAvg, []),
        ("Mime", partial(fr.Mime, 0.6), [fr.CorrectedMomentum]),
    ):
        strategy = kind(weighting="uniform", **QUIET)
        client = partial(fr.RegClient, terms=terms) if not terms else fr.MimeClient
        client = fr.FedAvgClient if name == "FedAvg" else client
        runs[name] = train(strategy, client, rounds=1, model=model, length={"local-steps": 1})
    for n in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        np.testing.assert_array_equal(runs["Mime"][0][n], runs["FedAvg"][0][n])
    assert abs(runs["Mime"][0]["0.weight"] - runs["FedAvg"][0]["0.weight"]).max() > 1e-3


# what is refused


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"momentum": 0.9}, "SGD with momentum takes other ones: leave that out"),
        ({"weight-decay": 0.1}, "SGD with weight_decay takes other ones"),
        ({"optimizer": "Adam"}, "Adam takes other ones"),
    ],
)
def test_an_optimiser_of_another_kind_is_refused_before_any_client_is_contacted(
    name: str, config: dict[str, Any], why: str
) -> None:
    make, client = BOTH[name]
    grid = fr.InProcessGrid(app_of(client, make_clients()), 4)
    contacted = list[Any]()
    grid.push_messages = lambda messages: contacted.extend(messages) or []  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"by plain SGD, but {why}"):
        train(make(0.5, **QUIET), client, grid=grid, length={"local-epochs": 1, **config})
    assert not contacted


@pytest.mark.parametrize("name", BOTH)
def test_a_clients_own_optimiser_is_refused_too(name: str) -> None:
    make, client = BOTH[name]
    with pytest.raises(fr.RoundFailed, match="AdamW with weight_decay takes other ones"):
        train(make(0.5, **QUIET), client, rounds=1, optimizer=torch.optim.AdamW)


def test_clipping_goes_with_both() -> None:
    for make, client in BOTH.values():
        strategy = make(0.5, **QUIET)
        train(strategy, client, rounds=1, length={"local-epochs": 1, "clip-norm": 0.5})
        assert strategy.history[0]["replies"] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("beta", [-0.1, 1.0, True, float("nan")])
def test_a_wrong_beta(name: str, beta: Any) -> None:
    with pytest.raises(ValueError, match="beta must be a number from 0 to below 1, not"):
        BOTH[name][0](beta)


def test_without_the_first_exchange_mime_does_not_train() -> None:
    with pytest.raises(ValueError, match="first exchange brought no mean gradient of"):
        local_round(make_model(), fr.CorrectedMomentum(0.5), make_clients()[0], lr=0.1, steps=1)


# what clients may claim


@pytest.mark.parametrize("term", [fr.CorrectedMomentum(0.5), fr.FixedMomentum(0.5)])
@pytest.mark.parametrize(
    ("upload", "why"),
    [
        ({}, "expected"),
        ({**PARAMS, "more": np.zeros(1, np.float32)}, "expected"),
        ({**PARAMS, "0.bias": np.zeros(1, np.float32)}, r"'0.bias' is float32 \(1,\)"),
        ({**PARAMS, "0.bias": np.zeros(6, np.int64)}, "'0.bias' is int64"),
    ],
)
def test_a_wrong_upload_is_refused(term: Any, upload: Any, why: str) -> None:
    term.check(PARAMS, PARAMS, {})
    with pytest.raises(ValueError, match=why):
        term.check(upload, PARAMS, {})


class Liar(fr.InProcessGrid):
    """Client 2's full gradient is `factor` times too large; what the others send stays."""

    factor = 1.0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            for name, record in reply.content.array_records.items():
                if name.endswith(".upload") and reply.metadata.src_node_id == 1002:
                    reply.content[name] = type(record)(
                        {k: type(a)(np.asarray(a.numpy() * self.factor)) for k, a in record.items()}
                    )
        return replies


@pytest.mark.parametrize("name", BOTH)
def test_a_lie_costs_its_client_or_is_bounded_by_a_robust_aggregator(name: str) -> None:
    make, client = BOTH[name]
    moved = {}
    for factor, how in [(1e20, fr.Mean()), (1e5, fr.CoordinateMedian()), (1e5, fr.Mean())]:
        grid = type("Grid", (Liar,), {"factor": factor})(app_of(client, make_clients(5)), 5)
        strategy = make(0.5, aggregator=how, on_divergence="warn", **QUIET)
        train(strategy, client, rounds=2, grid=grid, lr=0.01, length={"local-steps": 2})
        assert strategy.history[0]["replies"] == [0, 1, 3, 4] if factor > 1e15 else range(5)
        slot = strategy.training.model.server[name]
        moved[factor, how] = max(abs(a).max() for a in slot.values())
    (refused, median, mean) = moved.values()
    assert refused < 1
    assert median < 1
    assert mean > 1e3


def test_a_robust_c_is_the_aggregators() -> None:
    probes = {k: {"w": np.array([float(k), -float(k)])} for k in (0, 1, 7)}
    plain = fr.CorrectedMomentum(0.5).answer(probes)
    np.testing.assert_allclose(plain[7]["c.w"], [8 / 3, -8 / 3])

    def aggregated(values: Any) -> Any:
        return {"w": np.median([v["w"] for v in values.values()], axis=0)}

    ctx = ServerContext(2, 0.1, {"w": np.zeros(2)}, aggregated=aggregated, robust=True)
    robust = fr.CorrectedMomentum(0.5).robust_answer(probes, ctx)
    for slot in robust.values():
        np.testing.assert_array_equal(slot["c.w"], [1, -1])


# what travels


@pytest.mark.parametrize(
    ("name", "beta", "down", "up"),
    [
        ("mime", 0.5, {"mime.broadcast"}, set()),
        ("mime", 0.0, {"mime.broadcast"}, set()),
        ("mime-lite", 0.5, {"mime-lite.broadcast"}, {"mime-lite.upload"}),
        ("mime-lite", 0.0, set(), set()),
    ],
)
def test_what_travels_beside_the_model(name: str, beta: float, down: Any, up: Any) -> None:
    """In the last train message and its reply; Mime's probe holds the full gradient."""
    sent: dict[str, set[str]] = {}
    broadcast = set[str]()

    class Noting(fr.InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            for m in messages:
                records = m.content.array_records
                sent[m.metadata.message_type] = set(records) - {"arrays"}
                for key in set(records) - {"arrays"}:
                    broadcast.update(n.partition(".")[0] for n in records[key])
            return super().push_messages(messages)

        def pull_messages(self, ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(ids))
            for m in replies:
                kind = m.metadata.message_type + " reply"
                sent[kind] = set(m.content.array_records) - {"arrays"}
            return replies

    make, client = BOTH[name]
    grid = Noting(app_of(client, make_clients(2)), 2)
    train(make(beta, **QUIET), client, rounds=3, grid=grid)
    assert (sent["train"], sent["train reply"]) == (down, up)
    assert sent.get(f"{keys.PROBE} reply", set()) == ({"mime.upload"} if name == "mime" else set())
    assert broadcast == ({"c"} if name == "mime" else set()) | ({"m"} if beta else set())


# beside other terms


@pytest.mark.parametrize("lite", [False, True], ids=["Mime", "MimeLite"])
@pytest.mark.parametrize("left", [False, True], ids=["FedProx right", "FedProx left"])
def test_fedprox_beside_it_pulls_by_its_side(lite: bool, left: bool) -> None:
    """On the left its pull is part of g, on the right it is added to the step as it stands."""
    beta, mu = 0.6, 0.7
    mine = fr.FixedMomentum(beta) if lite else fr.CorrectedMomentum(beta)
    terms = [fr.Proximal(mu), mine] if left else [mine, fr.Proximal(mu)]
    strategy = fr.RegStrategy(terms, weighting="uniform", **QUIET)
    client = partial(fr.RegClient, terms=[type(t) for t in terms])
    found = train(strategy, client, rounds=3)
    data, w = to_numpy(make_clients()), start_weights()
    m = {n: np.zeros_like(a) for n, a in w.items()}
    for t in range(3):
        full = [mean_of([gradient(w, x, y) for x, y in c]) for c in data]
        c = mean_of(full)
        ends = []
        for batches in data:
            v = w
            for x, y in batches * 2:
                g, at = gradient(v, x, y), gradient(w, x, y)
                for n in g:
                    drift = 0.0 if lite else c[n] - at[n]
                    pull = mu * (v[n] - w[n])
                    inside, outside = (pull, 0.0) if left else (0.0, pull)
                    g[n] = (1 - beta) * (g[n] + drift + inside) + beta * m[n] + outside
                v = {n: v[n] - 0.2 * g[n] for n in v}
            ends.append(v)
        w, m = mean_of(ends), {n: (1 - beta) * c[n] + beta * m[n] for n in m}
        close(found[t], w, 1e-10)


def mean_of(parts: list[Params]) -> Params:
    """The plain mean; the clients' batches are of one size."""
    return {n: sum(p[n] for p in parts) / len(parts) for n in parts[0]}


def test_other_drift_corrections_are_refused_beside_mime() -> None:
    beside = [fr.ControlVariates(), fr.DynamicRegulariser(0.1), fr.FixedMomentum(0.5)]
    for other in beside:
        for terms in ([fr.CorrectedMomentum(0.5), other], [other, fr.CorrectedMomentum(0.5)]):
            with pytest.raises(ValueError, match="count twice: keep one"):
                fr.RegStrategy(terms)


def test_scaffold_beside_mimelite_is_exact() -> None:
    """``c_k − c`` becomes the difference of the clients' gradients, whichever of the two stands left."""
    for terms in permutations([fr.FixedMomentum(0.5), fr.ControlVariates()]):
        models = train(
            fr.RegStrategy(terms, weighting="uniform", **QUIET),
            partial(fr.RegClient, terms=[type(t) for t in terms]),
            rounds=120,
            clients=quadratic_clients((1.0, 4.0), (-1.0, 2.0)),
            model=Point,
            lr=0.1,
            length={"local-steps": 5},
            loss_fn=half_squared_error,
        )
        assert models[-1]["v"] == pytest.approx(1.4, abs=1e-6)


@sampled("name,beside", list(product(BOTH, ["FedFOR", "FedBN", "ternary", "bfloat16"])), 2)
def test_it_trains_beside_others(name: str, beside: str) -> None:
    """Its numbers alone are the oracle's; here, that nothing is refused, and that each has its effect."""
    mine: Any = fr.CorrectedMomentum(0.5) if name == "mime" else fr.FixedMomentum(0.5)
    terms = {
        "FedFOR": [fr.FirstOrder(0.3), mine],
        "FedBN": [fr.LocalBatchNorm(), mine],
        "ternary": [mine, fr.SparseTernary(0.3)],
        "bfloat16": [mine],
    }[beside]
    settings: dict[str, Any] = {"wire_dtype": "bfloat16"} if beside == "bfloat16" else {}
    model = partial(make_model, torch.float32, batch_norm=beside == "FedBN")
    data = make_clients(3, torch.float32)
    models = {}
    for kind in (terms, [t for t in terms if t is not mine]):
        strategy = fr.RegStrategy(kind, weighting="uniform", **QUIET, **settings)
        client = partial(fr.RegClient, terms=[type(t) for t in kind])
        models[len(kind)] = train(strategy, client, rounds=3, clients=data, model=model)[-1]
        assert [e["replies"] for e in strategy.history] == [[0, 1, 2]] * 3
    with_it, without = models.values()
    assert max(abs(with_it[n] - without[n]).max() for n in without) > 1e-3
