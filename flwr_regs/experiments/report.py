"""The comparison as a table, a plot and a JSON file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.data import missing_extra


def summary(history: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each method: accuracies, rounds to the target, MB per client and round, seconds.

    MB are 10^6 bytes of payload, averaged over all clients and rounds.
    """
    target = history["job"]["target-accuracy"]
    rows = []
    for name, result in history["methods"].items():
        trained = [p for p in result["test"] if p["round"] > 0]
        if not trained:  # it failed before the end of round 1
            continue
        down = [b for r in result["rounds"] for b in r["bytes_down"].values()]
        ahead = sum(b for r in result["rounds"] for b in r.get("bytes_ahead", {}).values())
        up = [b for r in result["rounds"] for b in r.get("bytes_up", {}).values()]
        rows.append(
            {
                "method": name,
                "final": trained[-1]["accuracy"],
                "best": max(p["accuracy"] for p in trained),
                "rounds_to_target": next(
                    (int(p["round"]) for p in trained if p["accuracy"] >= target), None
                ),
                "mb_down": (sum(down) + ahead) / len(down) / 1e6,
                "mb_up": float(np.mean(up)) / 1e6,
                "worst_client": result.get("per_client", {}).get("worst"),
                "failures": sum(len(r["failures"]) for r in result["rounds"]),
                "seconds": result["seconds"],
            }
        )
        clients = result["rounds"][-1].get("evaluate", {}).get("clients", {})
        if clients and history["job"]["personalise"]:
            for key, metric in (("own", "accuracy"), ("personal", "personal-accuracy")):
                rows[-1][key] = float(np.mean([m[metric] for m in clients.values()]))
    return rows


def table(history: dict[str, Any]) -> str:
    """Return the summary as a table for a terminal."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise missing_extra("rich", "the table") from error
    job = history["job"]
    grid = Table(
        title=f"{job['dataset']}, partition {job['partition']} over {history['clients']} clients, "
        f"{job['rounds']} rounds, seed {job['seed']}",
        box=box.SIMPLE_HEAD,
    )
    target = f"rounds to {job['target-accuracy']:.0%}"
    columns = (
        "method",
        "final",
        "best",
        target,
        "worst client",
        "MB down",
        "MB up",
        "failed",
        "seconds",
    )
    for column in columns:
        grid.add_column(column, justify="left" if column == "method" else "right")
    for row in summary(history):
        grid.add_row(
            row["method"],
            f"{row['final']:.2%}",
            f"{row['best']:.2%}",
            str(row["rounds_to_target"] or "not reached"),
            "–" if row["worst_client"] is None else f"{row['worst_client']:.2%}",
            f"{row['mb_down']:.4f}",
            f"{row['mb_up']:.4f}",
            str(row["failures"]),
            f"{row['seconds']:.1f}",
        )
    out = io.StringIO()
    console = Console(file=out, width=108)
    console.print(grid)
    data = "the server's test set"
    if job["held-out-clients"]:
        data = "the held-out clients' data"
    elif job["held-out-share"]:
        data = "what the clients hold out"
    worst = "expected accuracy of the final model on data of its label distribution"
    tested = any("evaluate" in r for m in history["methods"].values() for r in m["rounds"])
    if tested and not job["personalise"]:
        data, worst = "what the clients test, a mean over clients", "on its own test data"
    console.print(f"Accuracy on {data}; MB per client and round.", highlight=False)
    console.print(f"Worst client: {worst}.", highlight=False)
    for row in summary(history):
        if "personal" in row:
            console.print(
                f"{row['method']}, mean over the clients' own test data: global model "
                f"{row['own']:.2%}, personalised {row['personal']:.2%}",
                highlight=False,
            )
    for name, result in history["methods"].items():
        if result["rounds"] and "epsilon" in (last := result["rounds"][-1]):
            console.print(
                f"{name}: epsilon {last['epsilon']:.3g} at delta {last['delta']:g}, one client replaced; "
                f"{np.mean([r['clipped'] for r in result['rounds']]):.0%} of the updates were clipped",
                highlight=False,
            )
        if "error" in result:
            console.print(f"{name} stopped: {result['error'][:300]}", highlight=False)
    for note in history["notes"]:
        console.print(f"NOTE: {note}", highlight=False)
    return out.getvalue()


def write(history: dict[str, Any], folder: Path) -> None:
    """Write ``history.json``, ``table.txt`` and ``accuracy.png``."""
    text = json.dumps({**history, "summary": summary(history)}, indent=1)
    (folder / "history.json").write_text(text)
    (folder / "table.txt").write_text(table(history))
    plot(history, folder / "accuracy.png")


def plot(history: dict[str, Any], path: Path) -> None:
    """Draw accuracy against rounds, one line per method."""
    job = history["job"]
    plot_curves(
        {
            name: [p["accuracy"] for p in result["test"] if p["round"] > 0]
            for name, result in history["methods"].items()
        },
        f"{job['dataset']}, partition {job['partition']}, {history['clients']} clients",
        path,
        job["target-accuracy"],
    )


def plot_curves(
    curves: dict[str, list[float]],
    title: str,
    path: Path,
    target: float,
    megabytes: dict[str, list[float]] | None = None,
) -> None:
    """Draw accuracies (fractions, one per round from round 1) as lines in per cent, and the target.

    The x axis is the round, or each line's cumulative `megabytes` per client.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "the plot") from error
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, accuracies in curves.items():
        x = megabytes[name] if megabytes else range(1, len(accuracies) + 1)
        axes.plot(x, [100 * a for a in accuracies], label=name)
    axes.axhline(100 * target, color="grey", linestyle=":", label="target")
    xlabel = "megabytes a client, down and up" if megabytes else "round"
    axes.set(xlabel=xlabel, ylabel="accuracy (%)", title=title)
    if megabytes:
        axes.set_xscale("log")
    axes.legend(fontsize="small", loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
