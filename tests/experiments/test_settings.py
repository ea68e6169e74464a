"""Settings: what is refused, what does nothing, what they make of a run."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from flwr_regs.experiments import settings
from flwr_regs.experiments.settings import DEFAULTS, FIELD_KEYS, Settings, dead, read
from tests.conftest import ROOT
from tests.experiments.runs import runs_of


def test_the_app_has_the_packages_settings() -> None:
    """``flwr run .`` and the command line have the same defaults, of the same kinds."""
    written = (ROOT / "pyproject.toml").read_text()
    assert settings.toml() in written
    app = tomllib.loads(written)["tool"]["flwr"]["app"]["config"]
    assert {name: app.pop(name) for name in FIELD_KEYS} == dict.fromkeys(FIELD_KEYS, 0)
    assert app == DEFAULTS
    assert [*map(type, app.values())] == [type(DEFAULTS[name]) for name in app]


def test_the_names_of_other_flower_apps_are_understood() -> None:
    """Beside the defaults of ours, which ``flwr run .`` hands over too."""
    given = {**DEFAULTS, "num-server-rounds": 3, "learning-rate": 0.2, "local-epochs": 1}
    assert Settings.of(given) == Settings.of({"rounds": 3, "lr": 0.2, "local-epochs": 1})
    assert Settings.of({**given, "num-server-rounds": 0}).rounds == DEFAULTS["rounds"]
    with pytest.raises(ValueError, match="learning-rate=0.2 contradicts lr=0.1"):
        Settings.of({"lr": 0.1, "learning-rate": 0.2})


def test_words_are_values() -> None:
    words = {"lr": ".1", "rounds": "3", "overlap": "true", "model": "7", "lr-decay": "1"}
    values = {name: read(name, text) for name, text in words.items()}
    assert values == {"lr": 0.1, "rounds": 3, "overlap": True, "model": "7", "lr-decay": 1}
    assert Settings.of({"lr": 1}).lr == 1.0  # flwr hands lr=1 over as an int
    assert read("rounds", ".5") == ".5"


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


ON = {"test-on-clients": True, "personalise": "plain", "straggler-share": 0.5, "dp-clip-norm": 0.5}
OFF = {"local-steps=0": 1, "test-on-clients=false": True}
"""Values of owners that a setting goes with, and those that it does not go with."""
OWNED = [name for name, of in settings.SETTINGS.items() if of.needs]


@pytest.mark.parametrize("name", OWNED)
def test_a_setting_without_its_owner_is_refused(name: str) -> None:
    """Unless another run has both."""
    of = settings.SETTINGS[name]
    owner, equals, values = of.needs.partition("=")
    on = read(owner, values.split(",")[0]) if equals else ON[owner]
    off = "iid" if owner == "partition" else OFF.get(of.needs, DEFAULTS[owner])
    value = {str: "matched", int: 3, float: 0.3}[type(of.default)]
    value = 1.5 if name == "long-tail" else value
    idle = Settings.of({name: value, owner: off})
    assert f"setting '{name}' does nothing with {owner}=" in dead([idle])
    useful = Settings.of({name: value, owner: on})
    assert not dead([idle, useful])
    assert not dead([Settings.of({owner: off})])


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
