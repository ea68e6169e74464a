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
    BLUE,
    RED,
    TUNING_SEED,
    Results,
    Setting,
    bounds,
    parser,
    picture,
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
    seeds = np.linspace(-0.14, 0.14, len(SEEDS))  # beside each other, in one order
    with picture(path, 5.2, 3.2) as made:
        panel = made.subplots()
        for i, (outer, inner) in enumerate(CELLS):
            reached = accuracies(results, outer, inner)
            colour, marker = (BLUE, "o") if inner == "reset" else (RED, "D")
            dots = {"color": colour, "marker": marker, "ls": "", "ms": 4, "mfc": "none"}
            panel.plot(i + seeds, reached, label=f"AdamW {inner}: a seed", **dots)
            bar = {"color": colour, "ls": "-", "lw": 2}
            words = f"AdamW {inner}: mean of {len(SEEDS)} seeds"
            panel.plot([i - 0.25, i + 0.25], [np.mean(reached)] * 2, label=words, **bar)
        panel.set_xticks(range(len(CELLS)), [f"{outer},\nAdamW {inner}" for outer, inner in CELLS])
        panel.set(xlabel="server's step, and the clients' optimiser", ylabel="test accuracy (%)")
        panel.set_xlim(-0.5, len(CELLS) - 0.5)
        panel.grid(visible=False, axis="x")
        key = panel.get_legend_handles_labels()
        shown = [handles_or_labels[: 2 * len(INNER)] for handles_or_labels in key]
        made.legend(*shown, loc="outside upper center", ncols=2, frameon=False)


def main() -> None:
    """Train what is missing, or report."""
    options = parser(__doc__ or "", OUT).parse_args()
    processes = 0 if options.report else options.processes
    results = Results(options.out, options.data_dir, processes, train)
    if options.report:
        print("\n\n".join(tables(results).values()))
        draw(results, ROOT / "docs" / "img" / "diloco.webp")
        return
    rates = {cell: tuned(results, *cell) for cell in CELLS}
    results.finish(run(*cell, seed, lr) for seed in SEEDS for cell, lr in rates.items())


if __name__ == "__main__":
    main()
