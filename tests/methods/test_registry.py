"""The registry: names, and what its rows say against runs, hooks and the documents."""

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array
from torch import nn

import flwr_regs as fr
from flwr_regs.abilities import Folds
from flwr_regs.chain import Chain
from flwr_regs.flower.client import client_class
from flwr_regs.methods import registry
from flwr_regs.testing.problem import app_of, train
from tests.conftest import ROOT, drawn, run
from tests.experiments.runs import strategy_of

ROWS = list(fr.METHODS.values())
PACKAGE, EPOCH = ROOT / "flwr_regs", {"local-epochs": 1}
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
SOME = [pytest.param(row, marks=[pytest.mark.full] * (i % 3 > 0)) for i, row in enumerate(ROWS)]
some_rows = pytest.mark.parametrize("row", SOME, ids=lambda row: row.name)
"""Each third always, all with ``-m full``: what is measured of runs."""


# names


def stars(path: Path) -> set[str]:
    """The modules that a file imports all names of, for type checkers."""
    nodes = ast.walk(ast.parse(path.read_text()))
    all_names = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
    return {str(n.module) for n in all_names}


def test_type_checkers_see_the_names_that_are_there() -> None:
    init = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [n for n in init.body if isinstance(n, ast.If)]
    seen = {a.asname for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names} - {None}
    assert stars(PACKAGE / "__init__.py") == {"flwr_regs.methods.registry"}
    modules = stars(PACKAGE / "methods" / "registry.py")
    homes = {row.module for row in ROWS} | {*fr.TERMS.values()}
    assert modules == {f"flwr_regs.methods.{m}" for m in homes}
    for module in modules:
        seen |= set(importlib.import_module(module).__all__)
    home, parts = registry.__name__, vars(registry).items()
    own = {n for n, x in parts if getattr(x, "__module__", "") == home}
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
    strategy = strategy_of(row.example)
    assert type(strategy).__name__ == strategy.method_name == row.name
    assert client_class(strategy) is getattr(fr, row.client)
    assert tuple(type(t).__name__ for t in strategy.term.terms) == row.terms


@rows
def test_a_methods_defaults_are_its_terms(row: fr.Method) -> None:
    parameters = inspect.signature(getattr(fr, row.name)).parameters
    for name in row.terms:
        for field in dataclasses.fields(getattr(fr, name)):
            default = getattr(parameters.get(field.name), "default", inspect.Parameter.empty)
            if inspect.Parameter.empty is not default and field.default is not dataclasses.MISSING:
                assert default == field.default, field.name


# what a row says, measured


class Net(nn.Module):
    """Most of it is in `body`: a feature mean, BatchNorm and the head are small against it."""

    def __init__(self) -> None:
        super().__init__()
        with drawn():
            self.body, self.norm = nn.Linear(400, 60), nn.BatchNorm1d(60)
            self.head = nn.Linear(60, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.norm(self.body(x))))


@cache
def measured(
    name: str, downlink: str | None = None, clients: int = 2
) -> tuple[dict[str, Any], Mapping[str, Any], int]:
    """The third round's entry, what the first client then keeps, and how many arrays the server has."""
    strategy = strategy_of(fr.METHODS[name].example, **({"downlink": downlink} if downlink else {}))
    client = client_class(strategy)
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(6, 400, generator=g), torch.tensor([0, 1, 0, 1, 1, 0]))]
    grid = fr.InProcessGrid(app_of(client, [data] * clients, Net), clients)
    train(strategy, client, rounds=3, model=Net, lr=0.01, length={"local-steps": 1}, grid=grid)
    state = grid._contexts[1000].state
    assert strategy._training is not None
    slots = strategy._training.model.server.values()
    return strategy.history[-1], {k: v for k, v in state.items() if len(v)}, sum(map(len, slots))


def in_models(entry: dict[str, Any], key: str) -> float:
    size = sum(a.numel() * a.element_size() for a in Net().state_dict().values())
    return max(entry[key].values()) / size


@some_rows
def test_bytes_and_exchanges_are_as_measured(row: fr.Method) -> None:
    """And whether a client keeps something."""
    entry, state, _ = measured(row.name)
    assert in_models(entry, "bytes_down") == pytest.approx(row.down, abs=0.06)
    assert in_models(entry, "bytes_up") == pytest.approx(row.up, abs=0.06)
    assert 1 + ("bytes_probe_down" in entry) == row.exchanges
    if row.exchanges > 1:  # the model of the first exchange waits for the second
        state = {k: v for k, v in state.items() if not k.endswith((".model", ".round"))}
    assert bool(row.state) == bool(state)


