"""Each test has a folder of its own; what it loaded of it is gone after it. One picture is drawn."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from flwr_regs.experiments.report import results
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _one_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than most runs; the tests of reports draw all of them."""
    if request.path.parent.name != "report":
        monkeypatch.setattr(results, "PICTURES", {"clients": results.PICTURES["clients"]})


@pytest.fixture(autouse=True)
def _forget_users_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = [*sys.path]
    yield
    folders = tempfile.gettempdir(), str(tmp_path_factory.getbasetemp()), str(ROOT / "docs")
    for name, module in [*sys.modules.items()]:
        is_ours = name.partition(".")[0] in ("flwr_regs", "tests", "benchmarks")
        file = str(getattr(module, "__file__", ""))
        if not is_ours and file.startswith(folders) and not file.startswith(sys.prefix):
            del sys.modules[name]
    sys.path[:] = path
