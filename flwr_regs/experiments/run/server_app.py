"""The server side of a simulation in Ray: the comparison that the run config describes."""

from __future__ import annotations

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_regs.experiments.experiment import Experiment
from flwr_regs.experiments.run.comparison import results_folder, run

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and compare the methods of the run config."""
    experiment = Experiment.of_methods(context.run_config).checked()
    logging.getLogger("flwr").setLevel(logging.WARNING)  # the comparison prints its own progress
    runs = experiment.tests(*experiment.panels)
    run(runs, grid, results_folder(runs[0].settings.out))
