"""Settings: what is refused, what does nothing, what they make of a run."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w

from flwr_regs import simulate
from flwr_regs.experiments import cli
from flwr_regs.experiments import settings as settings_
from flwr_regs.experiments.commands import train
from flwr_regs.experiments.experiment import Experiment, refuse_dead
from flwr_regs.experiments.run import server_app
from flwr_regs.experiments.settings import DEFAULTS, FIELD_KEYS, Settings, as_word, field_name, read
from flwr_regs.experiments.words import experiment_of
from tests.conftest import ROOT
from tests.experiments.runs import runs_of

CARD = Path(__file__).with_name("card.toml")


def test_the_app_has_the_packages_settings() -> None:
    """``flwr run .`` and the command line have the same defaults, of the same kinds."""
    app = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert {name: app.pop(name) for name in FIELD_KEYS} == dict.fromkeys(FIELD_KEYS, 0)
    assert app == DEFAULTS
    assert [*map(type, app.values())] == [type(DEFAULTS[name]) for name in app]


def test_the_names_of_other_flower_apps_are_understood() -> None:
    """Beside the defaults of ours, which ``flwr run .`` hands over too."""
    given = {**DEFAULTS, "num-server-rounds": 3, "learning-rate": 0.2, "local-epochs": 1}
    assert Settings.of(given) == Settings.of({"rounds": 3, "lr": 0.2, "local-epochs": 1})
    assert Settings.of({**given, "num-server-rounds": 0}).rounds == DEFAULTS["rounds"]
    with pytest.raises(ValueError, match=r"learning-rate=0\.2 contradicts lr=0\.1"):
        Settings.of({"lr": 0.1, "learning-rate": 0.2})
    ours = {"lr": 0.2, "data-dir": str(Path("here").absolute())}
    assert settings_.named({"learning-rate": 0.2, "data-dir": "here"}) == ours
    with pytest.raises(ValueError, match="'learning-rate' and 'lr' are one setting: give one"):
        settings_.named({"lr": DEFAULTS["lr"], "learning-rate": 0.2})


def test_words_are_values() -> None:
    words = {"learning-rate": ".1", "rounds": "3", "overlap": "true", "model": "7"}
    values = {name: read(name, text) for name, text in words.items()}
    assert values == {"learning-rate": 0.1, "rounds": 3, "overlap": True, "model": "7"}
    made = Settings.of({"lr": 1, "rounds": read("rounds", "1e3")})  # flwr hands lr=1 over as an int
    assert (repr(made.lr), repr(made.rounds), read("rounds", ".5")) == ("1.0", "1000", ".5")


def test_the_clients_optimiser_is_a_matter_of_settings() -> None:
    assert Settings.of({}).train_config == {"lr": 0.05, "local-epochs": 5}
    given = {"optimizer": "RMSprop", "momentum": 0.9, "weight-decay": 1e-4, "clip-norm": 1}
    made = Settings.of({**given, "local-steps": 7}).train_config
    assert made == {"lr": 0.05, "local-steps": 7, **given}
    (run,) = runs_of(methods="FedAvg", on_divergence="stop", wire_dtype="float16", seed=3)
    strategy = run.strategy()
    assert (strategy.on_divergence, strategy.wire_dtype, strategy.seed) == ("stop", "float16", 3)


@pytest.mark.parametrize("value", ["0.1", None, [0.1]])
def test_values_of_the_wrong_kind_are_refused(value: Any) -> None:
    """Those that words cannot be; commands.txt has the others."""
    with pytest.raises(ValueError, match="setting 'lr' must be a number above 0, not "):
        Settings.of({"lr": value})


OWNED: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # a setting, what its owner is where it does nothing, and where it does something
    ({"dirichlet-alpha": 0.3}, {"partition": "iid"}, {"partition": "dirichlet"}),
    ({"dirichlet-alpha": 0.1}, {"partition": "iid"}, {"partition": "dirichlet"}),  # the default
    ({"local-epochs": 3}, {"local-steps": 1}, {"local-steps": 0}),
    ({"dp-noise": 3.0}, {"dp-clip-norm": 0.0}, {"dp-clip-norm": 0.5}),
    ({"server-lr-decay": 0.3}, {"methods": "FedAvg"}, {"methods": "FedAdam"}),
    ({"test-split": "matched"}, {"test-on-clients": False}, {"test-on-clients": True}),
    ({"cohorts": "class-covering"}, {"fraction-train": 1.0}, {"fraction-train": 0.5}),
]


def edges(given: dict[str, Any], folder: Path) -> dict[str, Callable[[], object]]:
    """The ways in, each with these settings: every one checks them before anything trains."""
    words = [f"{name}={as_word(value)}" for name, value in given.items()]
    card = tomllib.loads(CARD.read_text()) | {"panels": [{}], "tune": []}
    card["methods"] = {
        f"{i}": call for i, call in enumerate(given.get("methods", "FedAvg").split(", "))
    }
    card["settings"] = {name: value for name, value in given.items() if name != "methods"}
    (folder / "card.toml").write_text(tomli_w.dumps(card))
    context: Any = SimpleNamespace(run_config={**DEFAULTS, **given})
    return {
        "command": lambda: train(cli.parsed(["run", *words])),
        "card": lambda: train(cli.parsed(["bench", f"{folder / 'card.toml'}"])),
        "simulate": lambda: simulate(seeds=(1,), **{field_name(n): v for n, v in given.items()}),
        "run config": lambda: server_app.main(None, context),
    }


@pytest.mark.parametrize(("given", "off", "on"), OWNED)
def test_a_setting_without_its_owner_is_refused_at_every_edge(
    given: dict[str, Any], off: dict[str, Any], on: dict[str, Any], tmp_path: Path
) -> None:
    """Unless another run has both; a run config lists every default."""
    needed = next(iter(off)).replace("methods", "a method with a server learning rate")
    said = f"setting '{next(iter(given))}' needs {needed}"
    begin = edges({**given, **off}, tmp_path)
    if given.items() <= DEFAULTS.items():
        del begin["run config"]
    for edge in begin:
        with pytest.raises(ValueError, match=said):
            pytest.fail(f"{edge}: {begin[edge]()}")
    idle, useful = (Experiment.of_methods({**given, **one}).ends for one in (off, on))
    refuse_dead([*idle, *useful])
    refuse_dead(Experiment.of_methods(off).ends)


@pytest.mark.parametrize("alpha", [0.1, 0.3])
def test_what_is_chosen_of_a_card_may_leave_its_settings_without_effect(
    alpha: float, tmp_path: Path
) -> None:
    """But what the command line says has an effect."""
    card = tomllib.loads(CARD.read_text()) | {"methods": {"one": "FedAvg"}, "tune": []}
    card["settings"] |= {"partition": "dirichlet", "dirichlet-alpha": alpha}
    card["panels"] = [{"name": "iid", "settings": {"partition": "iid"}}, {"name": "label skew"}]
    (tmp_path / "card.toml").write_text(tomli_w.dumps(card))

    def check(*more: str) -> None:
        args = cli.parsed(["bench", f"{tmp_path / 'card.toml'}", *more])
        experiment_of(args)[0].checked(data=False)

    check()
    check("--panels", "iid")
    check("partition=iid")
    with pytest.raises(ValueError, match="setting 'dirichlet-alpha' needs partition"):
        check("partition=iid", "dirichlet-alpha=0.1")


SAME = [
    # methods that are one, in two spellings
    ("FedFOR, FedFOR()", "appears (here )?twice"),
    ("FedFOR(0.5), FedFOR(alpha=0.5)", "are the same: leave one out"),
    ("FedFOR, FedFOR(downlink='model')", "are the same: leave one out"),
]


@pytest.mark.parametrize(("methods", "message"), SAME)
def test_a_method_is_named_once_at_every_edge(methods: str, message: str, tmp_path: Path) -> None:
    for edge in edges({"methods": methods}, tmp_path).values():
        with pytest.raises(ValueError, match=message):
            edge()


def test_privacy_without_its_extra_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ValueError, match=r"needs dp-accounting: pip install .*, or dp-noise=0"):
        runs_of(weighting="uniform", dp_clip_norm=0.5)


def test_clients_test_all_methods_if_they_must_test_one() -> None:
    given = {"model": "cnn-bn", "partition": "iid"}
    assert all(run.settings.test_on_clients for run in runs_of(methods="FedAvg, FedBN", **given))
    alone = runs_of(methods="FedAvg, FedFOR", **given)
    assert not any(run.settings.test_on_clients for run in alone)
    assert runs_of(methods="FedAvg", dataset="digits-domains")[0].settings.test_on_clients
