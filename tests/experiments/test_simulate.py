"""``flwr_regs.simulate``: three lines, quiet, and the command line's numbers."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flwr_regs import FedAvg, FedFOR, Term, simulate
from flwr_regs.experiments import cli
from flwr_regs.experiments.cards import card_files
from flwr_regs.experiments.commands import results_of
from flwr_regs.experiments.data import datasets
from flwr_regs.experiments.report.folders import locked
from tests.experiments.data.sources.made import Files

QUICK: dict[str, Any] = {"rounds": 2, "local_epochs": 1}
METHODS = "FedAvg, FedFOR(alpha=0.1)"


def test_it_is_quiet_and_gives_the_numbers_of_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    with torch.inference_mode():  # also where gradients are switched off
        result = simulate(METHODS, seeds=(1, 2), **QUICK)
    assert capfd.readouterr() == ("", "")
    assert torch.get_num_threads() == threads
    assert not list(tmp_path.iterdir())
    table = result.table()
    assert table.index.tolist() == METHODS.split(", ")
    assert table["n"].tolist() == [2, 2]
    assert result.plot("megabytes").axes
    words = [f"methods={METHODS}", "rounds=2", "local-epochs=1", "out=here"]
    assert cli.main(["run", *words, "--seeds", "1,2"]) == 0
    experiment, _ = card_files.of_folder(Path("here"))
    again = results_of(experiment, experiment.panel, Path("here")).table()
    columns = ["final", "last5", "mb", "worst_client"]
    np.testing.assert_array_equal(again[columns], table[columns])


def test_seeds_and_settings_may_be_numpys_and_results_are_kept(tmp_path: Path) -> None:
    given: dict[str, Any] = {"rounds": np.int64(1), "local_epochs": 1, "lr": np.float32(0.5)}
    with locked(tmp_path), pytest.raises(ValueError, match="is being written by another run"):
        simulate("FedAvg", out=tmp_path, **given)
    given |= {"baseline": "FedAvg", "out": (kept := tmp_path / "kept")}
    result = simulate(METHODS, seeds=(s for s in np.arange(1, 3)), **given)
    assert result.seeds == [1, 2]
    assert {(r.job["lr"], r.job["rounds"]) for r in result.runs} == {(0.5, 1)}
    experiment, made = card_files.of_folder(kept)
    assert (experiment.seeds, made["command"]) == ((1, 2), ["flwr_regs.simulate"])
    for name in ("clients.pdf", "table.txt"):
        (kept / name).unlink()  # they are drawn again
    assert cli.main(["plot", str(kept)]) == 0
    assert (kept / "clients.pdf").is_file()
    assert (kept / "table.txt").read_text() == result.text()
    assert "vs FedAvg" in result.text()


DISTANCE = 2


def load() -> Any:
    """Two classes of points with three numbers each, which may be as far apart as others of them."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 2
    x = rng.normal(size=(240, 3)) + DISTANCE * y[:, None]
    return (x[:200], y[:200]), (x[200:], y[200:])


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


class Stepless(FedAvg):
    """FedAvg with a server of the notebook's own, which makes no step."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        _, metrics = super().aggregate_train(server_round, replies)
        return None, metrics


def test_a_notebooks_own_data_model_and_method_go_in_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: dict[str, Any] = {"partition": "iid", "seeds": [1], "num_clients": 4, "lr": 0.2}
    result = simulate(["FedAvg", Stepless, lambda: FedFOR(0.1)], load, Net, rounds=5, **given)
    plain, stepless, made = result.table()["final"]
    assert stepless < 0.8 < min(plain, made)
    monkeypatch.setitem(globals(), "DISTANCE", 0)
    assert simulate("FedAvg", load, Net, rounds=5, **given).table()["final"].max() < 0.8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"runner": "spark"}, "'runner' must be one of process, stacked, ray, not 'spark'"),
        ({"workers": "2"}, "'workers' must be a whole number of at least 1, not '2'"),
        ({"baseline": FedAvg}, "'baseline' must be one of '', FedAvg, .*, not <class .*FedAvg'>"),
        ({"baseline": "FedAvgM"}, "'baseline' has no 'FedAvgM'; did you mean 'FedAvg'"),
        ({"out": 5}, "out must be the path of a folder, or None, not 5"),
        ({"seeds": ()}, "seeds"),
        ({"seed": 3}, r"simulate takes seeds=\(1, 2, 3\), not seed"),
        ({"seeds": (1, 1)}, "seeds must be different"),
        ({"seeds": ([1],)}, r"setting 'seed' must be a whole number .*, not \[1\]"),
        ({"seeds": 3}, r"seeds must be several, such as \(1, 2, 3\)"),
        ({"methods": [FedAvg()]}, "give the class FedAvg, .*not an instance"),
        ({"methods": [lambda: FedAvg]}, "expected a strategy .*, not the class FedAvg"),
        ({"methods": [lambda: 1 / 0]}, r"ZeroDivisionError: .*test_simulate\.py, line"),
        ({"dataset": lambda: 7}, "expected"),
        ({"dataset": lambda: 7, "workers": 2}, "other processes find methods, data set and model"),
    ],
)
def test_what_is_wrong_is_said_before_anything_trains(given: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        simulate(**{"seeds": (1,), **QUICK, **given})


def test_an_error_of_the_user_is_one_error(capfd: pytest.CaptureFixture[str]) -> None:
    class Bad(Term):
        name = "bad"

        def correct(self, grads: Any, params: Any, ctx: Any) -> Any:
            return {n: g + missing for n, g in grads.items()}  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(RuntimeError, match=r"NameError.*test_simulate\.py"):
        simulate([Bad], seeds=(1,), **QUICK)
    assert capfd.readouterr() == ("", "")


def test_a_run_says_why_its_clients_are_not_stacked() -> None:
    (run,) = simulate("FedAvg", seeds=(1,), runner="stacked", optimizer="Adafactor", **QUICK).runs
    assert "one by one: Adafactor is not known to treat each number alone" in run.warnings[0]


def test_one_process_needs_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert simulate("FedAvg", seeds=(1,), **QUICK).runs
    with pytest.raises(ImportError, match="needs ray: pip install"):
        simulate("FedAvg", seeds=(1,), rounds=1, runner="ray")


class Writes(nn.Module):
    """Its forward writes to its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x -= 0.5
        return self.layer(x.flatten(1))  # type: ignore[no-any-return]


def test_a_forward_that_writes_to_its_inputs_leaves_the_data_as_they_are() -> None:
    simulate("FedAvg, Local", model=Writes, seeds=[1], **QUICK)
    assert datasets.load("digits").test_x.min() == 0


def test_pictures_of_ones_own_that_have_changed_are_read_again(tmp_path: Path) -> None:
    own = {"data_dir": "here", "dataset": "image-folder(size=8)", "model": "logistic"}
    losses = set()
    for pictures in [Files(tmp_path / "here")] * 2:
        pictures.image_folder()
        result = simulate("FedAvg", partition="iid", seeds=[1], num_clients=2, **own, **QUICK)
        losses.add(result.runs[0].test[-1]["loss"])
    assert len(losses) == 2
    assert result.runs[0].job["data-dir"] == str(tmp_path / "here")
