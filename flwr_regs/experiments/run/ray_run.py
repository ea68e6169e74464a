"""Runs in Flower's Ray simulation, in a process of their own: whatever ends it, Ray's processes end too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.run.clients import SimulatedClients


def on_grid(
    runs: Sequence[Run], train: Callable[[Grid], None], log: Path, gpus: float = 0.0
) -> None:
    """Call `train` with a grid whose clients are Ray's actors.

    What Flower and Ray print, and this process, goes to the file `log`; `gpus` is each client's share.
    """
    from flwr.simulation import run_simulation

    with log.open("a") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    clients = runs[0].settings.num_clients
    server = ServerApp()

    @server.main()
    def main(grid: Grid, _: Context) -> None:
        while len([*grid.get_node_ids()]) < clients:  # they register while the server starts
            time.sleep(0.05)
        train(grid)

    run_simulation(
        server,
        SimulatedClients(tuple(runs)).app(),
        clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": gpus}},
    )
