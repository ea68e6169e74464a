"""Try several values of one setting over several seeds, each run in one process, and report."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from flwr_regs import InProcessGrid, RoundFailed
from flwr_regs.experiments import comparison, report
from flwr_regs.experiments.clients import app as client_app
from flwr_regs.experiments.data import load
from flwr_regs.experiments.job import Job


def sweep(key: str, jobs: Mapping[str, Sequence[Job]], folder: Path, workers: int = 1) -> None:
    """Run `jobs` (value of `key` -> one job per seed) and write ``sweep.md``, ``.json`` and ``.png``.

    Every job must run exactly one method; the key may be ``methods`` or a method's parameter, such as
    ``FedFOR.alpha``. With the key ``case``, each value labels a set of settings, and the table and
    ``megabytes.png`` also show the traffic: down and up together, per client of the population. Accuracies
    are means over seeds, with their standard deviation. "last 5 rounds" is the mean over these rounds, so
    that one lucky round counts less. "worst client" and
    "spread" (standard deviation) are over the clients' accuracies with the final model. A last line has
    the processor's seconds, the mean over seeds: other work on the machine changes them little.
    """
    first = next(iter(jobs.values()))[0]
    for job in (job for seeds in jobs.values() for job in seeds):
        if len(job.method_names) != 1:
            raise ValueError(
                f"a sweep is over one method, not {job.method_names}; set methods=NAME"
            )
        job.check_data()
    load.cache_clear()  # the images: each worker loads its own
    began = time.monotonic()
    every = [(value, job) for value, seeds in jobs.items() for job in seeds]
    curves: dict[str, list[list[float]]] = {value: [] for value in jobs}
    spread: dict[str, list[dict[str, float]]] = {value: [] for value in jobs}
    traffic: dict[str, list[list[float]]] = {value: [] for value in jobs}
    seconds: dict[str, list[float]] = {value: [] for value in jobs}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        results = pool.map(_curve, [job for _, job in every])
        for done, ((value, job), found) in enumerate(zip(every, results, strict=True), start=1):
            curve, clients, megabytes, took = found
            seconds[value].append(took)
            traffic[value].append(megabytes)
            curves[value].append(curve)
            spread[value].append(clients)
            comparison.say(
                f"[{done}/{len(every)}, {time.monotonic() - began:.0f} s] {key} = {value}, seed "
                f"{job.seed}: last 5 rounds {np.mean(curve[-5:]):.2%}"
            )
    target = first.target_accuracy
    lines = [
        f"| {key} | last 5 rounds | final | best | rounds to {target:.0%} | worst client | spread |",
        "|---|---|---|---|---|---|---|",
    ]
    noised = any("epsilon" in s for runs in spread.values() for s in runs)
    if key == "case":
        lines = [f"{lines[0]} MB in all | MB to {target:.0%} |", f"{lines[1]}---|---|"]
    if noised:  # epsilon of the whole run, and the share of the updates that were clipped
        lines = [f"{lines[0]} epsilon | clipped |", f"{lines[1]}---|---|"]
    for value, runs in curves.items():
        reached = [next((str(t + 1) for t, a in enumerate(r) if a >= target), "–") for r in runs]
        lines.append(
            f"| {value} | {_mean(_last(runs))} | {_mean([r[-1] for r in runs])} "
            f"| {_mean([max(r) for r in runs])} | {', '.join(reached)} "
            f"| {_mean([s['worst'] for s in spread[value]])} | {_mean([s['std'] for s in spread[value]])} |"
        )
        if key == "case":
            needed = [
                next((f"{mb:.3g}" for a, mb in zip(*pair, strict=True) if a >= target), "–")
                for pair in zip(runs, traffic[value], strict=True)
            ]
            total = float(np.mean([mb[-1] for mb in traffic[value]]))
            lines[-1] += f" {total:.3g} | {', '.join(needed)} |"
        if noised:
            epsilons = [s.get("epsilon", np.inf) for s in spread[value]]
            lines[-1] += (
                f" {np.mean(epsilons):.3g} | {np.mean([s.get('clipped', 0) for s in spread[value]]):.0%} |"
            )
    best = max(curves, key=lambda v: float(np.nan_to_num(np.mean(_last(curves[v])), nan=-1)))
    lines += ["", f"Best by the last five rounds: **{best}**."]
    costs = ", ".join(f"{value}: {np.mean(each):.3g}" for value, each in seconds.items())
    lines += ["", f"Processor seconds a run: {costs}."]
    (folder / "sweep.md").write_text("\n".join(lines) + "\n")
    curves_or_none = {
        v: [r if np.all(np.isfinite(r)) else None for r in c] for v, c in curves.items()
    }
    (folder / "sweep.json").write_text(json.dumps({"key": key, "curves": curves_or_none}))
    named = key in ("methods", "case")
    label = "{}" if named else key + " = {}"
    title = f"{first.dataset}, partition {first.partition}, {first.num_clients} clients"
    means = {label.format(v): np.mean(r, axis=0).tolist() for v, r in curves.items()}
    title = title if named or "." in key else f"{first.method_names[0]} on {title}"
    report.plot_curves(means, title, folder / "sweep.png", target)
    if key == "case":
        spent = {v: np.mean(mb, axis=0).tolist() for v, mb in traffic.items()}
        report.plot_curves(means, title, folder / "megabytes.png", target, megabytes=spent)
    comparison.say("\n".join(lines) + f"\n\nresults: {folder}")


def _curve(job: Job) -> tuple[list[float], dict[str, float], list[float], float]:
    """Run one job of one method.

    Returns (accuracy after each round, the clients' spread, megabytes, the processor's seconds).
    """
    import torch

    torch.set_num_threads(1)  # small models; the workers share the machine
    logging.getLogger("flwr").setLevel(logging.ERROR)
    settings = {k.replace("_", "-"): v for k, v in vars(job).items()}
    grid = InProcessGrid(client_app, job.num_clients, settings)
    began = time.process_time()
    try:
        (result,) = comparison.run(job, grid, None)["methods"].values()
    except RoundFailed as error:
        comparison.say(f"{job.methods}, seed {job.seed}: {str(error)[:200]}")
        nothing = [float("nan")] * job.rounds
        return (
            nothing,
            {"worst": float("nan"), "std": float("nan")},
            nothing,
            time.process_time() - began,
        )
    spent = [
        sum(n for way in ("bytes_down", "bytes_up", "bytes_ahead") for n in r.get(way, {}).values())
        for r in result["rounds"]
    ]
    for sign in (r["divergence"] for r in result["rounds"] if "divergence" in r):
        comparison.say(f"{job.methods}, seed {job.seed}: {sign}")
    last = result["rounds"][-1]
    if "clipped" in last:
        clipped = float(np.mean([r["clipped"] for r in result["rounds"]]))
        result["per_client"] |= {"clipped": clipped, "epsilon": last.get("epsilon", np.inf)}
    megabytes = (np.cumsum(spent) / job.num_clients / 1e6).tolist()
    return (
        [p["accuracy"] for p in result["test"] if p["round"] > 0],
        result["per_client"],
        megabytes,
        time.process_time() - began,
    )


def _last(runs: Sequence[Sequence[float]]) -> list[float]:
    return [float(np.mean(r[-5:])) for r in runs]


def _mean(values: Sequence[float]) -> str:
    if not np.all(np.isfinite(values)):
        return "stopped"
    if len(values) == 1:
        return f"{100 * values[0]:.2f}"
    return f"{100 * np.mean(values):.2f} ± {100 * np.std(values):.2f}"
