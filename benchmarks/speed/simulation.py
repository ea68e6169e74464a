"""Flower's Ray simulation: clients a second, and resident memory over 100 rounds.

``python -m benchmarks.speed.simulation SIDE CLIENTS ROUNDS FILE`` is one run. `measure` starts it under a
keeper, which ends Ray's processes whatever happens, and is the parent of all whose memory counts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.speed.timing import ROOT, Effort, Row, resident, say, spread

CLIENTS, ROUNDS, STEPS = 20, 100, 10
FIRST = 10
"""Rounds before memory is compared with the end's: actors load torch in the first."""
SIDES = ("FedAvg", "Flower's FedAvg")
LIMIT = 420
"""Seconds that a run may take."""


def measure(effort: Effort) -> list[Row]:
    """Return a row for each side, or one that says why there is none."""
    if importlib.util.find_spec("ray") is None:
        return [{"skipped": "Ray is not installed: install flwr-regs[ray]"}]
    clients, rounds = (2, 3) if effort.quick else (CLIENTS, ROUNDS)
    sides = SIDES[:1] if effort.quick else SIDES
    return [_run(side, clients, rounds) for side in sides]


def _run(side: str, clients: int, rounds: int) -> Row:
    say(f"ray: {side}, {rounds} rounds of {clients} clients")
    with tempfile.TemporaryDirectory(prefix="speed-", ignore_cleanup_errors=True) as folder:
        out = Path(folder, "rounds.json")
        keeper = [
            sys.executable,
            "-m",
            "benchmarks.speed.keeper",
            str(Path(folder, "kept")),
        ]
        command = [*keeper, sys.executable, "-m", "benchmarks.speed.simulation", side]
        command += [str(clients), str(rounds), str(out)]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment.pop("RAY_ADDRESS", None)  # a cluster of its own
        with Path(folder, "log").open("w") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            assert process.stdin is not None
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                return {"side": side, "skipped": f"more than {LIMIT} s"}
            finally:
                process.stdin.close()  # the keeper ends what is left
                process.wait()
        if not out.exists():
            last = Path(folder, "log").read_text().splitlines()[-1:]
            return {"side": side, "skipped": f"no result: {' '.join(last)[:300]}"}
        found = json.loads(out.read_text())
    seconds, memory = found["seconds"], found["memory"]
    first = min(FIRST, len(memory) - 1)
    return {
        "side": side,
        "clients": clients,
        "rounds": rounds,
        "actors": found["actors"],
        "seconds": spread(seconds[1:]),
        "per-second": spread([clients / s for s in seconds[1:]]),
        "memory-first": memory[first],
        "memory-last": memory[-1],
        "memory-round": first + 1,
    }


def run(side: str, clients: int, rounds: int, out: Path) -> None:
    """Train in Ray; write each round's seconds, and the bytes of all of its processes."""
    import psutil
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from benchmarks.speed import jobs

    seconds: list[float] = []
    memory: list[int] = []
    began = 0.0

    def note(*_: Any) -> None:
        nonlocal began
        seconds.append(time.perf_counter() - began)
        family = psutil.Process(os.getppid()).children(recursive=True)
        memory.append(sum(resident(process.pid) for process in family))
        began = time.perf_counter()

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        nonlocal began
        while len(list(grid.get_node_ids())) < clients:
            time.sleep(0.05)
        start = ArrayRecord(jobs.small().state_dict())
        began = time.perf_counter()
        if side == "FedAvg":
            strategy = jobs.METHODS[side](seed=1, fraction_evaluate=0.0, on_round=note)
            strategy.start(grid, start, rounds, train_config=jobs.train_config())
        else:
            theirs = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
            theirs.start(
                *(grid, start, rounds, 3600.0, jobs.train_config(), None),
                lambda number, _: note() if number else None,
            )

    apps = {"FedAvg": jobs.app("FedAvg"), "Flower's FedAvg": jobs.plain_app()}
    cores = os.cpu_count() or 1
    run_simulation(
        server,
        apps[side],
        clients,
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"address": "local", "num_cpus": cores},  # never a cluster that runs
        },
    )
    found = {"seconds": seconds, "memory": memory, "actors": cores}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
