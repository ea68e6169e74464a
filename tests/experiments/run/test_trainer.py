"""A run: its tests, its record and its model, against the saved model; and what ends it."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flwr_regs import InProcessGrid
from flwr_regs.experiments import cli
from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.models import models
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.folders import locked
from flwr_regs.experiments.report.results import Results
from flwr_regs.experiments.report.run_records import RunRecord, read, record_path
from flwr_regs.experiments.run import clients, costs, engine, server_app, trainer
from flwr_regs.experiments.run.progress import Progress
from flwr_regs.experiments.run.server_accuracy import ServerTest
from flwr_regs.flower.grids.in_process import FIRST
from tests.conftest import noted
from tests.experiments.runs import runs_of, trained

QUICK: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "num_clients": 4}


def in_folder(folder: Path, **settings: Any) -> list[RunRecord]:
    return engine.execute(runs_of(**settings), folder, Progress())


@pytest.fixture
def tests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The server's tests."""
    return noted(monkeypatch, ServerTest, "outputs")


def test_tests_and_figures_are_those_of_the_saved_model(tmp_path: Path, tests: list[Any]) -> None:
    methods = "FedAvg,FedProx(0.1),FedADC+SelfDistillation+SparseTernary(0.05, 0.05)"
    records = in_folder(tmp_path, methods=methods, **QUICK)
    digits = data.load("digits")
    # the initial model too; none twice
    assert [len(test.x) for test, *_ in tests] == [len(digits.test_y)] * 3 * len(records)
    cohorts = [[entry["cohort"] for entry in record.rounds] for record in records]
    assert cohorts[0] == cohorts[1] == cohorts[2]
    parts = client_data_of(runs_of(**QUICK)[0].settings).parts
    for record in records:
        path = record_path(tmp_path, record.label, 7)
        kept = read(path)
        assert (kept.test, kept.per_client) == (record.test, record.per_client)
        assert [e["round"] for e in kept.rounds] == [1, 2]
        model = models.build("digits", "auto", 7).eval()
        model.load_state_dict(load_file(tmp_path / f"{path.stem}.safetensors"))
        with torch.no_grad():
            right = model(torch.from_numpy(digits.test_x)).argmax(1).numpy() == digits.test_y
        assert record.test[-1]["accuracy"] == right.mean()
        by_class = np.array([right[digits.test_y == k].mean() for k in range(10)])
        expected = [by_class[digits.train_y[rows]].mean() for rows in parts]
        np.testing.assert_allclose(record.per_client["clients"], expected)
        assert record.per_client["worst"] == pytest.approx(min(expected))
        small = record.rounds[-1]["bytes_up"][0] < 5000  # dense: 19,000
        assert small == ("SparseTernary" in record.label)
        assert not record.rejected


def test_a_bounded_test_takes_some_of_the_examples(tests: list[Any]) -> None:
    (record,) = trained(methods="FedAvg", test_examples=20, **QUICK).values()
    assert [len(test.x) for test, *_ in tests] == [20] * 3
    assert {20 * point["accuracy"] % 1 for point in record.test} == {0}


def test_settings_reach_the_server_and_the_clients() -> None:
    private = {"dp_clip_norm": 0.5, "dp_noise": 4.0, "dp_delta": 1e-4, "weighting": "uniform"}
    (record,) = trained(methods="FedADC", fraction_train=0.5, **private, **QUICK).values()
    assert record.rounds[-1]["delta"] == 1e-4
    assert record.rounds[-1]["epsilon"] > 0
    (slow,) = trained(methods="FedFOR", rounds=2, straggler_share=0.5, incomplete="drop").values()
    assert slow.rounds[0]["incomplete"]
    assert not set(slow.rounds[0]["incomplete"]) & set(slow.rounds[0]["replies"])
    (held,) = trained(methods="FedAvg", held_out_share=0.25, **QUICK).values()
    assert held.rounds[0]["examples_processed"] == pytest.approx(0.75 * 1437, abs=4)


def test_personalisation_and_covering_cohorts_run_from_settings() -> None:
    given = {"personalise": "both", "cohorts": "class-covering", "fraction_train": 0.8}
    method = "FedADC(downlink='delta')"
    (record,) = trained(methods=method, overlap=True, rounds=2, **given).values()
    assert "bytes_ahead" in record.rounds[0]
    told = record.rounds[-1]["evaluate"]["clients"].values()
    assert np.mean([c["personal-accuracy"] for c in told]) > np.mean([c["accuracy"] for c in told])


