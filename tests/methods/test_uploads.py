"""What clients may claim: an upload of a wrong kind, or beyond all bounds, costs its client alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flwr_regs as fr
from flwr_regs.term import ServerContext, Term
from flwr_regs.testing.problem import app_of, start_weights, train
from tests.conftest import Tampered, claiming, close, make_clients, noted, run

PARAMS = {n: a.astype(np.float32) for n, a in start_weights().items()}
SQUARES = {f"{kind}.{n}": a**2 for n, a in PARAMS.items() for kind in "UV"}
MOMENTS = {f"exp_avg_sq.{n}": a**2 for n, a in PARAMS.items()} | {"step": np.asarray(3.0)}
RIGHT: dict[str, tuple[Term, dict[str, Any], str]] = {
    # a term, an upload that it takes, and one of the upload's arrays
    "SCAFFOLD": (fr.ControlVariates(1), PARAMS, "0.bias"),
    "Mime": (fr.CorrectedMomentum(0.5), PARAMS, "0.bias"),
    "MimeLite": (fr.FixedMomentum(0.5), PARAMS, "0.bias"),
    "FedCurv": (fr.Curvature(0.1), SQUARES, "U.0.bias"),
    "EFL": (fr.Elastic(0.1), SQUARES, "V.0.bias"),
    "RFedAvg": (fr.FeatureTable(0.1), {"delta": np.ones(3, np.float32)}, "delta"),
    "QFedAvg": (fr.FairWeights(1.0), {"loss": np.asarray(0.5)}, "loss"),
    "FedSMOO": (fr.CommonPerturbation(), PARAMS, "0.bias"),
    "FedAdamW": (fr.SharedMoments(), MOMENTS, "exp_avg_sq.0.bias"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_upload_of_another_kind_is_refused(name: str) -> None:
    term, right, key = RIGHT[name]
    term.check(right, PARAMS, {})
    for wrong in (
        {},
        {**right, "more": np.zeros(1, np.float32)},
        {**right, key: np.zeros((1, 1), np.float32)},
        {**right, key: np.zeros(right[key].shape, np.int64)},
    ):
        with pytest.raises(ValueError, match=f"expected|'{key}'"):
            term.check(wrong, PARAMS, {})


def test_uploads_out_of_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'U\.0\.bias' holds negative squares"):
        fr.Curvature(0.1).check({**SQUARES, "U.0.bias": -SQUARES["U.0.bias"] - 1}, PARAMS, {})
    with pytest.raises(ValueError, match=r"a mean loss of -0.5, but its power needs at least 0"):
        fr.FairWeights(1.0).check({"loss": np.asarray(-0.5)}, PARAMS, {})
    for key in ("exp_avg_sq.0.bias", "step"):
        wrong = MOMENTS[key].copy()
        wrong.reshape(-1)[-1] = -1  # one of them
        with pytest.raises(ValueError, match=f"'{key}' is negative, expected squares and"):
            fr.SharedMoments().check({**MOMENTS, key: wrong}, PARAMS, {})
    with pytest.raises(ValueError, match=r"expected \[\]"):
        fr.CloudModel().check(PARAMS, PARAMS, {})
    server = ServerContext(1, 0.1, {"w": np.full(2, 10.0, np.float32)})
    upload = {"U.w": np.full(2, 1e15, np.float32)}
    with pytest.raises(ValueError, match=r"its Fisher information times .* array 'w' .* ±1e\+15"):
        fr.Curvature(0.4).fold({}, 0, {"w": np.zeros(2)}, upload, 1.0, server)
    assert [fr.Curvature(0.4, implicit=i).tolerance(upload, 1) for i in (False, True)] == [10, 1e6]


def test_a_change_for_each_step_has_bounds() -> None:
    """An update of 5e14 is within the wire's bounds; times 1 / (K η) it is not."""
    one_step: Any = SimpleNamespace(num_steps=1)
    ctx = ServerContext(1, 0.1, {"w": np.zeros(2, np.float32)}, replies={2: one_step})
    with pytest.raises(ValueError, match=r"its change for each step: array 'w' .* beyond ±1e\+15"):
        fr.ControlVariates(2).fold({}, 2, {"w": np.full(2, 5e14)}, {}, 1.0, ctx)


TOLD = [(6, 10**9), (8, 9), (11, 10), (5.5, 10), (10.0, 10), (0, 0), (-1, 10), (np.nan, 10)]


@pytest.mark.parametrize("told", TOLD, ids=str)
@pytest.mark.parametrize("length", [{"local-epochs": 2}, {"local-steps": 10}], ids=str)
def test_steps_that_nobody_asked_for_cost_only_their_client(told: Any, length: Any) -> None:
    claims = claiming(0, num_examples=4, local_steps=told[0], planned_steps=told[1])
    grid = Tampered(app_of(fr.FedNovaClient, make_clients()), 4, claims)
    strategy = fr.FedNova(seed=1, fraction_evaluate=0.0)
    train(strategy, fr.FedNovaClient, rounds=1, length=length, grid=grid)
    assert strategy.history[0]["replies"] == [1, 2, 3]
    assert "where the round asked for" in strategy.history[0]["failures"][0]


@pytest.mark.parametrize(
    ("density", "small", "times"), [(0.02, 0, 1), (1.0, 0, 2), (1.0, 2**16, 1)]
)
def test_an_update_that_is_mostly_zero_or_small_is_decoded_once(
    density: float, small: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held of it gives the same model, to the bit, as decoding it when it is summed."""
    decoded = noted(monkeypatch, fr.SparseTernary, "decode")
    monkeypatch.setattr("flwr_regs.server.exchange.replies.SMALL", small)
    terms = {"terms": [fr.SparseTernary]}

    def model() -> Any:
        strategy = fr.RegStrategy([fr.SparseTernary(density)], seed=3, fraction_evaluate=0.0)
        return run(strategy, fr.RegClient, rounds=2, **terms)

    got = model()
    assert len(decoded) == len({data for _, data, *_ in decoded}) * times == 4 * 2 * times
    monkeypatch.setattr("flwr_regs.server.exchange.replies.SMALL", 0)
    # every update is decoded twice
    monkeypatch.setattr("flwr_regs.server.exchange.replies.MOSTLY_ZERO", 1e9)
    close(got, model(), 0.0)
