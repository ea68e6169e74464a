"""Mime and MimeLite beyond the laws: two exchanges, what is refused, what clients claim, other terms."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import product
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
    SerialisingGrid,
    app_of,
    start_weights,
    train,
)
from flwr_regs.wire import keys
from tests.conftest import budgeted, close, make_clients, make_model, to_numpy
from tests.oracles.client_step.mime import mime
from tests.oracles.model import Params
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


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("beta", [-0.1, 1.0, True, float("nan")])
def test_a_wrong_beta(name: str, beta: Any) -> None:
    with pytest.raises(ValueError, match="beta must be a number from 0 to below 1, not"):
        BOTH[name][0](beta)


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


# beside other terms
