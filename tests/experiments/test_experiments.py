"""The comparison job: settings, data, partitions, report and commands, without a Flower process."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_regs import InProcessGrid
from flwr_regs.experiments import words
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.run import comparison
from flwr_regs.experiments import settings
from flwr_regs.experiments.settings.job import Job
from simulations.client_app import app
from tests.conftest import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DEFAULTS = PYPROJECT["tool"]["flwr"]["app"]["config"]


def job(**settings: Any) -> Job:
    return Job.from_run_config(
        {**DEFAULTS, **{k.replace("_", "-"): v for k, v in settings.items()}}
    )


def test_the_app_has_the_packages_settings() -> None:
    """``flwr run .`` and the command line have the same defaults, of the same kinds."""
    assert DEFAULTS == settings.DEFAULTS
    assert {k: type(v) for k, v in DEFAULTS.items()} == {
        k: type(v) for k, v in settings.DEFAULTS.items()
    }
    written = (ROOT / "pyproject.toml").read_text()
    assert settings.toml() in written
    assert tomllib.loads(settings.toml()) == settings.DEFAULTS
    assert set(settings.meanings()) == set(DEFAULTS)


def test_the_clients_optimiser_is_a_matter_of_settings() -> None:
    assert job().train_config == {"lr": 0.05, "local-epochs": 5}
    assert job(lr=1).lr == 1.0  # flwr hands lr=1 over as an int
    given = {"optimizer": "RMSprop", "momentum": 0.9, "weight_decay": 1e-4, "clip_norm": 1}
    assert job(local_steps=7, **given).train_config == {
        "lr": 0.05,
        "local-steps": 7,
        "optimizer": "RMSprop",
        "momentum": 0.9,
        "weight-decay": 1e-4,
        "clip-norm": 1.0,
    }
    assert job(on_divergence="stop").strategy("FedAvg").on_divergence == "stop"
    with pytest.raises(ValueError, match="'FedADC': FedADC's clients run SGD without momentum"):
        job(methods="FedAvg, FedADC", momentum=0.9).check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loacl_epochs": 1}, "unknown setting 'loacl-epochs'.*did you mean 'local-epochs'"),
        (
            {"fedfor_alpha": 1},
            r"'fedfor-alpha'.*stand in its call, such as methods='FedFOR\(alpha=",
        ),
        ({"methods": "FedAvg,FedFoo"}, "'FedFoo': the package has no strategy or term 'FedFoo'"),
        ({"methods": ""}, "there is no method in ''"),
        ({"optimizer": "adamw"}, "'optimizer' must be one of SGD, Adam, .*not 'adamw'"),
        ({"momentum": 1.0}, "'momentum' must be a number of at least 0 below 1, not 1.0"),
        (
            {"optimizer": "Adam", "momentum": 0.9},
            "the run config has the key 'momentum'.*Adam takes none",
        ),
        ({"on_divergence": "ignore"}, "'on-divergence' must be one of warn, stop"),
        ({"dataset": "mnits"}, r"must be one of .*mine.py:load, not 'mnits'; did you mean 'mn"),
        ({"model": "CNN"}, r"must be one of auto.*mine.py:Net, not 'CNN'; did you mean 'cnn'"),
        ({"xyz": 1}, r"^unknown setting 'xyz' \(`flwr-regs list settings` shows all\)$"),
        ({"methods": "fedavg"}, r"^'fedavg': .*'fedavg'; did you mean 'FedAvg'\? \(`flwr-regs li"),
        ({"methods": "mine.py:Clip", "code_dir": "/tmp"}, "'mine.py:Clip': there is no file '/t"),
        ({"methods": "FedADC+FedAdam"}, "only one term can own the server's step"),
        ({"methods": "FedBN", "held_out_clients": 2}, "do not go with domains or private entries"),
        ({"lr": "0.1"}, "'lr' must be a number above 0, not '0.1'"),
        ({"lr": True}, "'lr' must be a number"),
        ({"lr": float("inf")}, "'lr' must be a number above 0, not inf"),
        ({"seed": 10**20}, "'seed' must be a whole number of at least 0, not 1000"),
        ({"overlap": 1}, "'overlap' must be true or false, not 1"),
        ({"rounds": 2.5}, "'rounds' must be a whole number of at least 1, not 2.5"),
        ({"fraction_train": 1.5}, "'fraction-train' must be a number above 0 up to 1"),
        ({"data_dir": "/does/not/exist"}, "'data-dir': there is no folder"),
        ({"out": "results"}, "'out' must be an absolute path"),
        ({"wire_dtype": "half"}, "'wire-dtype' must be one of , bfloat16, float16, not 'half'"),
        ({"methods": "FedFOR(downlink='both')"}, "downlink must be 'model' or 'delta', not 'both'"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_sentence(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(**settings)


def in_process(settings: Job, folder: Path | None) -> dict[str, Any]:
    config = {k.replace("_", "-"): v for k, v in vars(settings).items()}
    return comparison.run(settings, InProcessGrid(app, settings.num_clients, config), folder)


def test_the_job_runs_in_one_process_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = job(rounds=3, methods="FedAvg,FedProx(0.1),FedFOR", local_epochs=1, num_clients=4)
    history = in_process(settings, tmp_path)
    assert in_process(settings, None)["methods"].keys() == history["methods"].keys()
    out = capsys.readouterr().out
    assert "FedProx(0.1) round    3/3" in out
    assert "to 85%" in out
    assert f"results: {tmp_path}" in out
    saved = json.loads((tmp_path / "history.json").read_text())
    assert list(saved["methods"]) == ["FedAvg", "FedProx(0.1)", "FedFOR"]
    assert [len(m["rounds"]) for m in saved["methods"].values()] == [3, 3, 3]
    rows = {r["method"]: r for r in saved["summary"]}
    assert rows["FedAvg"]["final"] == saved["methods"]["FedAvg"]["test"][-1]["accuracy"]
    assert rows["FedAvg"]["mb_up"] > 0.0193  # (64·64 + 64 + 64·10 + 10) float32
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    cohorts = [[r["cohort"] for r in m["rounds"]] for m in saved["methods"].values()]
    assert cohorts[0] == cohorts[1] == cohorts[2]
    assert history["notes"] == []


def test_half_precision_on_the_wire_is_a_setting() -> None:
    assert job().strategy("FedAvg").wire_dtype is None
    assert job(wire_dtype="float16").strategy("FedProx(0.1)+FedFOR").wire_dtype == "float16"
    with pytest.raises(ValueError, match="does not go with compression"):
        job(wire_dtype="float16").strategy("FedFOR+SparseTernary(0.1)")
    down = [
        in_process(job(rounds=1, methods="FedAvg", local_steps=1, wire_dtype=w), None)["methods"][
            "FedAvg"
        ]
        for w in ("", "bfloat16")
    ]
    full, less = (m["rounds"][0]["bytes_down"][0] for m in down)
    assert 0.5 < less / full < 0.53


def test_central_privacy_runs_from_settings_and_tells_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = {"dp_clip_norm": 0.5, "dp_noise": 4.0, "dp_delta": 1e-4, "local_epochs": 1}
    settings = job(
        rounds=2, methods="FedAvg,FedADC", weighting="uniform", fraction_train=0.5, **private
    )
    history = in_process(settings, tmp_path)
    out = capsys.readouterr().out
    for method in ("FedAvg", "FedADC"):
        last = history["methods"][method]["rounds"][-1]
        assert last["delta"] == 1e-4
        assert (
            f"{method}: epsilon {last['epsilon']:.3g} at delta 0.0001, one client replaced" in out
        )
    with pytest.raises(ValueError, match="use weighting='uniform'"):
        job(methods="FedAvg", **private).strategy("FedAvg")
    with pytest.raises(ValueError, match=r"\['fedcurv'\] send more than their update"):
        job(weighting="uniform", **private).strategy("FedCurv(1.0)")


def test_privacy_without_its_extra_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    settings = job(weighting="uniform", dp_clip_norm=0.5)
    with pytest.raises(ValueError, match=r"needs dp-accounting: pip install .*, or dp-noise=0"):
        settings.strategy("FedAvg")


def test_fewer_clients_than_asked_for_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = job(rounds=1, methods="FedAvg", local_epochs=1)
    config = {k.replace("_", "-"): v for k, v in vars(settings).items()}
    comparison.run(settings, InProcessGrid(app, 2, config), tmp_path)
    out = capsys.readouterr().out
    assert "this run has 2 SuperNodes, but num-clients asks for 10" in out
    assert "num-supernodes=10" in (tmp_path / "table.txt").read_text()


def test_personalisation_and_covering_cohorts_run_from_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = job(
        rounds=2,
        methods="FedADC(downlink='delta')",
        personalise="both",
        cohorts="class-covering",
        fraction_train=0.8,
        overlap=True,
    )
    history = in_process(settings, tmp_path)
    assert "personalised" in capsys.readouterr().out
    (row,) = history["summary"]
    assert row["personal"] > row["own"]
    assert "bytes_ahead" in history["methods"]["FedADC(downlink='delta')"]["rounds"][0]


def test_a_method_that_fails_leaves_its_history_and_the_model_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_process(job(rounds=4, methods="FedAvg", lr=1e30), tmp_path)
    saved = json.loads((tmp_path / "history.json").read_text())["methods"]["FedAvg"]
    assert "TooFewReplies" in saved["error"]
    assert saved["diverged"]
    assert "FedAvg: 1 of 1 seed diverged; seed 7: diverged in round 1" in capsys.readouterr().out
    assert saved["rounds"][-1]["failures"]
    assert (tmp_path / "FedAvg.safetensors").is_file()


def test_a_held_out_share_is_not_trained_on() -> None:
    held_out, trained = client_data_of(job(held_out_share=0.25)).split(np.arange(40))
    assert (len(held_out), len(trained)) == (10, 30)
    assert not set(held_out) & set(trained)
    examples = []
    for share in (0.0, 0.25):
        given = job(rounds=1, methods="FedAvg", local_epochs=1, held_out_share=share)
        (entry,) = in_process(given, None)["methods"]["FedAvg"]["rounds"]
        examples.append(entry["examples_processed"])
    assert examples[1] < 0.8 * examples[0]


def test_results_land_where_they_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the checkout if the server runs there, else at home; ``out`` decides if set."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert comparison.results_folder(job()).parent == tmp_path / "home" / "flwr-regs-results"
    assert comparison.results_folder(job(out=str(tmp_path / "mine"))) == tmp_path / "mine"
    (tmp_path / "simulations").mkdir()
    (tmp_path / "simulations" / "server_app.py").touch()
    assert comparison.results_folder(job()).parent == tmp_path / "results"


def test_methods_compose_from_settings_alone(tmp_path: Path) -> None:
    settings = job(
        methods="FedADC+SelfDistillation+{0}, {0}+FedProx(0.1), FedAvg+FedAdam".format(
            "SparseTernary(0.05, 0.05)"
        ),
        rounds=2,
        local_epochs=1,
        num_clients=4,
    )
    result = in_process(settings, tmp_path)
    methods = result["methods"]
    assert list(methods) == settings.method_names
    for name, entry in methods.items():
        assert not any(r["failures"] for r in entry["rounds"])
        small = entry["rounds"][-1]["bytes_up"][0] < 5000  # dense: 19,000
        assert small == ("SparseTernary" in name), name
        assert list(tmp_path.glob(f"{comparison.file_name(name)}.safetensors")), name


def test_stragglers_are_a_function_of_seed_partition_and_round() -> None:
    settings = client_data_of(job(straggler_share=0.5, straggler_speed=0.2, drop_out=0.1))
    done = np.array([[settings.step_budget(t, p, 100) for p in range(40)] for t in range(1, 41)])
    again = [[settings.step_budget(t, p, 100) for p in range(40)] for t in range(1, 41)]
    assert (done == again).all()
    slow = [p for p in range(40) if ((done[:, p] > 0) & (done[:, p] < 100)).any()]
    assert 10 <= len(slow) <= 30
    assert 0.05 < (done == 0).mean() < 0.15
    managed = done[:, slow][done[:, slow] > 0]
    assert managed.min() >= 20
    assert all(len(set(done[:, p]) - {0}) == 1 for p in slow)  # its own speed
    assert len({done[:, p].max() for p in slow}) > 5
    assert 50 < managed.mean() < 70
    quick = [p for p in range(40) if p not in slow]
    assert set(np.unique(done[:, quick])) == {0, 100}
    assert client_data_of(job()).step_budget(1, 0, 100) is None
    dropping = client_data_of(job(drop_out=0.5))
    assert (np.array([dropping.step_budget(1, p, 9) for p in range(9)]) % 9 == 0).all()


def test_any_method_can_be_compared_under_stragglers() -> None:
    settings = job(methods="FedFOR", rounds=2, straggler_share=0.5, incomplete="drop")
    rounds = in_process(settings, None)["methods"]["FedFOR"]["rounds"]
    assert rounds[0]["incomplete"]
    assert not set(rounds[0]["incomplete"]) & set(rounds[0]["replies"])


@pytest.mark.parametrize(
    "methods",
    [
        *("FedBN+FedADC", "FedPer('12.*')", "FedBN+Ditto", "FedBABU(personal_epochs=1)"),
    ],
)
def test_clients_test_what_is_private_or_in_their_own_domain(methods: str, tmp_path: Path) -> None:
    settings = job(
        dataset="digits-domains",
        partition="iid",
        num_clients=5,
        rounds=2,
        local_epochs=1,
        methods=methods,
        examples_per_client=100,
    )
    (result,) = in_process(settings, tmp_path)["methods"].values()
    assert [p["round"] for p in result["test"]] == [1, 2]
    assert not any(r["failures"] or r["evaluate"]["failures"] for r in result["rounds"])
    told = result["rounds"][-1]["evaluate"]["clients"].values()
    own = [c["personal-accuracy"] for c in told]
    assert result["per_client"]["worst"] == min(own)
    assert result["test"][-1]["accuracy"] == pytest.approx(np.mean(own))
    alike = own == [c["accuracy"] for c in told]
    assert alike != ("Ditto" in methods or "FedBABU" in methods)
    assert result["rounds"][0]["examples_processed"] == 500
    assert "on what the clients test" in " ".join((tmp_path / "table.txt").read_text().split())
    held_out = job(dataset="digits-domains", methods=methods, held_out_share=0.2)
    assert held_out.tested_on_clients


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methods": "FedAvg,FedBN", "model": "mlp"}, "FedBN found no BatchNorm layer"),
        ({"methods": "FedAvg,FedPer('head.*')"}, "head"),
    ],
)
def test_a_method_that_cannot_train_the_model_is_refused_before_any_method_runs(
    settings: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        in_process(job(**settings), tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        words.read_settings([f"{k.replace('_', '-')}={v}" for k, v in settings.items()])
