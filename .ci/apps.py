"""Stages the apps of Flower's hub, each in a folder of its own: ``python .ci/apps.py FOLDER``.

Each holds the package beside the app's files, because no index has it; with ``--named`` it is a dependency
instead. Then, in a folder: ``flwr build``, ``flwr run .``, ``flwr app publish .``. Publishing takes all
files of a folder, whatever ``fab-exclude`` says, so only what belongs to the app is in it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
APPS = {
    "quickstart-fedfor": (
        EXAMPLES / "pytorch",
        "FedFOR on label-sorted digits, from Flower's PyTorch quickstart",
    ),
    "noniid-bench": (
        ROOT,
        "Compares the methods of federated learning on non-IID data, with tables and pictures",
    ),
    "scaffold": (
        EXAMPLES / "deployment/app",
        "SCAFFOLD on SuperNodes, with checkpoints, deadlines and a history",
    ),
    "lora": (
        EXAMPLES / "lora",
        "LoRA adapters trained with FedProx: only the adapters and the output layer travel",
    ),
}
"""Name -> (where the app stands, its description)."""


def dependencies(source: Path, named: bool) -> list[str]:
    """Return what an app needs, with the package or with what the package needs; Flower comes first."""
    (flower,) = (n for n in PROJECT["dependencies"] if n.startswith("flwr>"))
    if source == ROOT:
        flower = flower.replace("flwr", "flwr[simulation]")
        needed = PROJECT["optional-dependencies"]["bench"]
    else:
        needed = tomllib.loads((source / "pyproject.toml").read_text())["project"]["dependencies"]
        needed = [n for n in needed if not re.match(r"flwr(-regs)?\b", n)]
    others = [n for n in PROJECT["dependencies"] if not n.startswith("flwr>")]
    package = [f"flwr-regs>={PROJECT['version']}"] if named else others
    return [flower, *package, *needed]


def stage(name: str, folder: Path, named: bool = False) -> None:
    """Make the folder of one app; FileExistsError if it exists."""
    source, description = APPS[name]
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]

    def copy(base: Path, under: str = ".") -> None:
        done = subprocess.run(
            [*listed, under], cwd=base, capture_output=True, text=True, check=True
        )
        for file in done.stdout.splitlines():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(base / file, folder / file)

    folder.mkdir(parents=True)
    copy(source, "simulations" if source == ROOT else ".")
    if not named:
        copy(ROOT, "flwr_regs")
    shutil.copy(ROOT / "LICENSE", folder)
    written = (source / "pyproject.toml").read_text()
    settings = re.findall(r"^\[tool\.flwr\..*?(?=^\[tool\.(?!flwr)|\Z)", written, re.M | re.S)[0]
    settings = re.sub(r"^fab-include = .*\n", "", settings, flags=re.M)
    if name == "scaffold":
        settings = re.sub(r'^method = "[^"]*"', 'method = "SCAFFOLD()"', settings, flags=re.M)
    lines = "".join(f"    {dependency!r},\n" for dependency in dependencies(source, named))
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\nversion = "{PROJECT["version"]}"\n'
        f'description = "{description}"\nlicense = {{ file = "LICENSE" }}\n'
        f"dependencies = [\n{lines}]\n\n{settings.rstrip()}\n"
    )
    nodes = "On a deployment, each SuperNode has a `partition-id` and `num-partitions`"
    if any("data-path" in file.read_text() for file in folder.glob("*.py")):
        nodes += ", or its own data by `data-path`"
    text = f"# {name}\n\n{description}.\n\n```bash\nflwr run .\n```\n\n{nodes}.\n"
    (folder / "README.md").write_text(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--named", action="store_true", help="depend on the package by its name")
    args = parser.parse_args()
    for app in APPS:
        stage(app, args.folder / app, args.named)
        print(args.folder / app)