def test_a_client_without_a_test_example_of_its_labels_has_no_accuracy() -> None:
    test: Any = ServerTest.__new__(ServerTest)
    test.y = test._targets = torch.tensor([0, 1])
    test.last = torch.eye(3)[:1].expand(2, 3)  # class 0, each time
    test.clients = SimpleNamespace(label_counts=np.array([[1, 3, 4], [0, 0, 8]]))
    np.testing.assert_allclose(test.expected_accuracies(), [0.25, np.nan])


@pytest.mark.parametrize("methods", ["FedBN+FedADC", "FedPer('12.*')", "FedBN+Ditto"])
def test_clients_test_what_is_private_or_in_their_own_domain(methods: str) -> None:
    given = {"dataset": "digits-domains", "partition": "iid", "examples_per_client": 100}
    (record,) = trained(methods=methods, **{**QUICK, "num_clients": 5}, **given).values()
    assert [point["round"] for point in record.test] == [1, 2]
    assert not any(e["failures"] or e["evaluate"]["failures"] for e in record.rounds)
    told = record.rounds[-1]["evaluate"]["clients"].values()
    own = [c["personal-accuracy"] for c in told]
    assert record.per_client["worst"] == min(own)
    assert record.test[-1]["accuracy"] == pytest.approx(np.mean(own))
    assert (own != [c["accuracy"] for c in told]) == ("Ditto" in methods)
    assert record.rounds[0]["examples_processed"] == 500


@pytest.mark.parametrize("runner", ["process", "stacked"])
def test_a_client_that_holds_nothing_out_does_not_test(runner: str) -> None:
    given = {"partition": "quantity", "held_out_share": 0.02, "test_on_clients": True}
    runs = runs_of(
        methods="FedAvg,Ditto,Local,Pooled,FedExP", **{**QUICK, **given, "num_clients": 5}
    )
    held = [int(0.02 * len(rows)) for rows in client_data_of(runs[0].settings).parts]
    assert costs.cost_of(runs[0], costs.Timed(0, 0, test=1, tested=1)).test == sum(held)
    records = engine.execute(runs, None, Progress(runs), runner=runner)
    assert len({record.accuracy[-1] for record in records}) > 2
    assert [r.label for r in records if trainer.OF_CLIENTS in r.warnings] == ["FedExP"]
    for record in records:
        each = Results([record]).clients()["accuracy"]
        assert each.isna().tolist() == [n == 0 for n in held] != [False] * 5
        assert record.accuracy[-1] == pytest.approx(each.mean())
        assert record.per_client["worst"] == metrics.figures(record)["worst-tenth"] == each.min()
        whole = each.dropna() * [n for n in held if n]
        tests = [entry.get("evaluate", {"failures": {}}) for entry in record.rounds]
        silent = {why for test in tests for why in test["failures"].values()}
        assert all(f": a {record.method} client without test data" in why for why in silent)
        assert whole.tolist() == pytest.approx(whole.round().tolist())


def test_a_last_round_in_which_no_client_tests_leaves_the_tests_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first(entry: Any, metric: str = "accuracy") -> list[float]:
        return metrics.on_clients(entry, metric) if entry["round"] == 1 else []

    monkeypatch.setattr(trainer, "on_clients", first)
    given = {"dataset": "digits-domains", "partition": "iid", "examples_per_client": 100}
    (record,) = trained(methods="FedBN", **{**QUICK, "num_clients": 5}, **given).values()
    assert [point["round"] for point in record.test] == [1]
    assert record.per_client["clients"] == first(record.rounds[0])


def test_an_ensemble_is_the_mean_of_the_last_models(tmp_path: Path) -> None:
    given = {"methods": "FedAvg", "ensemble": 2, "lr": 0.2, "local_epochs": 2}
    outputs = []
    for rounds in (2, 3):
        folder = tmp_path / str(rounds)
        (record,) = in_folder(folder, rounds=rounds, **given)
        model = models.build("digits", "auto", 7).eval()
        model.load_state_dict(load_file(folder / "FedAvg-seed7.safetensors"))
        with torch.no_grad():
            outputs.append(model(torch.from_numpy(data.load("digits").test_x)).softmax(1))
    right = sum(outputs).argmax(1).numpy() == data.load("digits").test_y  # type: ignore[attr-defined]
    assert record.test[-1]["ensemble"] == right.mean()
    assert "ensemble" not in record.test[0]


