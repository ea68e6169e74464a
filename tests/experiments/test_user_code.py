"""A user's own code by its reference: files, modules and objects of this process, and runs with them.

commands.txt has what cannot be loaded, called or trained.
"""

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flwr_regs import FedFOR
from flwr_regs.experiments import user_code
from flwr_regs.experiments.calls import parse_methods
from flwr_regs.experiments.strategies import build
from flwr_regs.experiments.user_code import call, load, offer
from flwr_regs.flower.client import client_class
from tests.conftest import ROOT
from tests.experiments.runs import trained

EXAMPLE = ROOT / "docs" / "examples" / "own-comparison"
OWN = Path(__file__).with_name("own.py").read_text(encoding="utf-8")
SAME = ["{}:Decay(rate=0.1)", "{}:Decayed", "{}:Special(0.1)", "{}:TERMS", "FedAvg+{}:TERM"]
SAME += ["{}:make(0.1)", "{}:strategy(0.1)", "{}.deep:Decay()"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the file mine.py, and with it again as sub/mine.py."""
    for where in (tmp_path, tmp_path / "my sub"):
        where.mkdir(exist_ok=True)
        (where / "mine.py").write_text(f"{OWN}\nWHERE = {where.name!r}\n")
    return tmp_path


# what is loaded


def test_a_file_is_one_module_however_it_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (folder / "link.py").symlink_to(folder / "mine.py")
    first = load("mine.py:Decay", str(folder))
    again = ["mine.py", "my sub/../mine.py", "~/mine.py", f"{folder}/mine.py", "link.py"]
    assert {load(f"{path}:Decay", str(folder)) for path in again} == {first}
    assert load("mine.py:Decay") is load("mine:Decay", str(folder)) is first
    other = load("my sub/mine.py:Decay", str(folder))
    assert other is not first
    assert load("mine.py:WHERE", str(folder)) == folder.name
    assert load("my sub/mine.py:WHERE", str(folder)) == "my sub"
    for kind in (first, other):
        assert sys.modules[kind.__module__].Decay is kind
        assert pickle.loads(pickle.dumps(kind(0.5))) == kind(0.5)
    (folder / "mine.py").write_text("")
    with pytest.warns(UserWarning, match=r"mine\.py' has changed .*; the code of before runs"):
        assert load("mine.py:Decay", str(folder)) is first


def test_a_file_imports_the_files_beside_it_and_they_import_it(folder: Path) -> None:
    (folder / "beside.py").write_text("import mine\nDecay = mine.Decay\n")
    with (folder / "mine.py").open("a") as file:
        file.write("\ndef twin():\n    import beside\n    return beside.Decay\n")
    assert load(f"{folder}/mine.py:twin")() is load(f"{folder}/mine.py:Decay")


# what is called


def test_a_call_draws_from_the_seed_and_from_nothing_else(folder: Path) -> None:
    (folder / "net.py").write_text(
        "import random, numpy as np, torch\n"
        "def make(): return random.random(), np.random.rand(), float(torch.rand(1))\n"
    )
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    a, b, c = (call("net.py:make", str(folder), seed) for seed in (1, 1, 2))
    assert a == b
    assert not set(a) & set(c)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    call("net.py:make", str(folder), 2**63 - 1)


# what is offered


def test_an_offered_thing_has_a_reference_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "_OFFERED", {})
    first, second = (type("Net", (nn.Linear,), {}) for _ in range(2))
    assert [offer(first), offer(second), offer(first)] == ["here:Net", "here:Net_2", "here:Net"]
    assert load("here:Net_2") is second
    for thing in (lambda: 1, [1], FedFOR, offer):
        reference = offer(thing)
        assert load(reference) is thing
        ((part,),) = parse_methods(reference).values()
        assert part.target == reference


# runs


def test_the_example_runs_with_its_command_and_learns() -> None:
    text = (EXAMPLE / "mine.py").read_text()
    line = next(line for line in text.splitlines() if line.startswith("flwr-regs run "))
    settings: dict[str, Any] = dict(re.findall(r"(\w+)=(\"[^\"]*\"|\S+)", line))
    settings |= {"methods": settings["methods"].strip('"'), "lr": float(settings["lr"])}
    settings |= {"code_dir": str(EXAMPLE), "rounds": 6, "local_epochs": 2}
    plain, clipped = trained(**settings).values()
    assert plain.test[0]["accuracy"] < 0.35 < 0.6 < plain.accuracy[-1]
    assert plain.test[0] == clipped.test[0]
    assert 0.4 < clipped.accuracy[-1] != plain.accuracy[-1]
    assert not plain.rejected + clipped.rejected


def test_classes_terms_lists_and_functions_are_one_method(folder: Path) -> None:
    (folder / "own").mkdir()
    (folder / "own" / "__init__.py").write_text(OWN)
    (folder / "own" / "deep.py").write_text("from own import Decay\n")
    given = {"code_dir": str(folder), "rounds": 1, "local_epochs": 1}
    losses = {
        label: record.test[-1]["loss"]
        for method in SAME  # apart: beside each other they are refused as the same
        for label, record in trained(methods=method.format("own"), **given).items()
    }
    assert len(losses) == len(SAME)
    assert len({*losses.values()}) == 1, losses
    assert trained(methods="FedAvg", **given)["FedAvg"].test[-1]["loss"] not in losses.values()


def test_a_functions_strategy_gets_the_settings_that_it_has_not_changed(folder: Path) -> None:
    (calls,) = parse_methods("mine.py:strategy(0.1, retries=2)").values()
    made = build(calls, str(folder), seed=3, max_scale=7, fraction_train=0.5)
    assert (made.seed, made.max_scale, made.fraction_train, made.retries) == (3, 5, 0.5, 2)


def test_a_strategys_own_client_is_the_class_beside_it(folder: Path) -> None:
    parsed = parse_methods("mine.py:Special, mine.py:Decayed").values()
    special, decayed = (build(calls, str(folder)) for calls in parsed)
    own = load("mine.py:SpecialClient", str(folder))
    assert client_class(special) is own
    made = client_class(decayed)
    assert (made.__name__, made.method, made.terms) == ("DecayedClient", "Decayed", own.terms)
