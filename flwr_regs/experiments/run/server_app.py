"""The server side of a Flower app: the comparison that the run config describes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flwr_regs.experiments.cards.card_files import save
from flwr_regs.experiments.experiment import Experiment
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.report.folders import locked, new_folder
from flwr_regs.experiments.report.results import Results, provenance
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.run.engine import execute
from flwr_regs.experiments.run.progress import Lines
from flwr_regs.experiments.settings import Settings
from flwr_regs.experiments.words import out_folder
from flwr_regs.flower.grids.grid_network import GridNetwork
from flwr_regs.server.population.population import Population
from flwr_regs.wire.text import quoted

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train and compare the methods of the run config."""
    given = Settings.of(context.run_config).changed  # it lists the defaults too
    out = given.pop("out", "")
    experiment = Experiment.of_methods(given).checked(data=False)
    logging.getLogger("flwr").setLevel(logging.WARNING)  # the comparison prints its own progress
    folder = results_folder(out)
    with locked(folder):
        compare(experiment, grid, folder)


def compare(experiment: Experiment, grid: Grid, folder: Path) -> Results:
    """Train the methods of one seed on a grid, and report into `folder`.

    The SuperNodes say how many clients there are. A method that diverges is a result; RuntimeError for any
    other failure, when all have had their turn.
    """
    asked, notes = experiment.ends[0].settings.num_clients, list[str]()
    if (clients := population(grid)) != asked:
        notes.append(
            f"this run has {clients} SuperNodes, but num-clients asks for {asked}: the data "
            f"is split over {clients} clients. Flower starts 2 unless told otherwise; use "
            f"`flwr-regs run`, or: flwr run . --stream --federation-config "
            f'"num-supernodes={asked} client-resources-num-cpus=1"'
        )
    try:
        experiment = experiment.given({"num-clients": clients})
        runs = experiment.tests(experiment.panel)
        assert client_data_of(runs[0].settings).parts  # raises for a partition that is impossible
    except ValueError as error:
        raise ValueError(". NOTE: ".join([str(error), *notes])) from error
    save(experiment, folder, provenance(["flwr", "run"]))
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


def population(grid: Grid) -> int:
    """Return over how many clients the SuperNodes split the data; ValueError if they do not agree."""
    came = Population(1, None, 120.0)
    came.refresh(GridNetwork(grid))
    said = {pid: came.totals.get(node, 0) for pid, node in came.nodes.items()}
    if {*said.values()} != {came.size} or max(said) >= came.size:
        needs = "SuperNodes need partition ids from 0 to num-partitions - 1, and the same num-partitions"
        raise ValueError(f"{needs}, not (by partition-id) {quoted(dict(sorted(said.items())))}")
    return came.size


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