@some_rows
def test_the_delta_downlink_is_as_measured(row: fr.Method) -> None:
    if row.down_delta is None:
        down = row.down
    else:
        down = row.down_delta
        assert down < row.down
    entry, *_ = measured(row.name, "delta")
    assert in_models(entry, "bytes_down") == pytest.approx(down, abs=0.06)


@some_rows
def test_what_the_server_keeps_of_each_client_is_in_its_row(row: fr.Method) -> None:
    two, three = (measured(row.name, clients=n)[-1] for n in (2, 3))
    assert bool(row.server) == (three > two)


@rows
def test_central_dp_and_robust_are_what_a_strategy_accepts(row: fr.Method) -> None:
    noise = {"privacy": fr.CentralDP(1.0, 0.0), "weighting": "uniform"}
    for says, settings, why in (
        (row.central_dp, noise, r"privacy=CentralDP\(...\): "),
        (row.robust, {"aggregator": fr.Krum(1)}, r"aggregator=Krum\(.*\) does not reach"),
    ):
        with nullcontext() if says else pytest.raises(ValueError, match=why):
            strategy_of(row.example, **settings)


class MeanGrid(fr.InProcessGrid):
    """Gives the server the clients' mean in place of each one's arrays."""

    def pull_messages(self, message_ids: Any) -> Any:
        replies = list(super().pull_messages(message_ids))
        slots = [[*r.content.array_records.values()] for r in replies]
        for records in zip(*slots, strict=True):
            for key in records[0]:
                each = [record[key].numpy() for record in records]
                if each[0].dtype.kind == "f":
                    for record in records:
                        record[key] = Array(np.asarray(np.mean(each, axis=0, dtype=each[0].dtype)))
        return replies


def unequal(name: str, grid: type[fr.InProcessGrid]) -> tuple[Mapping[str, Any], bool]:
    """The global model of clients with as many examples but not steps; whether uploads were held."""
    held = []

    def check(self: Chain, upload: Any, *more: Any, **kwargs: Any) -> None:
        folding = {t.name for t in self.terms if isinstance(t, Folds)}
        held.extend(term for term, slot in upload.items() if slot and term not in folding)
        original(self, upload, *more, **kwargs)

    some = {"fraction_train": 0.75, "min_train_nodes": 1, "fraction_evaluate": 0.0}
    strategy, original = strategy_of(fr.METHODS[name].example, seed=1, **some), Chain.check
    g = torch.Generator().manual_seed(1)
    x = [torch.randn(12 // n, 400, generator=g, dtype=torch.float64) for n in (1, 2, 3, 4)]
    data = [[(part, torch.arange(len(part)) % 2)] * n for n, part in enumerate(x, 1)]
    client, model = client_class(strategy), Net().double()
    places = grid(app_of(client, data, lambda: deepcopy(model)), 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chain, "check", check)
        got = run(strategy, client, rounds=2, model=lambda: model, lr=0.1, train=EPOCH, grid=places)
    return got, bool(held)


@some_rows
def test_the_server_needs_only_sums_or_holds_no_cohorts_uploads_if_a_row_says_so(
    row: fr.Method,
) -> None:
    expected, held = unequal(row.name, fr.InProcessGrid)
    assert row.streams == (not held)
    if row.name == "EFL":  # codes have no mean
        assert not row.secure_aggregation
        return
    got, _ = unequal(row.name, MeanGrid)
    off = max(np.abs(got[n] - a).max() for n, a in expected.items())
    assert (off < 1e-9) == row.secure_aggregation, off


@pytest.mark.parametrize("name", ["EFL", "FedAdam", "FedDyn", "Mime"])
def test_a_cohort_runs_as_one_if_a_row_says_so(name: str) -> None:
    strategy = strategy_of(fr.METHODS[name].example)
    data = [[(torch.zeros(4, 400), torch.arange(4) % 2)] * 2] * 2
    client = client_class(strategy)
    grid = fr.StackedGrid(app_of(client, data, Net), 2)
    train(strategy, client, rounds=2, model=Net, lr=0.1, length=EPOCH, grid=grid)
    assert fr.METHODS[name].stacks == (not grid.fallbacks)
