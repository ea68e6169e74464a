"""The oracles' rounds checked by themselves: FedAvg, replies that are dropped, clients that stop early."""

from typing import Any

import pytest

from tests.oracles.averaged import averaged, sgd
from tests.oracles.fedavg import fedavg
from tests.oracles.model import Params
from tests.oracles.numeric import SOME, apart
from tests.oracles.test_efl import CLIENTS, lr, model


def run(**settings: Any) -> list[Params]:
    return averaged(
        lambda turn: sgd(turn.w, turn.batches, turn.eta), model(), CLIENTS, 4, lr, **settings
    )


@pytest.mark.parametrize("weighting", ["num-examples", "uniform"])
@pytest.mark.parametrize("length", [{"epochs": 2}, {"local_steps": 4}])
@pytest.mark.parametrize("cohorts", [None, SOME])
def test_it_is_fedavg(weighting: str, length: dict[str, int], cohorts: list[list[int]]) -> None:
    how: dict[str, Any] = {"weighting": weighting, "cohorts": cohorts, **length}
    for a, b in zip(run(**how), fedavg(model(), CLIENTS, 4, lr, **how), strict=True):
        assert apart(a, b) < 1e-14


def test_dropped_replies_and_short_rounds() -> None:
    """A dropped reply counts as if its client was not there; a short round is one of fewer steps."""
    found = run(cohorts=SOME, unused=[{2}, {0, 1}, set(), {1}])
    wanted = fedavg(model(), CLIENTS, 4, lr, cohorts=[[0], [2], [1, 2], [0]])
    assert apart(found[3], wanted[3]) < 1e-14
    found = run(epochs=3, steps_done=[dict.fromkeys(range(3), t) for t in (2, 2, 2, 2)])
    assert apart(found[3], fedavg(model(), CLIENTS, 4, lr, local_steps=2)[3]) < 1e-14


def test_a_client_forgets_before_its_round() -> None:
    told: list[Any] = []
    averaged(
        lambda turn: told.append((turn.t, turn.k)) or turn.w,
        model(), CLIENTS, 2, lr, lost=[set(), {1}], cohorts=[[0, 1], [0, 1]], forget=told.append,
    )  # fmt: skip
    assert told == [(1, 0), (1, 1), 1, (2, 0), (2, 1)]
    with pytest.raises(ValueError, match="other"):
        run(weighting="other")
