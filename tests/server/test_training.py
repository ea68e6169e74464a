"""A training on the server's own values: whole rounds over a network of numpy clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from flwr_regs.chain import chain
from flwr_regs.server.evaluation import evaluation
from flwr_regs.server.exchange.network import Request
from flwr_regs.server.options import Options
from flwr_regs.server.round import RoundFailed
from flwr_regs.server.training import Training
from flwr_regs.term import Arrays, ServerContext, Slot, Term
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays
from flwr_regs.wire.parcel import Parcel
from tests.server.network import NumpyNetwork, quadratic, run

CONFIG = {"lr": 0.1, "local-steps": 3}
CURVATURE, CENTRE = (1.0, 4.0, 2.0), (-1.0, 2.0, 0.5)


def mean_of(kind: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"loss": float(np.mean([m.get("loss", 0.0) for m in metrics]))}


def training(
    terms: Sequence[Term] = (), model: NDArrays | None = None, num_rounds: int = 5, **settings: Any
) -> Training:
    options = Options.of(chain(terms), seed=3, min_train_nodes=1, **settings)
    w = {"w": np.zeros(2)} if model is None else model
    return Training(options, "FedAvg", w, num_rounds, mean_of)


def test_whole_rounds_without_flower_are_the_closed_form() -> None:
    """FedAvg on quadratics: w ← Σ p_k (c_k + (1 − η a_k)^K (w − c_k))."""
    train = training()
    network = NumpyNetwork(3, quadratic(CURVATURE, CENTRE))
    w, p = 0.0, np.array([1, 2, 3]) / 6
    for t in range(1, 6):
        now = run(train.round(t, CONFIG, network), network)
        left = (1 - 0.1 * np.array(CURVATURE)) ** 3
        w = float((p * (CENTRE + left * (w - np.array(CENTRE)))).sum())
        np.testing.assert_allclose(train.model.model["w"], w, rtol=1e-12)
        assert (now.number, now.cohort, sorted(now.used), now.failures) == (
            t,
            [0, 1, 2],
            [0, 1, 2],
            {},
        )
        assert now.bytes_down == {0: now.bytes_down[0], 1: now.bytes_down[0], 2: now.bytes_down[0]}
    assert [e["round"] for e in train.history] == [1, 2, 3, 4, 5]
    got = run(evaluation(train, 5, train.model.model, {}, network), network)
    assert got == {"loss": pytest.approx(np.mean([2 * (w - c) ** 2 for c in CENTRE]))}
    assert set(train.history[-1]["evaluate"]["clients"]) == {0, 1, 2}


def test_a_failed_client_is_named_and_a_failed_round_changes_nothing() -> None:
    good = quadratic(CURVATURE, CENTRE)
    broken: dict[int, str | None] = {1: "the disk is full", 2: None}

    def client(k: int, request: Request, parcel: Parcel) -> Parcel | str | None:
        return broken[k] if request.kind == "train" and k in broken else good(k, request, parcel)

    network = NumpyNetwork(3, client)
    train = training(min_replies=1)
    now = run(train.round(1, CONFIG, network), network)
    assert now.failures == {1: "the disk is full", 2: "no reply in time"}
    assert train.history[0]["replies"] == [0]
    before = dict(train.model.model)
    strict = training(min_replies=2)
    with pytest.raises(RoundFailed, match=r"1 usable replies from a cohort of 3, needed 2"):
        run(strict.round(1, CONFIG, network), network)
    assert strict.history[0]["failures"] == now.failures
    assert (strict.model.model["w"] == 0).all()
    broken[0] = "gone too"
    with pytest.raises(RoundFailed, match=r"clients \[0\] failed: gone too"):
        run(train.round(2, CONFIG, network), network)
    np.testing.assert_array_equal(train.model.model["w"], before["w"])


@pytest.mark.parametrize(
    ("settings", "odd", "why"),
    [
        ({}, {keys.METHOD_KEY: "FedFOR"}, "not come from a FedAvg client but from FedFOR"),
        ({"incomplete": "scale"}, {}, "reports no steps, which incomplete='scale' needs"),
    ],
    ids=["another method", "no steps"],
)
def test_a_plain_client_is_taken_unless_it_names_a_method_or_owes_steps(
    settings: Any, odd: Any, why: str
) -> None:
    """Plain FedAvg takes any client of Flower's, which names no method and counts no steps."""
    inner = quadratic(CURVATURE, CENTRE)

    def client(k: int, request: Request, parcel: Parcel) -> Any:
        reply = inner(k, request, parcel)
        if request.kind != "train" or k == 0 or not isinstance(reply, Parcel):
            return reply
        config = odd if k == 1 else {}
        return replace(reply, config=config, metrics={"num-examples": k + 1})

    network, train = NumpyNetwork(3, client), training(**settings)
    run(train.round(1, CONFIG, network), network)
    refused = train.history[0]["failures"]
    assert why in refused[1]
    assert train.history[0]["replies"] == ([0] if settings else [0, 2])


@pytest.mark.parametrize(
    ("bad", "why"), [(1j, "complex arrays cannot be averaged"), (np.nan, r"\['w'\] hold NaN")]
)
def test_a_model_that_cannot_be_averaged_is_refused(bad: complex, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        training(model={"w": np.array([1.0, bad]), "empty": np.zeros(0)})


def test_a_course_that_is_left_in_the_middle_changes_nothing() -> None:
    network = NumpyNetwork(3, quadratic(CURVATURE, CENTRE))
    train = training()
    course = train.round(1, CONFIG, network)
    (request,) = next(course)
    assert (request.kind, sorted(request.parcels)) == ("train", [0, 1, 2])
    course.close()
    assert (train.model.model["w"] == 0).all()
    run(train.round(1, CONFIG, network), network)
    assert [e["round"] for e in train.history] == [1]


# What terms see


@dataclass(frozen=True)
class Witness(Term):
    """Notes the names that it is shown."""

    name: ClassVar[str] = "witness"
    server_only: ClassVar[bool] = True
    seen: dict[str, set[str]] = field(default_factory=dict)

    def init(self, params: Arrays) -> Slot:
        self.seen["init"] = set(params)
        return {n: 0 * p for n, p in params.items()}

    def broadcast(self, server: Slot, ctx: ServerContext) -> Slot:
        self.seen["broadcast"] = set(ctx.params)
        return {}

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> Any:
        self.seen.update(update=set(ctx.params), delta=set(delta))
        return {n: s + delta[n] for n, s in server.items()}, delta


BATCH_NORM: NDArrays = {
    "0.weight": np.ones((2, 2)),
    "1.weight": np.ones(2),
    "1.running_mean": np.zeros(2),
    "1.running_var": np.ones(2),
    "1.num_batches_tracked": np.asarray(0),
}
TRAINED = {"0.weight", "1.weight"}
STATISTICS = set(BATCH_NORM) - TRAINED


def test_terms_see_trainable_parameters_only_from_init_on() -> None:
    witness = Witness()
    train = training([witness], BATCH_NORM)
    network = NumpyNetwork(3, quadratic(CURVATURE, CENTRE, STATISTICS))
    for t in (1, 2):
        run(train.round(t, CONFIG, network), network)
    assert witness.seen == dict.fromkeys(("init", "broadcast", "update", "delta"), TRAINED)
