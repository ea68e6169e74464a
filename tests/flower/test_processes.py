"""The same app on Flower's own runtimes: Ray by ``flwr run``, and a real SuperLink with SuperNodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from safetensors.numpy import load_file

from flwr_regs import InProcessGrid
from flwr_regs.experiments import comparison
from flwr_regs.experiments.job import METHODS
from simulations.client_app import app
from tests.conftest import ROOT
from tests.experiments.test_experiments import job

pytestmark = [pytest.mark.flower, pytest.mark.timeout(600)]
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(home: Path) -> dict[str, str]:
    """A private Flower home and ports; no installing, no update checks.

    One thread, as in this process: sums in another order differ by 1e-7, and three rounds with
    BatchNorm make 1e-2 of that.
    """
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(free_port()),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }


def command(*args: Any, env: dict[str, str], cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(a) for a in args], env=env, cwd=cwd, text=True, capture_output=True, check=False
    )


def stop(pid: int) -> None:
    """Stop one process, by its id, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            os.kill(pid, 0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)


PRIVATE = ("FedBN", "FedPer")  # they need a model with BatchNorm, or with the named layers
SMALL: dict[str, Any] = {"rounds": 3, "local_epochs": 1}


def in_process(folder: Path, method: str = "FedFOR", **settings: Any) -> dict[str, np.ndarray]:
    """The final model of a method of the job, in this process."""
    folder.mkdir()
    one = job(**{**settings, "methods": method})
    config = {k.replace("_", "-"): v for k, v in vars(one).items()}
    comparison.run(one, InProcessGrid(app, one.num_clients, config), folder)
    return dict(load_file(folder / f"{method}.safetensors"))


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-6, err_msg=name)


