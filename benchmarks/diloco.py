"""DiLoCo: AdamW on the clients, kept or reset between rounds, Nesterov on the server: docs/diloco.md.

``python -m benchmarks.diloco`` trains what the results file lacks; ``python -m benchmarks.diloco --report``
prints the page's tables and draws its picture. The data, scikit-learn's digits, need no download.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import common
from benchmarks.common import (
    TUNING_SEED,
    Results,
    Setting,
    bounds,
    figure,
    parser,
    save,
    table,
)

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "studies" / "diloco.jsonl.gz"
SETTING = Setting(
    "digits, K 10", "digits", 10, 0.003, 5, 5, dirichlet=0.3, weight_decay=0.1, rounds=15
)
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
SEEDS = (1, 2, 3, 4, 5)
OUTER: dict[str, tuple[str, Mapping[str, Any]]] = {
    "mean": ("FedAvg", {"weighting": "uniform"}),
    "Nesterov": (
        "FedOpt",
        {
            "server_optimizer": "SGD",
            "lr": 0.7,
            "momentum": 0.9,
            "nesterov": True,
            "weighting": "uniform",
        },
    ),
}
"""The server's step -> strategy and arguments; Nesterov with the paper's values."""
INNER = {"reset": False, "kept": True}
CELLS = [(outer, inner) for outer in OUTER for inner in INNER]


@dataclass(frozen=True)
class Run(common.Run):
    """One training with AdamW on the clients; `keep`: it keeps its state between rounds."""

    keep: bool = False


def train(run: Run, data_dir: str = "") -> dict[str, Any]:
    """Train once and return the run with its outcome."""
    make = partial(torch.optim.AdamW, weight_decay=run.setting.weight_decay)
    return common.train(run, data_dir, optimizer=make, keep_optimizer=run.keep)


def run(outer: str, inner: str, seed: int, lr: float, tuning: bool = False) -> Run:
    """Return one training."""
    method, arguments = OUTER[outer]
    return Run(SETTING, method, arguments, seed, lr, tuning, INNER[inner])


def tuned(results: Results, outer: str, inner: str) -> float:
    """Return a cell's learning rate of AdamW: the best on examples that the clients hold out."""
    tried = {lr: run(outer, inner, TUNING_SEED, lr, True) for lr in RATES}
    results.finish(tried.values())
    return max(RATES, key=lambda lr: results[tried[lr]]["accuracy"] or 0.0)


def accuracies(results: Results, outer: str, inner: str) -> list[float]:
    """Return a cell's accuracies in per cent, seed by seed; 0 for a training that diverged."""
    lr = tuned(results, outer, inner)
    return [100 * (results[run(outer, inner, s, lr)]["accuracy"] or 0.0) for s in SEEDS]


def tables(results: Results) -> dict[str, str]:
    """Return the page's table."""
    base = accuracies(results, *CELLS[0])
    rows = []
    for outer, inner in CELLS:
        reached = accuracies(results, outer, inner)
        mean, low, high = bounds([a - b for a, b in zip(reached, base, strict=True)])
        apart = f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"
        lr, spread = tuned(results, outer, inner), f"{min(reached):.2f} to {max(reached):.2f}"
        first = (outer, inner) == CELLS[0]
        rows.append(
            [outer, inner, f"{lr:g}", f"{np.mean(reached):.2f}", spread, "–" if first else apart]
        )
    head = ["server", "AdamW", "its learning rate", "accuracy (%)", "over seeds", "against row 1"]
    return {"accuracy": table(head, rows)}


def draw(results: Results, path: Path) -> None:
    """Draw each seed's accuracy and the means."""
    made = figure(6.4, 3.6)
    panel = made.subplots()
    for i, (outer, inner) in enumerate(CELLS):
        reached = accuracies(results, outer, inner)
        colour = "#0072B2" if inner == "reset" else "#D55E00"
        panel.plot([i] * len(reached), reached, "o", color=colour, alpha=0.55, ms=5)
        panel.plot([i - 0.22, i + 0.22], [np.mean(reached)] * 2, color=colour, lw=2.5)
    names = [f"{outer},\nAdamW {inner}" for outer, inner in CELLS]
    panel.set_xticks(range(len(CELLS)), names)
    panel.set(ylabel="test accuracy (%)", xlim=(-0.5, len(CELLS) - 0.5))
    panel.grid(axis="y", alpha=0.25)
    save(made, path)


def main() -> None:
    """Train what is missing, or report."""
    options = parser(__doc__ or "", OUT).parse_args()
    processes = 0 if options.report else options.processes
    results = Results(options.out, options.data_dir, processes, train)
    if options.report:
        print("\n\n".join(tables(results).values()))
        draw(results, ROOT / "docs" / "img" / "diloco.png")
        return
    rates = {cell: tuned(results, *cell) for cell in CELLS}
    results.finish(run(*cell, seed, lr) for seed in SEEDS for cell, lr in rates.items())


if __name__ == "__main__":
    main()
