"""Projects of this Flower change to FedFOR as docs/migration.md says, with the wheel, on SuperNodes."""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from tests.docs.quickstart.task import Net
from tests.docs.test_quickstart import APP, changed
from tests.docs.test_tutorials import blocks
from tests.processes import BIN, app_for, command, deployment, environment

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
PAGE = ROOT / "docs/migration.md"
PROJECT = Path(__file__).parent / "project"
TEMPLATES = importlib.util.find_spec("flwr.cli.new.templates")  # in Flower's wheel up to 1.25


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package as its wheel installs it, and nothing else."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    subprocess.run([*install, str(folder / "packages"), str(wheel)], check=True)
    return folder / "packages"


def files_of_page(stage: str) -> dict[str, str]:
    """The files of the page whose first line says ``# NAME.py, STAGE``."""
    heads = (re.match(rf"# (\w+\.py), {stage}\n", block) for block in blocks(PAGE, "python"))
    return {head[1]: head.string for head in heads if head}


def older(folder: Path) -> dict[str, str]:
    """A NumPyClient and a server_fn, as on the page."""
    for name, text in files_of_page("old").items():
        (folder / name).write_text(text)
    return files_of_page("new")


def with_fedfor(server: str) -> dict[str, str]:
    """The page's client, and a server with the page's diffs."""
    return {**changed({"server_app.py": server}, PAGE.read_text()), **files_of_page("with FedFOR")}


def functions(_: Path) -> dict[str, str]:
    """Train and evaluate functions."""
    server = (APP / "server_app.py").read_text().replace("learning-rate", "lr")
    return with_fedfor(re.sub("fraction([-_])evaluate", r"fraction\1train", server))


def template(folder: Path) -> dict[str, str]:
    """What ``flwr new`` of this Flower makes, with data that needs no network."""
    if TEMPLATES is None:
        pytest.skip("this Flower takes its templates from the network")
    new = ["new", "made", "--framework", "PyTorch", "--username", "me"]
    done = command(BIN / "flwr", *new, env=environment(folder / "home"), cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    server = (folder / "made/made/server_app.py").read_text()
    return with_fedfor(server.replace("from made.task", "from task"))


@pytest.mark.parametrize("project", [older, functions, template])
def test_a_project_changes_to_fedfor(
    project: Callable[[Path], dict[str, str]],
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = tmp_path / "project"
    shutil.copytree(PROJECT, app)
    task = (APP / "task.py").read_text()
    (app / "task.py").write_text(task.replace(", device):", ', device="cpu"):'))
    for name, text in project(app).items():
        (app / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(site))
    (tmp_path / "run").mkdir()
    with deployment(tmp_path / "run", 2) as (env, supernode):
        for partition in range(2):
            supernode(partition)
        app = app_for(env, app, tmp_path / "copy")
        run = command(BIN / "flwr", "run", app, "dep", "--stream", env=env, cwd=tmp_path)
    said = run.stdout + run.stderr
    assert re.search(r"round ([23])/\1 .*accuracy", said), said
    assert "FedFOR" in said, said
    if project is not older:  # which keeps no model
        (saved,) = tmp_path.rglob("final_model.pt")
        assert torch.load(saved).keys() == Net().state_dict().keys()
