"""Apps are built without a warning, and those for Flower's hub keep its limits."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.app import app as flwr_app
from typer.testing import CliRunner

from tests.conftest import ROOT

EXAMPLES = [path.parent for path in sorted((ROOT / "docs/examples").rglob("pyproject.toml"))]
STAGED = {"quickstart-fedfor", "noniid-bench", "scaffold", "lora"}


def built(app: Path, monkeypatch: pytest.MonkeyPatch, out: Path) -> list[str]:
    """Build an app's bundle; return its files."""
    monkeypatch.chdir(out)
    done = CliRunner().invoke(flwr_app, ["build", "--app", str(app)])
    assert done.exit_code == 0, done.output
    (said,) = done.output.strip().splitlines()  # a warning has lines of its own
    assert "Successfully built" in said
    (bundle,) = out.glob("*.fab")
    assert bundle.stat().st_size <= 10 * 2**20
    return zipfile.ZipFile(bundle).namelist()


def described(app: Path) -> dict[str, Any]:
    """The app's table in pyproject.toml, which says all that the hub asks for."""
    written = tomllib.loads((app / "pyproject.toml").read_text())
    project, table = written["project"], written["tool"]["flwr"]["app"]
    assert re.fullmatch(r"[a-z][a-z0-9-]{,31}", project["name"])
    assert 0 < len(project["description"]) <= 200
    assert project["license"] == {"file": "LICENSE"}
    assert table["fab-format-version"] == 1
    assert table["publisher"]
    (flower,) = (n for n in project["dependencies"] if re.match(r"flwr(\[.*\])?>=", n))
    assert flower.endswith(">=1.22,<2")
    assert re.fullmatch(r"1\.\d\d\.\d", table["flwr-version-target"])
    return dict(table)


@pytest.mark.parametrize("app", [ROOT, *EXAMPLES], ids=lambda path: path.name)
def test_an_app_is_built_without_a_warning(
    app: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    described(app)
    without = shutil.ignore_patterns(".*", "results*")  # Flower looks through environments too
    files = built(shutil.copytree(app, tmp_path / app.name, ignore=without), monkeypatch, tmp_path)
    assert "LICENSE" in files
    assert not [name for name in files if name.startswith(("tests", "docs"))]


def test_the_staged_apps_keep_the_hubs_limits_and_hold_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, str(ROOT / ".ci/apps.py"), str(tmp_path / "apps")], check=True)
    apps = list((tmp_path / "apps").iterdir())
    assert {app.name for app in apps} == STAGED
    for app in apps:
        table, files = described(app), [path for path in app.rglob("*") if path.is_file()]
        assert len(files) <= 1000
        assert max(path.stat().st_size for path in files) <= 2**20
        assert sum(path.stat().st_size for path in files) <= 10 * 2**20
        (tmp_path / app.name).mkdir()
        inside = built(app, monkeypatch, tmp_path / app.name)
        assert {"LICENSE", "README.md", "flwr_regs/__init__.py"} <= set(inside)
        modules = [component.partition(":")[0] for component in table["components"].values()]
        assert {module.replace(".", "/") + ".py" for module in modules} <= set(inside)
    ask = "import client, server, flwr_regs; print(flwr_regs.__file__)"
    app = tmp_path / "apps/scaffold"
    words = [sys.executable, "-c", ask]
    env = {"PYTHONPATH": str(app)}
    done = subprocess.run(words, cwd=app, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(app / "flwr_regs/__init__.py"), done.stderr
