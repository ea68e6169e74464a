"""The server side of a simulation in Ray: the comparison that the run config describes."""

from __future__ import annotations

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_regs.experiments.run.comparison import results_folder, run
from flwr_regs.experiments.settings.job import Job

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and compare the methods of the job."""
    job = Job.from_run_config(context.run_config)
    logging.getLogger("flwr").setLevel(logging.WARNING)  # the comparison prints its own progress
    run(job, grid, results_folder(job))
