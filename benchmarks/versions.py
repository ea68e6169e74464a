"""Which versions of Flower this package runs with: ``python -m benchmarks.versions 1.22 1.30 newest``.

For each version, in a virtual environment of its own with the wheels of the index:

- the app of docs/examples/deployment with FedFOR, two clients and three rounds: in one process, in Flower's
  simulation with Ray, and on a SuperLink with two SuperNodes; the final models are compared;
- ``tests/flower`` and ``tests/golden``;
- with ``--projects``, also that projects change to FedFOR as docs/migration.md says, with the wheel.

As many versions as docs/studies/versions.json has replace it, and the table of docs/versions.md; fewer are
printed alone, since bits of two machines are not compared. The exit status is 1 if something failed.

Flower brings its own dependencies into the environment; torch and the rest come from the environment of
this command. A version whose dependencies do not resolve is installed without them (``pip install
--no-deps``), and the table says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import filled, table

ROOT = Path(__file__).resolve().parents[1]
APP = ROOT / "docs" / "examples" / "deployment" / "app"
STUDY = ROOT / "docs" / "studies" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
NODES = 2
AT_ONCE = 3
"""Versions that are tried at a time."""
CONFIG: dict[str, Any] = {"method": "FedFOR(alpha=0.1)", "rounds": 3, "wait-timeout": 600.0}
TESTS = ("tests/flower", "tests/golden")
PROJECTS = ("-m", "full", "-n", "0", "tests/flower/deployed/test_switched_projects.py")


def newest() -> str:
    """Return the newest version of Flower on the index."""
    words = [sys.executable, "-m", "pip", "index", "versions", "flwr"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^flwr \((\S+)\)", said)[0]


def environment(version: str, folder: Path) -> tuple[Path, str]:
    """Make an environment with this Flower; return (its Python, what its dependencies lacked, or "")."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    pip = [str(python), "-m", "pip", "install", "-q"]
    done = subprocess.run(
        [*pip, f"flwr[simulation]=={version}"], capture_output=True, text=True, check=False
    )
    lacks = ""
    if done.returncode:
        lacks = next(iter(re.findall(r"No matching distribution found for (\S+)", done.stderr)), "")
        if not lacks:
            sys.exit(f"Flower {version} cannot be installed:\n{done.stderr}")
        subprocess.run([*pip, "--no-deps", f"flwr=={version}"], check=True)
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    inside = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    # Read after the environment's own packages, which so come first.
    Path(inside, "zz-base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python, lacks


def in_one_process(out: Path) -> None:
    """Train the app in this process."""
    from flwr.app import Context, RecordDict

    from flwr_regs import InProcessGrid

    client, server, config = _app(out)
    server(InProcessGrid(client, NODES, config), Context(1, 1, {}, RecordDict(), config))


def in_ray(out: Path) -> None:
    """Train the app in Flower's simulation."""
    os.environ["PYTHONPATH"] = f"{APP}{os.pathsep}{ROOT}"  # of Ray's processes
    from flwr.app import Context
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from flwr_regs import client_app

    client, server, config = _app(out)
    configured_server = ServerApp()

    def configured(context: Context) -> Context:
        ids = (context.run_id, context.node_id, context.node_config)
        return Context(*ids, state=context.state, run_config=config)

    @configured_server.main()
    def main(grid: Any, context: Context) -> None:
        server(grid, configured(context))

    configured_client = client_app(lambda context: client.client_fn(configured(context)))
    resources: Any = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": NODES}}
    run_simulation(configured_server, configured_client, NODES, backend_config=resources)


def on_supernodes(out: Path) -> None:
    """Train the app on a SuperLink with two SuperNodes of this machine."""
    from tests.processes import BIN, app_for, command, deployment

    with deployment(out, NODES) as (env, supernode):
        for partition in range(NODES):
            supernode(partition)
        app = app_for(env, APP, out / "app")
        words = " ".join(f"{k}={json.dumps(v)}" for k, v in {**CONFIG, "out": str(out)}.items())
        done = command(BIN / "flwr", "run", app, "dep", "--stream", "-c", words, env=env)
    if not (out / "model.safetensors").is_file():
        logs = [log.read_text(errors="replace")[-2000:] for log in sorted(out.glob("*.log"))]
        sys.exit("\n".join([done.stdout[-4000:], done.stderr[-2000:], *logs]))


RUNNERS: dict[str, Callable[[Path], None]] = {
    "one process": in_one_process,
    "Ray": in_ray,
    "SuperLink": on_supernodes,
}


def _app(out: Path) -> tuple[Any, Any, dict[str, Any]]:
    """Return the app's client and server, and its run config."""
    sys.path.insert(0, str(APP))
    import client
    import server

    config = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return client.app, server.app, {**config, **CONFIG, "out": str(out)}


def tried(version: str, projects: bool) -> dict[str, Any]:
    """Try a version; return its row."""
    with tempfile.TemporaryDirectory() as folder:
        return _tried(version, Path(folder), projects)


def _tried(version: str, folder: Path, projects: bool) -> dict[str, Any]:
    python, lacks = environment(version, folder / "venv")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    row: dict[str, Any] = {
        "flwr": version,
        "python": ".".join(map(str, sys.version_info[:3])),
        "lacks": lacks,
    }
    for runner in RUNNERS:
        out = folder / runner.replace(" ", "-")
        out.mkdir()
        words = [str(python), "-m", "benchmarks.versions", "--run", runner, str(out)]
        done = subprocess.run(words, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
        model = out / "model.safetensors"
        if done.returncode or not model.is_file():
            print(f"Flower {version}, {runner}:\n{done.stdout}{done.stderr}", file=sys.stderr)
            row[runner] = None
        else:
            row[runner] = hashlib.sha256(model.read_bytes()).hexdigest()[:16]
    counts: Counter[str] = Counter()
    for tests in (TESTS, PROJECTS) if projects else (TESTS,):
        words = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(words, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
        if done.returncode:
            print(f"Flower {version}, tests:\n{done.stdout[-6000:]}", file=sys.stderr)
        for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout[-200:]):
            counts[word] += int(count)
    return row | {"tests": dict(counts)}


def page_table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page; a model is compared with that of the newest version in one process."""
    model = rows[-1]["one process"]

    def cell(digest: str | None) -> str:
        return "fails" if digest is None else "same bits" if digest == model else "other bits"

    def line(row: dict[str, Any]) -> list[str]:
        how = f"without dependencies: no {row['lacks']}" if row["lacks"] else "as it resolves"
        tests = ", ".join(f"{count} {word}" for word, count in row["tests"].items())
        return [row["flwr"], row["python"], how, *(cell(row[r]) for r in RUNNERS), tests]

    return table(["flwr", "Python", "installed", *RUNNERS, "tests"], map(line, rows))


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main() -> int:
    """Try the versions, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="*", help="such as 1.22.0, or newest")
    parser.add_argument("--projects", action="store_true", help="also change projects to FedFOR")
    parser.add_argument("--run", nargs=2, metavar=("RUNNER", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        RUNNERS[args.run[0]](Path(args.run[1]))
        return 0
    versions = [newest() if v == "newest" else v for v in args.versions]
    with ThreadPoolExecutor(AT_ONCE) as pool:  # most of the time goes into waiting
        done = []
        for row in pool.map(partial(tried, projects=args.projects), versions):
            done.append(row)
            print(json.dumps(row), flush=True)
    if len(done) >= len(json.loads(STUDY.read_text())):
        done.sort(key=lambda r: _number(r["flwr"]))
        STUDY.write_text(json.dumps(done, indent=1) + "\n")
        PAGE.write_text(filled(PAGE.read_text(), "made", {"versions": page_table(done)}))
    digests = {row[r] for row in done for r in RUNNERS}
    return int(
        len(digests) > 1
        or None in digests
        or any({"failed", "error"} & {*r["tests"]} for r in done)
    )


if __name__ == "__main__":
    sys.exit(main())
