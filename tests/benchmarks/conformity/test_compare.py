"""The comparison: a right run agrees, each known wrong one is named, and its first departure is found."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from benchmarks.conformity.behaviours import BEHAVIOURS, METHODS, apply_to
from benchmarks.conformity.compare import TOLERANCE, judge
from benchmarks.conformity.loops import federate
from benchmarks.conformity.task import small_task
from tests.sampling import sampled

TASK, FULL = small_task(), small_task(0.7, 0.9)
"""`FULL` has momentum and a learning rate that falls, with which more behaviours show."""
TASKS = {m: FULL if m.startswith("SCAFFOLD") else TASK for m in METHODS}
WRONG = {
    m: [(b,) for b in apply_to(m, momentum=task.momentum, lr_decay=task.lr_decay)]
    for m, task in TASKS.items()
}
SHOWN_BY_THE_OPTIMISER = [
    n for n, b in BEHAVIOURS.items() if b.shows_with in ("momentum", "lr_decay")
]


def driven(method: str, *behaviours: str, task: Any = TASK, points: bool = True) -> dict[str, Any]:
    """What a driver returns whose library has these behaviours and computes with 32 bits."""
    trace = federate(task, method, behaviours)
    result: dict[str, Any] = {"models": [_half(w) for w in trace.models]}
    if points:
        result["points"] = {at: [_half(w) for w in ws] for at, ws in trace.points.items()}
    return result


def _half(w: Any) -> dict[str, Any]:
    return {name: array.astype(np.float32) for name, array in w.items()}


@pytest.mark.parametrize("points", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_a_right_one_agrees(method: str, points: bool) -> None:
    verdict = judge(TASK, method, driven(method, points=points))
    assert verdict.agrees
    assert verdict.largest < TOLERANCE / 100
    assert verdict.text.startswith("agrees with the paper")


@pytest.mark.parametrize("method", METHODS)
def test_the_task_tells_all_behaviours_apart(method: str) -> None:
    """So that no wrong run has two names."""
    task = TASKS[method]
    runs = {b: federate(task, method, b, points=False).models for b in [(), *WRONG[method]]}
    for (a, one), (b, other) in combinations(runs.items(), 2):
        apart = max(abs(v[n] - w[n]).max() for v, w in zip(one, other, strict=True) for n in w)
        assert apart > 5 * TOLERANCE, (a, b)


@sampled("method, behaviour", [(m, names[0]) for m in METHODS for names in WRONG[m]], seed=3)
def test_a_known_wrong_one_is_named(method: str, behaviour: str) -> None:
    task = FULL if behaviour in SHOWN_BY_THE_OPTIMISER else TASK
    verdict = judge(task, method, driven(method, behaviour, task=task))
    assert not verdict.agrees
    assert verdict.behaviours == ((behaviour,),)
    assert verdict.largest > 5 * TOLERANCE
    assert f"{behaviour}: it " in verdict.text


@pytest.mark.parametrize(
    ("behaviour", "where", "words"),
    [
        # its first c_k, first moved
        ("wrong-sign", (1, 2, 1, None), "in round 2, client 3, step 2"),
        ("one-batch", (0, 0, None, (2, 4)), "client 1 takes 2 steps and the paper 4"),
        ("by-examples", (0, None, None, None), "in round 1, in the server's step"),
    ],
)
def test_where_it_leaves_the_paper_is_found(behaviour: str, where: Any, words: str) -> None:
    verdict = judge(TASK, "SCAFFOLD", driven("SCAFFOLD", behaviour))
    assert (verdict.round, verdict.client, verdict.step, verdict.counts) == where
    assert words in verdict.text


def test_a_run_that_leaves_the_numbers_does_not_agree() -> None:
    result = driven("FedAvg")
    result["models"][2]["0.bias"] = result["models"][2]["0.bias"] * np.nan
    verdict = judge(TASK, "FedAvg", result)
    assert (verdict.round, verdict.client, verdict.largest) == (2, None, float("inf"))
    assert not verdict.behaviours
    assert verdict.text.endswith("equals no known behaviour")
