"""Runs of some settings, as the command line makes and trains them."""

from typing import Any

from flwr_regs import RegStrategy
from flwr_regs.experiments.calls import parse_methods
from flwr_regs.experiments.experiment import Experiment, Run
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.run import engine
from flwr_regs.experiments.run.progress import Progress
from flwr_regs.experiments.settings import key
from flwr_regs.experiments.strategies import build


def strategy_of(text: str, **common: Any) -> RegStrategy:
    """Return the strategy of one method, or composition, as the command line names it."""
    (calls,) = parse_methods(text).values()
    return build(calls, **common)


def runs_of(**settings: Any) -> list[Run]:
    """Return the checked runs of settings, whose names have underscores."""
    given = {key(name): value for name, value in settings.items()}
    experiment = Experiment.of_methods(given).checked(data=False)
    return experiment.tests(*experiment.panels)


def trained(**settings: Any) -> dict[str, RunRecord]:
    """Train the methods of settings in this process, and return label -> what came out."""
    runs = runs_of(**settings)
    return {record.label: record for record in engine.execute(runs, None, Progress(runs))}
