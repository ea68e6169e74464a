"""The registry: names, and what its rows say against runs, hooks and the documents."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

import flwr_regs as fr
from flwr_regs.abilities import Checks, Folds, Weighs
from flwr_regs.experiments import cli
from flwr_regs.experiments.settings.build import build, client_class
from flwr_regs.experiments.settings.calls import parse_methods
from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.methods import registry
from flwr_regs.methods.properties import properties
from flwr_regs.term import Term
from tests.conftest import ROOT
from tests.laws import CASES

ROWS = list(fr.METHODS.values())
PACKAGE = ROOT / "flwr_regs"
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def example(row: fr.Method, **common: Any) -> RegStrategy:
    (calls,) = parse_methods(row.example).values()
    return build(calls, **common)


# names


def stars(path: Path) -> set[str]:
    """The modules that a file imports all names of, for type checkers."""
    nodes = ast.walk(ast.parse(path.read_text()))
    found = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    return {str(n.module) for n in found}


def test_type_checkers_see_the_names_that_are_there() -> None:
    init = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [n for n in init.body if isinstance(n, ast.If)]
    seen = {a.asname for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names} - {None}
    assert stars(PACKAGE / "__init__.py") == {"flwr_regs.methods.registry"}
    modules = stars(PACKAGE / "methods" / "registry.py")
    assert modules == {
        f"flwr_regs.methods.{m}" for m in [row.module for row in ROWS] + [*fr.TERMS.values()]
    }
    for module in modules:
        seen |= set(importlib.import_module(module).__all__)
    own = {
        n for n, x in vars(registry).items() if getattr(x, "__module__", "") == registry.__name__
    }
    seen |= {n for n in own | {"METHODS", "TERMS"} if not n.startswith("_")}
    assert seen == set(fr.__all__)


@pytest.mark.parametrize("module", sorted({row.module for row in ROWS} | {*fr.TERMS.values()}))
def test_a_files_public_names_are_its_rows(module: str) -> None:
    of_rows = {name for row in ROWS if row.module == module for name in row.names}
    of_terms = {name for name, home in fr.TERMS.items() if home == module}
    loaded = importlib.import_module(f"flwr_regs.methods.{module}")
    assert set(loaded.__all__) == of_rows | of_terms
    for name in loaded.__all__:
        assert getattr(fr, name) is getattr(loaded, name)


@rows
def test_a_row_names_the_classes_of_its_example(row: fr.Method) -> None:
    strategy = example(row)
    assert type(strategy).__name__ == strategy.method_name == row.name
    assert client_class(strategy) is getattr(fr, row.client)
    assert tuple(type(t).__name__ for t in strategy.term.terms) == row.terms


def test_mypy_knows_each_class() -> None:
    code = "from flwr_regs import FedFOR, FedFORClient, FirstOrder, SparseTernary, Term\n"
    code += (
        "reveal_type(FedFOR(alpha=1.0))\nreveal_type(FirstOrder)\nx: Term = SparseTernary(0.1)\n"
    )
    code += "y: FedFORClient = FedFOR()\n"
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "-c", code],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert 'Revealed type is "flwr_regs.methods.client_step.fedfor.FedFOR"' in run.stdout
    assert "methods.fedfor.FirstOrder" in run.stdout
    assert run.stdout.count("error:") == 1
    assert "Incompatible types in assignment" in run.stdout


def test_importing_the_package_loads_neither_torch_nor_flower() -> None:
    code = (
        "import sys, flwr_regs; print([m for m in ('torch', 'flwr', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


# what a row says, measured


class Net(nn.Module):
    """Most of it is in `body`: a feature mean, BatchNorm and the head are small against it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.body, self.norm, self.head = (
                nn.Linear(400, 60),
                nn.BatchNorm1d(60),
                nn.Linear(60, 2),
            )

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.norm(self.body(x))))


@cache
def measured(name: str, downlink: str | None = None) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The third round's entry in the history, and what the first client then keeps."""
    strategy = example(fr.METHODS[name], **({"downlink": downlink} if downlink else {}))
    client = client_class(strategy)
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(6, 400, generator=g), torch.tensor([0, 1, 0, 1, 1, 0]))]
    app = fr.client_app(lambda _: client(Net(), data, data, device="cpu"))
    grid = fr.InProcessGrid(app, 2)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=3,
        train_config=ConfigRecord({"lr": 0.01, "local-steps": 1}),
    )
    state = grid._contexts[1000].state
    return strategy.history[-1], {k: v for k, v in state.items() if len(v)}


def in_models(entry: dict[str, Any], key: str) -> float:
    size = sum(a.numel() * a.element_size() for a in Net().state_dict().values())
    return max(entry[key].values()) / size


@rows
def test_bytes_and_exchanges_are_as_measured(row: fr.Method) -> None:
    entry, _ = measured(row.name)
    assert in_models(entry, "bytes_down") == pytest.approx(row.down, abs=0.06)
    assert in_models(entry, "bytes_up") == pytest.approx(row.up, abs=0.06)
    assert 1 + ("bytes_probe_down" in entry) == row.exchanges


@rows
def test_the_delta_downlink_is_as_measured(row: fr.Method) -> None:
    if row.down_delta is None:
        down = row.down
    else:
        down = row.down_delta
        assert down < row.down
    entry, _ = measured(row.name, "delta")
    assert in_models(entry, "bytes_down") == pytest.approx(down, abs=0.06)


