"""Try several values of one setting over several seeds, in one process, and report."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from flwr_regs import InProcessGrid
from simulations import report, server_app
from simulations.client_app import app as client_app
from simulations.job import Job


def sweep(key: str, jobs: Mapping[str, Sequence[Job]], folder: Path) -> None:
    """Run `jobs` (value of `key` -> one job a seed) and write ``sweep.md``, ``.json`` and ``.png``.

    Every job must compare exactly one method. Accuracies are means over seeds, with their standard
    deviation; "last 5" is the mean over the last five rounds, which a single lucky round moves less.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    first = next(iter(jobs.values()))[0]
    if len(first.method_names) != 1:
        raise ValueError(f"a sweep is over one method, not {first.method_names}; set methods=NAME")
    curves: dict[str, list[list[float]]] = {}
    for value, seeds in jobs.items():
        for job in seeds:
            settings = {k.replace("_", "-"): v for k, v in vars(job).items()}
            grid = InProcessGrid(client_app, job.num_clients, settings)
            (result,) = server_app.run(job, grid, None)["methods"].values()
            curves.setdefault(value, []).append([p["accuracy"] for p in result["test"][1:]])
        server_app.say(f"{key} = {value}: last 5 rounds {_mean(_last(curves[value]))}")
    target = first.target_accuracy
    lines = [
        f"| {key} | last 5 rounds | best | rounds to {target:.0%} |",
        "|---|---|---|---|",
    ]
    for value, runs in curves.items():
        reached = [next((str(t + 1) for t, a in enumerate(r) if a >= target), "–") for r in runs]
        lines.append(
            f"| {value} | {_mean(_last(runs))} | {_mean([max(r) for r in runs])} "
            f"| {', '.join(reached)} |"
        )
    best = max(curves, key=lambda v: float(np.mean(_last(curves[v]))))
    lines += ["", f"Best by the last five rounds: **{best}**."]
    (folder / "sweep.md").write_text("\n".join(lines) + "\n")
    (folder / "sweep.json").write_text(json.dumps({"key": key, "curves": curves}))
    report.plot_curves(
        {f"{key} = {v}": np.mean(r, axis=0).tolist() for v, r in curves.items()},
        f"{first.method_names[0]} on {first.dataset}, partition {first.partition}",
        folder / "sweep.png",
        target,
    )
    server_app.say("\n".join(lines) + f"\n\nresults: {folder}")


def _last(runs: Sequence[Sequence[float]]) -> list[float]:
    return [float(np.mean(r[-5:])) for r in runs]


def _mean(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.2f} ± {100 * np.std(values):.2f}"
