"""A user's own code by its reference: files, modules and objects of this process, and runs with them."""

from __future__ import annotations

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
from flwr_regs.experiments.cards import card_files
from flwr_regs.experiments.models import models
from flwr_regs.experiments.report.run_records import recorded
from flwr_regs.experiments.strategies import build, client_class
from flwr_regs.experiments.user_code import call, load, offer
from tests.conftest import ROOT
from tests.experiments.runs import runs_of, trained
from tests.processes import BIN, command, environment

EXAMPLE = ROOT / "docs" / "examples" / "own-comparison"
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


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    """No module ``mine`` of another test is there; what loading adds to this process goes at the end."""
    sys.modules.pop("mine", None)
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(("/tmp", str(EXAMPLE))):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the file mine.py, and with it again as sub/mine.py."""
    for where in (tmp_path, tmp_path / "my sub"):
        where.mkdir(exist_ok=True)
        (where / "mine.py").write_text(f"{OWN}\nWHERE = {where.name!r}\n")
    return tmp_path


# what is parsed


@pytest.mark.parametrize(
    "target",
    ["mine.py:Clip", "sub/mine.py:Clip", "~/x y/mine.py:Clip", "/a-b/c.d/mine.py:Clip.make"],
)
def test_a_file_is_a_target_wherever_it_lies(target: str) -> None:
    text = f"FedAvg, {target}(x=1)+FedBN; {target}"
    called, bare = list(parse_methods(text).values())[1:]
    assert [(c.target, c.kwargs) for c in called] == [(target, {"x": 1}), ("FedBN", {})]
    assert [(c.target, c.called) for c in bare] == [(target, False)]
    assert parse_methods("; ".join(parse_methods(text))) == parse_methods(text)


# what is loaded


def test_a_file_is_one_module_however_it_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
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


def test_a_file_imports_the_files_beside_it_and_they_import_it(folder: Path) -> None:
    (folder / "beside.py").write_text("import mine\nDecay = mine.Decay\n")
    with (folder / "mine.py").open("a") as file:
        file.write("\ndef twin():\n    import beside\n    return beside.Decay\n")
    assert load(f"{folder}/mine.py:twin")() is load(f"{folder}/mine.py:Decay")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("no/mine.py:Decay", None, r"^there is no file '.*/no/mine.py'$"),
        ("mine.py:decoy", None, r"^there is no 'decoy' in '.*/mine.py'; did you mean 'Decay'\?$"),
        ("bad.py:X", "x = 1\nx.y\n", r"importing '.*/bad.py' failed: Attrib.* \(.*/bad.py, line 2\)$"),
        ("mine:decoy", None, r"^there is no 'decoy' in mine; did you mean 'Decay'\?$"),
        ("mine.dep:Decay", None, "there is no module 'mine.dep' in "),
        ("mine.py:Decay.rat", None, "there is no 'rat' in '.*/mine.py'; did you mean 'rate'"),
        ("bad.py:X", "x = 1\nx = (\n", r"SyntaxError: '\(' was never closed \(.*/bad.py, line 2\)$"),
        ("bad.py:X", "import not_there\n", r"ModuleNotFoundError: .*not_there.* \(.*/bad.py, line 1\)$"),
        ("bad.py:X", "import sys\nsys.exit('stop')", r"SystemExit: stop \(.*/bad.py, line 2\)$"),
        ("here:Nobody", None, "'here:Nobody' is an object of another process: .* name a file"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_is_said_in_one_sentence(
    name: str, text: str | None, message: str, folder: Path
) -> None:
    if text is not None:
        (folder / "bad.py").write_text(text)
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(ValueError, match=message) as caught:
            load(name, str(folder))
        assert "\n" not in str(caught.value)


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


def needs(x: int) -> int:
    return x


def raises() -> None:
    {}["no key"]


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (needs, "'here:needs' is called without arguments, but: missing a required argument: 'x'"),
        (nn.Linear, "'here:Linear' is called without arguments, but: missing a required argument: 'in_f"),
        ([1], "'here:list' is of type list; expected a function or a class"),
        (raises, f"'here:raises' failed: KeyError: 'no key' ({__file__}, line "),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_said(thing: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(offer(thing), "", 0)


# what is offered


def test_an_offered_thing_has_a_reference_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_code, "_OFFERED", {})
    first, second = (type("Net", (nn.Linear,), {}) for _ in range(2))
    assert [offer(first), offer(second), offer(first)] == ["here:Net", "here:Net_2", "here:Net"]
    assert load("here:Net_2") is second
    for thing in (lambda: 1, [1], FedFOR, needs):
        reference = offer(thing)
        assert load(reference) is thing
        ((part,),) = parse_methods(reference).values()
        assert part.target == reference


# models


class Wide(nn.Module):
    """Its output has as many columns as it is told."""

    columns, output = 10, None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, self.columns)

    def forward(self, x: Any) -> Any:
        return self.layer(x.flatten(1)) if self.output is None else self.output(self.layer, x)


def net(**changed: Any) -> Any:
    return type(
        "Net", (Wide,), {k: staticmethod(v) if callable(v) else v for k, v in changed.items()}
    )


def test_a_users_model_has_weights_of_the_seed() -> None:
    reference = offer(Wide)
    a, b, c = (models.check("digits", reference, s).state_dict()["layer.weight"] for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    models.check("digits", offer(net(columns=12)), 0)  # more outputs than classes


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (net(columns=9), r"turns 2 examples of shape \(1, 8, 8\) \(float32\) of dataset 'digits' into "
                         r"\(2, 9\); expected a tensor of shape \(2, 10\): an output for each of"),
        (net(output=lambda layer, x: x), r"into \(2, 1, 8, 8\); expected a tensor of shape \(2, 10\)"),
        (net(output=lambda layer, x: {"logits": x}), r"into a value of type dict; expected a"),
        (net(output=lambda layer, x: layer(x)), rf"RuntimeError: .*mat1 and.* \({__file__}, line"),
        (Wide(), "is a module already, with weights that no seed has drawn; expected its class, or a"),
        (lambda: nn.LazyLinear(10), "has the parameter 'weight' without a size: give its layer"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused_before_the_start(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        runs_of(model=offer(model), methods="FedAvg", rounds=1)
    assert "\n" not in str(caught.value)


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
    methods = trained(methods="; ".join(m.format("own") for m in SAME), **given)
    assert len(methods) == len(SAME)
    losses = {label: record.test[-1]["loss"] for label, record in methods.items()}
    assert len({*losses.values()}) == 1, losses
    assert trained(methods="FedAvg", **given)["FedAvg"].test[-1]["loss"] not in losses.values()


def test_a_strategys_own_client_is_the_class_beside_it(folder: Path) -> None:
    parsed = parse_methods("mine.py:Special, mine.py:Decayed").values()
    special, decayed = (build(calls, str(folder)) for calls in parsed)
    own = load("mine.py:SpecialClient", str(folder))
    assert client_class(special) is own
    made = client_class(decayed)
    assert (made.__name__, made.method, made.terms) == ("DecayedClient", "Decayed", own.terms)


@pytest.mark.full
def test_a_sweep_runs_a_users_term_in_worker_processes(folder: Path) -> None:
    """From the user's folder, by the installed command."""
    args = ["sweep", "mine:Decay.rate", "methods=FedFOR+mine:Decay", "rounds=2"]
    args += ["local-epochs=1", "--values", "0.0;0.5", "--seeds", "1,2", "--workers", "2"]
    run = command(BIN / "flwr-regs", *args, "out=out", env=environment(folder), cwd=folder)
    assert run.returncode == 0, run.stderr[-3000:]
    experiment, _ = card_files.of_folder(folder / "out")
    assert experiment.heading == "mine:Decay.rate"
    records = recorded(experiment.runs, folder / "out")
    curves = {(record.label, record.seed): record.accuracy for record in records}
    assert list(curves) == [("0.0", 1), ("0.5", 1), ("0.0", 2), ("0.5", 2)]
    assert curves["0.0", 1] != curves["0.5", 1]
    plain = trained(methods="FedFOR", rounds=2, local_epochs=1, seed=1)["FedFOR"]
    assert np.allclose(plain.accuracy, curves["0.0", 1], atol=5e-3)