@rows
def test_what_a_client_keeps_is_in_its_row(row: fr.Method) -> None:
    _, state = measured(row.name)
    if row.exchanges > 1:  # the model of the first exchange waits for the second
        state = {k: v for k, v in state.items() if not k.endswith((".model", ".round"))}
    assert bool(row.state) == bool(state)
    assert bool(row.state) != properties(example(row)).stateless
    assert row.setting == "silo" or not row.state


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_term_uploads_in_the_trial_exactly_if_the_chain_says_so(case: Any) -> None:
    strategy = RegStrategy(case.terms)
    alike = strategy.term.weigher is None
    assert properties(strategy).central_dp == (alike and not strategy.term.uploading)


@rows
def test_central_dp_is_what_a_strategy_accepts(row: fr.Method) -> None:
    expected = properties(example(row)).central_dp
    private = {"privacy": fr.CentralDP(1.0, 0.0), "weighting": "uniform"}
    if expected:
        example(row, **private)
    else:
        with pytest.raises(ValueError, match=r"privacy=CentralDP\(...\): "):
            example(row, **private)


@rows
def test_robust_is_what_a_robust_aggregator_accepts(row: fr.Method) -> None:
    if properties(example(row)).robust:
        example(row, aggregator=fr.Krum(1))
    else:
        with pytest.raises(ValueError, match=r"aggregator=Krum\(.*\) does not reach"):
            example(row, aggregator=fr.Krum(1))


# derived columns


@dataclass(frozen=True)
class Sums(Term, Folds, Checks):
    """Each client sends its update again; the server adds them up, one at a time."""

    name: ClassVar[str] = "sums"

    def finish(self, delta: Any, ctx: Any) -> Any:
        return delta, dict(delta), {}

    def check(self, upload: Any, params: Any, server: Any) -> None: ...

    def adds(self, key: str) -> bool:
        return True

    def fold(self, acc: Any, pid: int, delta: Any, upload: Any, weight: float, ctx: Any) -> Any:
        return {n: acc.get(n, 0.0) + np.asarray(a) for n, a in upload.items()}

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return uploads, delta


class Unsaid(Sums):
    """It does not say what it adds up."""

    adds = None  # type: ignore[assignment]


class Squares(Sums, Folds):
    """It adds up squares instead: the server needs each client's own."""

    name: ClassVar[str] = "squares"

    def fold(self, acc: Any, pid: int, delta: Any, upload: Any, weight: float, ctx: Any) -> Any:
        return {n: acc.get(n, 0.0) + np.asarray(a) ** 2 for n, a in upload.items()}


@dataclass(frozen=True)
class Scalar(Term, Checks):
    """Each client sends one number, which the server keeps by client."""

    name: ClassVar[str] = "scalar"

    def finish(self, delta: Any, ctx: Any) -> Any:
        return delta, {"n": torch.ones(())}, {"n": torch.ones(())}

    def check(self, upload: Any, params: Any, server: Any) -> None: ...

    def update(self, server: Any, delta: Any, uploads: Any, ctx: Any) -> Any:
        return {str(k): u["n"] * k for k, u in uploads.items()}, delta


@dataclass(frozen=True)
class Equal(Term, Weighs):
    """It weighs all clients alike."""

    name: ClassVar[str] = "equal"

    def weigh(self, weights: Any, uploads: Any, ctx: Any) -> Any:
        return {k: 1 / len(weights) for k in weights}


ALL = {"stateless", "streams", "stacks", "secure_aggregation", "central_dp", "robust"}


@pytest.mark.parametrize(
    ("term", "lacks"),
    [
        (fr.FirstOrder(1.0), set()),
        (Sums(), {"central_dp"}),
        (Unsaid(), {"central_dp", "robust"}),
        (Squares(), {"central_dp", "secure_aggregation"}),
        (Scalar(), {"stateless", "streams", "central_dp", "robust", "secure_aggregation"}),
        (Equal(), {"central_dp", "secure_aggregation"}),
        (fr.LocalBatchNorm(), {"stateless"}),
        (fr.EmbeddedMomentum(0.5, 0.5, local_momentum=0.5), set()),
        (fr.SparseTernary(0.1), {"stateless", "secure_aggregation"}),
        (fr.SparseTernary(None, 0.1), {"stateless", "stacks"}),
        (fr.Elastic(1.0), {"central_dp", "secure_aggregation"}),
        (fr.Elastic(0.0), set()),
        (fr.Elastic(1.0, sums_bits=16), {"central_dp", "secure_aggregation"}),
        (
            fr.Elastic(1.0, sums_every=2, sums_density=0.1),
            {"stateless", "central_dp", "secure_aggregation"},
        ),
        (fr.FeatureTable(0.1), {"streams", "secure_aggregation", "central_dp"}),
        (fr.LeaveOneOutMean(0.1), {"streams", "secure_aggregation", "central_dp"}),
        (fr.LeaveOneOutMean(0.1, sum_only=True), {"streams", "central_dp", "robust"}),
    ],
    ids=lambda x: x.name if isinstance(x, Term) else "",
)
def test_properties_follow_from_the_hooks(term: Term, lacks: set[str]) -> None:
    found = vars(properties(RegStrategy([term])))
    assert {name for name, holds in found.items() if holds} == ALL - lacks


def test_a_layer_that_a_term_names_is_there_in_the_trial() -> None:
    """At any depth: properties are asked of a strategy whose model is not known."""
    found = [properties(fr.MOON(projection=layer)) for layer in ("encoder.head.2", "0", "body")]
    assert found == [properties(fr.MOON())] * 3


def test_scaled_incomplete_clients_need_each_clients_steps() -> None:
    found = properties(fr.FedAvg(incomplete="scale"))
    assert not found.secure_aggregation
    assert not found.central_dp


# the tables


def test_the_command_prints_each_method_in_eighty_columns(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no checkout is needed
    assert cli.main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(ROWS) + 1]] == [row.name for row in ROWS]
    assert max(map(len, lines)) <= 80
    assert "FedFOR       both  2 (1)  1   1" in lines[3]
