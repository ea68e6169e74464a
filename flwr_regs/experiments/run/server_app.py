"""The server side of a Flower app: the comparison that the run config describes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_regs.experiments.cards import card_files
from flwr_regs.experiments.experiment import Experiment, Run
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.report.folders import new_folder, write
from flwr_regs.experiments.report.results import Results, provenance
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.run.engine import execute
from flwr_regs.experiments.run.progress import Lines
from flwr_regs.experiments.settings import Settings
from flwr_regs.experiments.words import out_folder
from flwr_regs.flower.grids.grid_network import GridNetwork
from flwr_regs.server.population.population import Population

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and compare the methods of the run config."""
    given = Settings.of(context.run_config).changed  # it lists the defaults too
    out = given.pop("out", "")
    experiment = Experiment.of_methods(given).checked(data=False)
    logging.getLogger("flwr").setLevel(logging.WARNING)  # the comparison prints its own progress
    folder = results_folder(out)
    write(folder / card_files.FILE, card_files.text(experiment, provenance(["flwr", "run"])))
    compare(experiment.tests(experiment.panel), grid, folder)


def compare(runs: Sequence[Run], grid: Grid, folder: Path) -> Results:
    """Train the methods of one seed on a grid, and report into `folder`.

    A method that diverges is a result; RuntimeError for any other failure, when all have had their turn.
    """
    settings, notes = runs[0].settings, list[str]()
    clients = len(Population(1, None, 120.0).refresh(GridNetwork(grid)))
    if clients != settings.num_clients:
        notes.append(
            f"this run has {clients} SuperNodes, but num-clients asks for {settings.num_clients}: the data "
            f"is split over {clients} clients. Flower starts 2 unless told otherwise; use "
            f"`flwr-regs run`, or: flwr run . --stream --federation-config "
            f'"num-supernodes={settings.num_clients} client-resources-num-cpus=1"'
        )
    try:
        assert client_data_of(settings, clients).parts  # raises for a partition that is impossible
    except ValueError as error:
        raise ValueError(". NOTE: ".join([str(error), *notes])) from error
    progress = Lines(runs)
    for note in notes:
        progress.say(f"NOTE: {note}")

    def tables(so_far: Sequence[RunRecord]) -> None:
        Results(so_far, notes).save_tables(folder)

    records = execute(runs, folder, progress, tables=tables, grid=grid)
    results = Results(records, notes)
    results.save(folder)
    progress.say(f"{results.text()}results: {folder}")
    if failed := [record for record in records if not record.ended]:
        raise RuntimeError(f"{failed[0].label}: {failed[0].error}")
    return results


def results_folder(out: str) -> Path:
    """Return (and make) the folder for the results.

    It is `out` if that is set. Else it is ``results/<time>`` in the server's folder, if that is a
    writable checkout of this project, and a folder under the home folder if not: Flower's local server
    keeps the folder of its first start, whatever the folder of a later ``flwr run``.
    """
    if out and not Path(out).is_absolute():
        why = "Flower runs the server in another folder"
        raise ValueError(f"setting 'out' must be an absolute path, not '{out}': {why}")
    if out:
        return out_folder(out)
    with suppress(FileNotFoundError):  # that first folder is gone
        here = Path.cwd()
        if (here / "simulations" / "server_app.py").is_file() and os.access(here, os.W_OK):
            return new_folder(here / "results")
    return new_folder(Path.home() / "flwr-regs-results")
