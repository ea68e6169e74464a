"""Robust aggregators with every kind of method: one hostile client moves the model boundedly."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message

import flwr_regs as fr
from flwr_regs.flower.grids.in_process import InProcessGrid
from flwr_regs.term import ServerContext
from flwr_regs.testing import Method, problem
from flwr_regs.testing.problem import NDArrays, SerialisingGrid
from tests.conftest import Tampered, close, make_clients, make_model
from tests.laws import CASES
from tests.sampling import sampled

N, LIAR = 7, 3
NAMED = {c.name: c for c in CASES}
METHODS = {c.strategy.__name__: c for c in reversed(CASES)}  # the first case of each
METHODS = {name: c for name, c in METHODS.items() if fr.METHODS[name].robust}
METHODS |= {name: NAMED[name] for name in ("SCAFFOLD-option-1", "SCAFFOLD-server")}
METHODS |= {
    "EFL": Method(fr.EFL, fr.EFLClient, [], settings={"lam": 0.3}),
    "EFL-coded": NAMED["EFL"],
    "FedPer": Method(fr.FedPer, fr.FedPerClient, [], settings={"patterns": "2.*"}),
}
UPLOADING = (
    *("RFedAvg", "RFedAvgPlus", "EFL", "FedCurv", "Mime", "MimeLite", "SCAFFOLD-option-1"),
    *("FedSMOO", "FedAdamW", "QFedAvg"),
)
AGGREGATORS = (
    fr.CoordinateMedian(),
    fr.TrimmedMean(0.2),
    fr.Krum(1),
    fr.Krum(1, 3),
    fr.GeometricMedian(),
    fr.NormBound(),
    fr.CenteredClipping(1.0),
)


def hostile(part: str, kind: str, pid: int, message: Message, reply: Message) -> Message:
    """One client's replies are a million times too large: its model, its uploads, or both."""
    for name, record in reply.content.array_records.items() if pid == LIAR else ():
        if part in ("both", "update" if name == "arrays" else "uploads"):
            for key, a in record.items():
                if (array := a.numpy()).dtype.kind == "f":
                    record[key] = Array(np.asarray(array * array.dtype.type(1e6)))
    return reply


def trained(
    name: str,
    aggregator: Any,
    part: str = "",
    grid: Any = InProcessGrid,
    dtype: torch.dtype = torch.float64,
    **settings: Any,
) -> tuple[NDArrays, Any]:
    """The last model of two rounds, and the strategy; `part` of one client is hostile."""
    method = METHODS[name]
    data, model = make_clients(N, dtype), partial(make_model, dtype)
    app = problem.app_of(method.make_client, data, model)
    if part:
        grid = partial(Tampered, change=partial(hostile, part))
    strategy = method.build(aggregator=aggregator, seed=3, fraction_evaluate=0.0, **settings)
    how: dict[str, Any] = {"rounds": 2, "clients": data, "lr": 0.1, "length": {"local-steps": 3}}
    models = problem.train(strategy, method.make_client, grid=grid(app, N), model=model, **how)
    return models[-1], strategy


@cache
def clean(name: str, aggregator: Any) -> NDArrays:
    return trained(name, aggregator)[0]


def apart(a: NDArrays, b: NDArrays) -> float:
    return max(float(np.abs(a[n] - b[n]).max()) for n in a)


@sampled(
    "name,aggregator,part",
    [
        (name, aggregator, part)
        for name in METHODS
        if name != "EFL-coded"
        for aggregator in AGGREGATORS
        for part in (("both", "uploads") if name in UPLOADING else ("both",))
    ],
    seed=1,
    ids=str,
    among=lambda cell: cell[0] in (*UPLOADING, "FedAvg", "FedFOR", "FedAdam", "FedExP", "FedPer"),
)
def test_one_hostile_client_has_a_bounded_effect(name: str, aggregator: Any, part: str) -> None:
    attacked, strategy = trained(name, aggregator, part)
    assert all(LIAR in entry["replies"] for entry in strategy.history)
    assert apart(attacked, clean(name, aggregator)) < 2.0


def test_step_counts_do_not_hide_second_moments_from_a_bound() -> None:
    strategies = [trained("FedAdamW", fr.NormBound(), part)[1] for part in ("", "uploads")]
    clean, attacked = (s.training.model.server["fedadamw"] for s in strategies)
    assert all(a.max() < 10 * clean[key].max() for key, a in attacked.items())
    assert clean["step"] == pytest.approx(6, rel=1e-12)  # two rounds of three steps


@pytest.mark.parametrize("aggregator", AGGREGATORS[::3], ids=repr)
def test_updates_may_be_coded_or_rounded(aggregator: Any) -> None:
    """A code's aggregate is the same through bytes, to the bit; in half precision it is near."""
    got, _ = trained("EFL-coded", aggregator, grid=SerialisingGrid)
    close(got, clean("EFL-coded", aggregator), 0.0)
    single = partial(trained, "FedAvg", aggregator, dtype=torch.float32)
    rounded, whole = (single(wire_dtype=wire)[0] for wire in ("bfloat16", None))
    assert 0 < apart(rounded, whole) < 0.05


def test_each_client_gets_the_aggregate_of_the_others_features() -> None:
    """rFedAvg+ and rFedAvg: the median of the others' δ."""
    deltas = {pid: np.array([float(pid), -(float(pid) ** 2)]) for pid in range(5)}
    median = {pid: np.median([d for p, d in deltas.items() if p != pid], axis=0) for pid in deltas}
    calls: list[list[int]] = []

    def aggregated(values: Any) -> Any:
        calls.append(list(values))
        return {"delta": np.median([v["delta"] for v in values.values()], axis=0)}

    ctx = ServerContext(2, 0.1, aggregated=aggregated, robust=True)
    plus = fr.LeaveOneOutMean(0.1)
    found = plus.answer_in({p: {"delta": d} for p, d in deltas.items()}, ctx)
    table = fr.FeatureTable(0.1)
    rows = {str(p): d for p, d in deltas.items()}
    assert table.broadcast(rows, ctx) == {}
    for pid in deltas:
        np.testing.assert_array_equal(found[pid]["mean"], median[pid])
        slot = table.broadcast_to(pid, rows, ctx)
        np.testing.assert_array_equal(slot["table"], median[pid][None])
        assert pid not in slot["ids"]
    assert all(len(call) == 4 for call in calls)
    assert plus.answer_in({1: {"delta": deltas[1]}}, ctx) == {1: {}}
    two = plus.answer_in({p: {"delta": deltas[p]} for p in (1, 3)}, ctx)
    np.testing.assert_array_equal(two[1]["mean"], deltas[3])
    assert len(calls.pop()) == len(calls.pop()) == 1
    assert table.broadcast_to(1, {"1": deltas[1]}, ctx) == {}


def test_too_few_feature_means_fail_the_round() -> None:
    """Each client is left out of its own mean: one more client is needed than for the updates."""
    with pytest.raises(fr.RoundFailed, match=r"first exchange, Krum.* needs at least 7.* are 6"):
        trained("RFedAvgPlus", fr.Krum(4))
