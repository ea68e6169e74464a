"""The studies: a study that was stopped goes on, tuned on held-out data, trained with the package."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common

TINY = common.Setting("tiny", "digits", 2, 0.1, cohort=2, dirichlet=0, rounds=common.LAST)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[common.Run]:
    """The runs that were asked for; they are not trained, and 0.9 is the best learning rate."""
    runs = list[common.Run]()

    def train(run: common.Run, data_dir: str) -> Mapping[str, Any]:
        runs.append(run)
        outcome = {"accuracy": 1 - abs(run.lr - 0.9), "diverged": False, "refused": 0, "seconds": 1}
        return {**common.asdict(run), **outcome}

    monkeypatch.setattr(common, "train", train)
    return runs


def test_a_finished_run_is_not_done_again(tmp_path: Path, trained: list[common.Run]) -> None:
    runs = [common.Run(TINY, "FedProx", {"mu": 0.1}, seed) for seed in (1, 2, 3)]
    common.Results(tmp_path / "runs").finish(runs[:2])
    common.Results(tmp_path / "runs").finish(runs)
    assert [run.seed for run in trained] == [1, 2, 3]
    assert [line["seed"] for line in common.read_lines(tmp_path / "runs")] == [1, 2, 3]
    with pytest.raises(LookupError, match="lacks 1 runs"):
        common.Results(tmp_path / "runs", processes=0).finish([replace(runs[0], seed=4)])


def test_the_learning_rate_is_fedavgs_best_on_held_out_data_and_the_grid_grows(
    tmp_path: Path, trained: list[common.Run]
) -> None:
    best, tried = common.Results(tmp_path / "runs").tuned(TINY)
    assert best == 0.9
    assert list(tried) == [0.0333, 0.1, 0.3, 0.9, 2.7]
    assert {(run.method, run.tuning) for run in trained} == {("FedAvg", True)}
    assert {run.seed for run in trained} == {common.TUNING_SEED}


def test_a_run_trains_with_the_package_and_one_that_diverges_says_so() -> None:
    good = common.train(common.Run(TINY, "FedFOR", {}, tuning=True))
    assert 0 < good["accuracy"] <= 1
    assert not good["diverged"]
    again = common.train(common.Run(TINY, "FedFOR", {}, tuning=True))
    assert again["accuracy"] == good["accuracy"]
    strong = replace(TINY, steps=30)
    bad = common.train(common.Run(strong, "FedProx", {"mu": 1e4}))
    assert (bad["accuracy"], bad["diverged"], bad["refused"]) == (None, True, 2)
    fine = common.train(common.Run(strong, "FedProx", {"mu": 1e4, "implicit": True}))
    assert not fine["diverged"]