def test_flwr_regs_run_ends_with_a_table_a_plot_and_a_history(tmp_path: Path) -> None:
    """Ray; from another folder; and the weights are those of one process."""
    methods = [m for m in METHODS if m not in PRIVATE] + ["FedADC+SelfDistillation+Ternary"]
    settings = {**SMALL, "fraction_train": 0.5, "methods": ",".join(methods)}
    args = [f"{k.replace('_', '-')}={v}" for k, v in settings.items()]
    run = command(
        BIN / "flwr-regs", "run", *args, "--app", ROOT, env=environment(tmp_path), cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (folder,) = (tmp_path / "results").iterdir()
    assert str(folder) in run.stdout
    assert re.search(r"FedFOR +\d+\.\d\d% +\d+\.\d\d%", run.stdout)
    assert re.search(r"FedFOR +round +3/3 +accuracy", run.stdout)
    history = json.loads((folder / "history.json").read_text())
    assert list(history["methods"]) == methods
    assert not any(r["failures"] for m in history["methods"].values() for r in m["rounds"])
    assert history["clients"] == 10
    assert [r["replies"] for r in history["methods"]["FedFOR"]["rounds"]] == [
        r["cohort"] for r in history["methods"]["FedAvg"]["rounds"]
    ]
    assert (folder / "accuracy.png").stat().st_size > 5000
    assert_same(
        dict(load_file(folder / "FedFOR.safetensors")), in_process(tmp_path / "x", **settings)
    )


def test_private_entries_survive_in_ray(tmp_path: Path) -> None:
    """Clients test with what they kept: as many batches counted as they trained on."""
    settings = {"rounds": 2, "local_epochs": 1, "num_clients": 5, "dataset": "digits-domains"}
    settings |= {"partition": "iid", "methods": "FedBN+FedFOR,FedBN+FedADC,EFL+FedBN,FedPer"}
    args = [f"{k.replace('_', '-')}={v}" for k, v in settings.items()]
    run = command(
        BIN / "flwr-regs", "run", *args, "--app", ROOT, env=environment(tmp_path), cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    (folder,) = (tmp_path / "results").iterdir()
    history = json.loads((folder / "history.json").read_text())["methods"]
    for method, entry in history.items():
        assert not any(r["failures"] or r["evaluate"]["failures"] for r in entry["rounds"])
        assert entry["test"][-1]["accuracy"] > entry["test"][0]["accuracy"] - 0.05, method
    method = "FedBN+FedFOR"
    got = dict(load_file(folder / f"{method}.safetensors"))
    assert not any(name.endswith("running_mean") for name in got)
    assert_same(got, in_process(tmp_path / "x", method, **settings))


def test_flwr_regs_run_fails_when_the_run_failed(tmp_path: Path) -> None:
    """``flwr run`` itself exits 0 here; and the reason is said before any client starts."""
    run = command(
        BIN / "flwr-regs",
        "run",
        "partition=dirichlet",
        "dirichlet-alpha=0.000001",
        "num-clients=12",
        env=environment(tmp_path),
    )
    assert run.returncode == 1, run.stdout[-3000:]
    assert re.search(r"leaves clients \[.*\]\s+without data", run.stdout)
    assert "round" not in re.sub("rounds?-?", "", run.stdout.split("Traceback")[0].split("NOTE")[0])
    assert "the run failed (finished:failed" in run.stderr


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_flwr_regs_run_leaves_nothing_behind_when_stopped(tmp_path: Path, how: int) -> None:
    """Found by a mark in the environment that every process it starts inherits."""
    env = {**environment(tmp_path), "FLWR_REGS_TEST_MARK": str(tmp_path)}
    log = tmp_path / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [BIN / "flwr-regs", "run", "rounds=2000", f"out={tmp_path / 'out'}"],
            env=env,
            cwd=ROOT,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # a script in the background ignores Ctrl-C, and its children inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        for _ in range(600):
            if re.search(r"round +3/2000", log.read_text()) or process.poll() is not None:
                break
            time.sleep(0.2)
        if how == signal.SIGINT:
            os.killpg(process.pid, how)  # a terminal's Ctrl-C reaches the whole foreground group
        else:
            os.kill(process.pid, how)
        assert process.wait(60) == (143 if how == signal.SIGTERM else 130), log.read_text()[-2000:]
        mark = f"FLWR_REGS_TEST_MARK={tmp_path}"
        for _ in range(50):
            left = [p for p in Path("/proc").glob("[0-9]*") if mark in environ_of(p)]
            if not left:
                break
            time.sleep(0.2)
        assert not left, [(p / "cmdline").read_text() for p in left]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def environ_of(proc: Path) -> str:
    with contextlib.suppress(OSError):
        return (proc / "environ").read_text(errors="replace")
    return ""


def test_plain_flwr_run_works_and_says_that_two_supernodes_are_few(tmp_path: Path) -> None:
    env = environment(tmp_path / "home")
    out = tmp_path / "out"
    daemon: list[int] = []
    try:
        run = command(
            BIN / "flwr",
            "run",
            ".",
            "--stream",
            "--run-config",
            f"rounds=2 methods='FedAvg' local-epochs=1 out='{out}'",
            env=env,
        )
        daemon = pids_of("flower-superlink", env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"])
    finally:
        for pid in daemon:
            stop(pid)
    assert daemon, run.stdout + run.stderr
    assert "this run has 2 SuperNodes, but num-clients asks for 10" in run.stdout
    assert json.loads((out / "history.json").read_text())["clients"] == 2
    assert (out / "FedAvg.safetensors").is_file()


@pytest.mark.parametrize("name", ["mixed-precision", "lightning"])
def test_the_examples_of_an_own_loop_run_in_ray(tmp_path: Path, name: str) -> None:
    env = environment(tmp_path)
    nodes = "num-supernodes=4 client-resources-num-cpus=1"
    args = ["run", ROOT / "docs" / "examples" / name, "--stream", "--federation-config", nodes]
    daemon: list[int] = []
    try:
        run = command(BIN / "flwr", *args, env=env)
        daemon = pids_of("flower-superlink", env["FLWR_LOCAL_SUPERLINK_HTTP_API_PORT"])
    finally:
        for pid in daemon:
            stop(pid)
    found = re.findall(r"round (\d+): mean accuracy on the clients (\d+\.\d)%", run.stdout)
    assert [int(r) for r, _ in found] == list(range(1, 11)), run.stdout[-3000:] + run.stderr[-3000:]
    assert float(found[-1][1]) > 60


def pids_of(name: str, argument: str) -> list[int]:
    """Processes called `name` that were given `argument`."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (proc / "cmdline").read_text().split("\0")
            if any(w.endswith(name) for w in words) and argument in words:
                found.append(int(proc.name))
    return found


@contextlib.contextmanager
def deployment(tmp_path: Path, nodes: int) -> Iterator[tuple[dict[str, str], Any]]:
    """A SuperLink and `nodes` SuperNodes on loopback; the connection is called ``dep``.

    Yields (environment, function from a partition id to a new SuperNode's process).
    """
    env = environment(tmp_path / "home")
    (tmp_path / "home").mkdir()
    port = free_port()
    processes = []

    def launch(name: str, *args: Any, **extra: str) -> subprocess.Popen[bytes]:
        log = (tmp_path / f"{len(processes)}.log").open("w")
        processes.append(
            subprocess.Popen(
                [str(a) for a in (BIN / name, "--insecure", *args)],
                env={**env, **extra},
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
            )
        )
        return processes[-1]

    def supernode(partition: int) -> subprocess.Popen[bytes]:
        return launch(
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1"),
            *("--port", free_port()),
            *("--node-config", f"partition-id={partition} num-partitions={nodes}"),
            FLWR_HOME=str(tmp_path / f"node{len(processes)}"),
        )

    try:
        launch("flower-superlink", "--host", "127.0.0.1", "--port", port)
        (tmp_path / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "dep"\n[superlink.dep]\n'
            f'address = "127.0.0.1:{port}"\ninsecure = true\n'
        )
        for _ in range(200):
            with contextlib.suppress(OSError):
                urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            time.sleep(0.2)
        yield env, supernode
    finally:
        for process in reversed(processes):
            stop(process.pid)


def test_a_real_superlink_with_two_supernodes_gives_the_same_weights(tmp_path: Path) -> None:
    """Also with state kept on the nodes: every message is a new process there."""
    settings = {**SMALL, "num_clients": 2, "fedfor_downlink": "delta", "efl_lam": 0.0}
    settings |= {"density_up": 0.05, "density_down": 0.05, "methods": "FedFOR,EFL"}
    out = tmp_path / "out"
    config = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in settings.items())
    with deployment(tmp_path, 2) as (env, supernode):
        for partition in range(2):
            supernode(partition)
        run = command(
            BIN / "flwr", "run", ".", "dep", "--stream", "-c", f"{config} out='{out}'", env=env
        )
    assert (out / "FedFOR.safetensors").is_file(), run.stdout[-3000:] + run.stderr[-3000:]
    history = json.loads((out / "history.json").read_text())
    rounds = history["methods"]["FedFOR"]["rounds"]
    assert [r["failures"] for r in rounds] == [{}, {}, {}]
    one_model = rounds[0]["bytes_down"]["0"]
    assert rounds[-1]["bytes_down"]["0"] < 1.05 * one_model  # the step alone: nothing was lost
    coded = history["methods"]["EFL"]["rounds"][-1]
    assert coded["failures"] == {}
    for way in ("bytes_down", "bytes_up"):  # the residuals and the model were kept
        assert coded[way]["0"] < 0.1 * one_model
    for method in ("FedFOR", "EFL"):
        got = dict(load_file(out / f"{method}.safetensors"))
        assert_same(got, in_process(tmp_path / method, method, **settings))


def test_private_entries_survive_on_supernodes(tmp_path: Path) -> None:
    """Every message is a new process there: what is private lives in the node's state alone."""
    settings = {**SMALL, "num_clients": 2, "dataset": "digits-domains", "partition": "iid"}
    method = "FedBN+FedFOR"
    out = tmp_path / "out"
    config = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in settings.items())
    with deployment(tmp_path, 2) as (env, supernode):
        for partition in range(2):
            supernode(partition)
        args = ["run", ".", "dep", "--stream", "-c", f"{config} methods='{method}' out='{out}'"]
        run = command(BIN / "flwr", *args, env=env)
    assert (out / "history.json").is_file(), run.stdout[-3000:] + run.stderr[-3000:]
    rounds = json.loads((out / "history.json").read_text())["methods"][method]["rounds"]
    assert [r["lost_private"] for r in rounds] == [[], [], []]
    mine = in_process(tmp_path / "x", method, **settings)
    assert_same(dict(load_file(out / f"{method}.safetensors")), mine)
    told, want = (
        [
            {pid: m["accuracy"] for pid, m in r["evaluate"]["clients"].items()}
            for r in json.loads((folder / "history.json").read_text())["methods"][method]["rounds"]
        ]
        for folder in (out, tmp_path / "x")
    )
    for mine_, theirs in zip(told, want, strict=True):  # tested with BatchNorm of their own
        assert mine_ == pytest.approx(theirs)
    assert all(len(set(clients.values())) == 2 for clients in told[1:])


def test_a_supernode_that_is_killed_and_started_anew_joins_again(tmp_path: Path) -> None:
    """Its state is gone: it is known again by its partition id, and gets the full pair."""
    out, log = tmp_path / "out", tmp_path / "run.log"
    settings = {"rounds": 8, "local_epochs": 1, "methods": "FedFOR", "num_clients": 2}
    settings |= {"fedfor_downlink": "delta", "out": str(out)}
    config = " ".join(f"{k.replace('_', '-')}={json.dumps(v)}" for k, v in settings.items())
    with deployment(tmp_path, 2) as (env, supernode):
        supernode(0)
        victim = supernode(1)
        with log.open("w") as sink:
            run = subprocess.Popen(
                [BIN / "flwr", "run", ".", "dep", "--stream", "-c", config],
                env=env,
                cwd=ROOT,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        for _ in range(600):
            if re.search("round +2/8", log.read_text()) or run.poll() is not None:
                break
            time.sleep(0.2)
        victim.kill()
        victim.wait(30)
        supernode(1)
        run.wait(500)
    assert (out / "history.json").is_file(), log.read_text()[-3000:]
    rounds = json.loads((out / "history.json").read_text())["methods"]["FedFOR"]["rounds"]
    assert len(rounds) == 8, log.read_text()[-3000:]
    assert all(0 in r["replies"] for r in rounds)
    assert rounds[-1]["replies"] == [0, 1]  # back again
    assert any("1" in r["failures"] or 1 not in r["cohort"] for r in rounds)


LEGACY = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.client import NumPyClient
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from flwr_regs import FedAvg, client_app

class Mine(NumPyClient):
    def __init__(self, target): self.target = target
    def fit(self, parameters, config):
        w = parameters[0]
        for _ in range(config["local-steps"]): w = w - config["lr"] * (w - self.target)
        return [w, parameters[1]], 5 + self.target, {"note": "text stays out of the means"}
    def evaluate(self, parameters, config):
        return float(np.abs(parameters[0] - self.target).mean()), 5, {"accuracy": 1.0}

app = client_app(lambda context: Mine(int(context.node_config["partition-id"])).to_client())
server = ServerApp()

@server.main()
def main(grid, context):
    strategy = FedAvg(seed=1)
    start = ArrayRecord([np.zeros(3), np.asarray(7)])
    config = ConfigRecord({"lr": 0.5, "local-steps": 2})
    result = strategy.start(grid=grid, initial_arrays=start, num_rounds=2, train_config=config)
    print("RESULT", [a.numpy().tolist() for a in result.arrays.values()], strategy.history[-1]["replies"])

run_simulation(server, app, 3, backend_config={"client_resources": {"num_cpus": 1}})
"""


def test_a_users_plain_numpy_client_runs_in_ray(tmp_path: Path) -> None:
    script = tmp_path / "legacy.py"
    script.write_text(LEGACY)
    run = command(sys.executable, script, env=environment(tmp_path), cwd=tmp_path)
    # targets 0, 1, 2 with weights 5, 6, 7 of 18: mean 20/18; two half-steps twice leave 1/16 to go
    want = 20 / 18 * (1 - 1 / 16)
    (line,) = [x for x in run.stdout.splitlines() if x.startswith("RESULT")] or [run.stderr[-3000:]]
    numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", line)]
    assert numbers[:3] == pytest.approx([want] * 3, abs=1e-12)
    assert line.endswith("7] [0, 1, 2]")