def test_a_run_that_diverges_keeps_its_history_and_the_model_before(tmp_path: Path) -> None:
    (record,) = in_folder(tmp_path, rounds=4, methods="FedAvg", lr=1e30)
    assert "TooFewReplies" in record.error
    assert (record.diverged, record.ended, record.stopped) == (True, True, "diverged in round 1")
    assert record.rounds[-1]["failures"]
    assert (tmp_path / "FedAvg-seed7.safetensors").is_file()


def test_ctrl_c_in_a_test_ends_at_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"methods": "FedAvg", "checkpoint_every": 1e-6, "ensemble": 2, **QUICK}
    begun = []
    outputs = ServerTest.outputs

    def interrupted(self: ServerTest, *args: Any) -> Any:
        begun.append(1)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return outputs(self, *args)

    with monkeypatch.context() as m:
        m.setattr(ServerTest, "outputs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            in_folder(tmp_path / "a", **given)
    assert len(begun) == 3  # no test more
    half = read(record_path(tmp_path / "a", "FedAvg", 7))
    assert (half.ended, len(half.rounds), len(half.test)) == (False, 2, 2)
    other = shutil.copytree(tmp_path / "a", tmp_path / "c")
    (mixed,) = engine.execute(runs_of(**given), other, Progress(), runner="stacked")
    assert mixed.runner == "process, stacked"
    (resumed,) = in_folder(tmp_path / "a", **given)
    assert resumed.processor_seconds is None  # not all of it ran in one process
    (whole,) = in_folder(tmp_path / "b", **given)
    assert (resumed.test, resumed.per_client) == (whole.test, whole.per_client)


def test_a_grid_of_flowers_gives_the_same_and_says_that_clients_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The app that reads the run config, as in Ray; here in this process."""
    given = {"methods": "FedAvg,FedFOR(alpha=0.1),FedFOR(alpha=0.2)", **QUICK}
    runs = runs_of(**given)
    config = {**runs[0].settings.config, "methods": given["methods"], "out": f"{tmp_path}/four"}
    context: Any = SimpleNamespace(run_config=config)
    server_app.main(InProcessGrid(clients.app, 4, config), context)
    for run, alone in zip(runs, trained(**given).values(), strict=True):
        there = read(record_path(tmp_path / "four", run.label, 7))
        assert (there.test, there.per_client) == (alone.test, alone.per_client)
    assert "round    2/2   accuracy" in capsys.readouterr().out
    with pytest.raises(ValueError, match="four holds results: go on with --resume"):
        server_app.main(InProcessGrid(clients.app, 4, config), context)
    config |= {"methods": "FedAvg", "out": f"{tmp_path}/two"}
    server_app.main(InProcessGrid(clients.app, 2, config), context)
    assert "this run has 2 SuperNodes, but num-clients asks for 4" in capsys.readouterr().out
    assert "num-supernodes=4" in (tmp_path / "two" / "table.txt").read_text()
    assert cli.main(["reproduce", f"{tmp_path}/two"]) == 0
    config["out"] = str(tmp_path)
    with locked(tmp_path), pytest.raises(ValueError, match=f"{tmp_path} is being written"):
        server_app.main(InProcessGrid(clients.app, 2, config), context)
    grid = InProcessGrid(clients.app, 3, config)
    grid._contexts[FIRST].node_config["num-partitions"] = 2
    with pytest.raises(ValueError, match=r"the same num-partitions, .* \{0: 2, 1: 3, 2: 3\}"):
        server_app.population(grid)


def test_results_land_where_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the checkout if the server runs there, else at home; ``out`` decides if set."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert server_app.results_folder("").parent == tmp_path / "home" / "flwr-regs-results"
    assert server_app.results_folder(str(tmp_path / "mine")) == tmp_path / "mine"
    with pytest.raises(ValueError, match="'out' must be an absolute path"):
        server_app.results_folder("mine")
    (tmp_path / "simulations").mkdir()
    (tmp_path / "simulations" / "server_app.py").touch()
    assert server_app.results_folder("").parent == tmp_path / "results"
