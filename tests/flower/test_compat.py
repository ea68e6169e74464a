"""Any Flower from 1.22 on: one file holds what is private; what a version lacks is refused by name."""

import ast
import importlib
from types import SimpleNamespace

import flwr
import pytest
from flwr import serverapp

import flwr_regs as fr
from flwr_regs.flower.compat import FLOWER
from flwr_regs.testing.problem import SerialisingGrid, app_of, make_model
from tests.conftest import ROOT, Log, make_clients, run
from tests.experiments.runs import runs_of

PUBLIC = {"flwr", "flwr.app", "flwr.client", "flwr.clientapp", "flwr.clientapp.mod", "flwr.common"}
PUBLIC |= {"flwr.serverapp", "flwr.serverapp.exception", "flwr.serverapp.strategy"}
PUBLIC |= {"flwr.simulation"}


def test_only_one_file_reaches_what_flower_keeps_private() -> None:
    """And a public name is one that its module lists, or an exception."""
    private = set()
    for path in (ROOT / "flwr_regs").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.Import):
                flowers = {name for name in names if name.split(".")[0] == "flwr"}
                private |= {path.name for name in flowers - PUBLIC}
            elif (node.module or "").split(".")[0] == "flwr":
                public = node.module in PUBLIC and importlib.import_module(node.module)
                if not public or not {*names} <= {*getattr(public, "__all__", names)}:
                    private.add(path.name)
    assert private == {"compat.py"}


def test_without_accountants_one_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 1.35: an accountant of one's own, which Flower's would wrap, and the setting."""
    monkeypatch.delattr(serverapp, "PrivacyConfig", raising=False)
    config = SimpleNamespace(sampling_method=SimpleNamespace(value="no-amplification"))
    dp = fr.CentralDP(1.0, 1.0, SimpleNamespace(config=config))
    for ask in (
        lambda: run(fr.FedAvg(privacy=dp, weighting="uniform"), fr.FedAvgClient),
        lambda: runs_of(methods="FedAvg", dp_clip_norm=0.5, weighting="uniform"),
    ):
        with pytest.raises(ImportError, match=rf"Flower {FLOWER} has no privacy accountant.*1\.35"):
            ask()


def test_nodes_with_another_flower_are_named_with_both_versions(
    monkeypatch: pytest.MonkeyPatch, log: Log
) -> None:
    def told(version: str) -> list[str]:
        monkeypatch.setattr(flwr, "__version__", version)  # which the clients report
        data = make_clients(2)
        grid = SerialisingGrid(app_of(fr.FedAvgClient, data, make_model), 2)
        run(fr.FedAvg(seed=1), fr.FedAvgClient, grid=grid, clients=data, rounds=1)
        return log("run Flower")

    (line,) = told("1.21.3")
    assert line.startswith(f"nodes [1000, 1001] run Flower 1.21.3, and this server Flower {FLOWER}")
    assert told(FLOWER.rpartition(".")[0] + ".99") == []  # a patch release
