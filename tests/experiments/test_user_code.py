"""A user's own module, in a folder of its own: found there by every command and in worker processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flwr_regs.experiments import cli, words
from flwr_regs.experiments.run.engine import Plan
from flwr_regs.experiments.strategies import bare, client_class
from tests.experiments.test_experiments import in_process, job
from tests.processes import BIN, command, environment

OWN = """
from dataclasses import dataclass
from typing import ClassVar

from flwr_regs import RegClient, RegStrategy, Term


@dataclass(frozen=True)
class Decay(Term):
    name: ClassVar[str] = "decay"
    rate: float = 0.1

    def correct(self, grads, params, ctx):
        return {n: g + self.rate * params[n] for n, g in grads.items()}


class Decayed(RegStrategy):
    method = "Decayed"

    def __init__(self, rate=0.1, **settings):
        super().__init__([Decay(rate)], **settings)


class Special(Decayed):
    method = "Special"


class SpecialClient(RegClient):
    method = "Special"
    terms = (Decay,)


TERM = Decay(0.1)
TERMS = [Decay(0.1)]


def make(rate):
    return [Decay(rate)]
"""
SAME = ["{}:Decay(rate=0.1)", "{}:Decayed", "{}:Special(0.1)", "{}:TERMS", "FedAvg+{}:TERM"]
SAME += ["{}:make(0.1)", "{}.deep:Decay()"]


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """A folder with the package `own_<n>`; what loading adds to this process goes at the end."""
    before, name = list(sys.path), f"own_{abs(hash(tmp_path))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(OWN)
    (tmp_path / name / "deep.py").write_text(f"from {name} import Decay\n")
    yield tmp_path, name
    sys.path[:] = before
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        del sys.modules[module]


def test_classes_terms_lists_and_functions_are_one_method(folder: Any) -> None:
    code_dir, name = folder
    settings = job(
        methods="; ".join(m.format(name) for m in SAME),
        code_dir=str(code_dir),
        rounds=1,
        local_epochs=1,
    )
    methods = in_process(settings, None)["methods"]
    assert len(methods) == len(SAME)
    losses = {label: entry["test"][-1]["loss"] for label, entry in methods.items()}
    assert len(set(losses.values())) == 1, losses
    plain = in_process(job(methods="FedAvg", rounds=1, local_epochs=1), None)["methods"]["FedAvg"]
    assert plain["test"][-1]["loss"] != next(iter(losses.values()))


def test_a_strategys_own_client_is_the_class_beside_it(folder: Any) -> None:
    code_dir, name = folder
    special, decayed = bare(f"{name}:Special, {name}:Decayed", str(code_dir)).values()
    module = sys.modules[name]
    assert client_class(special) is module.SpecialClient
    made = client_class(decayed)
    assert (made.__name__, made.method, made.terms) == ("DecayedClient", "Decayed", (module.Decay,))


def test_the_command_fills_in_the_folder_where_it_runs(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code_dir, name = folder
    monkeypatch.chdir(code_dir)
    assert words.read_settings([f"methods={name}:Decay"]).code_dir == str(code_dir)


@pytest.mark.full
def test_a_sweep_runs_a_users_term_in_worker_processes(folder: Any) -> None:
    """From the user's folder, by the installed command."""
    code_dir, name = folder
    args = ["sweep", f"{name}:Decay.rate", f"methods=FedFOR+{name}:Decay", "rounds=2"]
    args += ["local-epochs=1", "--values", "0.0;0.5", "--seeds", "1,2", "--workers", "2"]
    args += [f"out={code_dir / 'out'}"]
    run = command(BIN / "flwr-regs", *args, env=environment(code_dir), cwd=code_dir)
    assert run.returncode == 0, run.stderr[-3000:]
    plan = Plan.load(code_dir / "out")
    assert plan.heading == f"{name}:Decay.rate"
    curves = {(r.label, r.seed): r.accuracy for r in plan.recorded(code_dir / "out")}
    assert list(curves) == [("0.0", 1), ("0.5", 1), ("0.0", 2), ("0.5", 2)]
    assert curves["0.0", 1] != curves["0.5", 1]
    plain = in_process(job(methods="FedFOR", rounds=2, local_epochs=1, seed=1), None)
    curve = [p["accuracy"] for p in plain["methods"]["FedFOR"]["test"][1:]]
    assert np.allclose(curve, curves["0.0", 1], atol=5e-3)


def test_a_wrong_argument_is_said_before_any_work(
    folder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code_dir, name = folder
    monkeypatch.chdir(code_dir)
    args = ["sweep", f"{name}:Decay.rat", "--values", "1"]
    assert cli.main(args) == 2
    assert f"'{name}:Decay(rat=1)': there is no argument 'rat'; did you mean 'rate'?" in (
        capsys.readouterr().err
    )
    assert not (code_dir / "results").exists()
