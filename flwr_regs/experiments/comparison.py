"""A comparison: each method on the same cohorts and seed, then a report."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from flwr_regs.experiments.job import Job


def results_folder(job: Job) -> Path:
    """Return (and make) the folder for the results.

    It is ``out`` if that is set. Else it is ``results/<time>`` in the server's folder, if that is a
    writable checkout of this project, and a folder under the home folder if not: Flower's local server
    keeps the folder of its first start, whatever the folder of a later ``flwr run``.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(job.out) if job.out else Path.home() / "flwr-regs-results" / stamp
    if not job.out:
        try:
            here = Path.cwd()
            if (here / "simulations" / "server_app.py").is_file() and os.access(here, os.W_OK):
                folder = here / "results" / stamp
        except FileNotFoundError:  # that first folder is gone
            pass
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(job: Job, grid: Grid, folder: Path | None) -> dict[str, Any]:
    """Train every method of `job` on `grid`, report into `folder`, and return the history.

    History and model are written after every method, and also when one fails. Without a folder, nothing
    is written or printed.
    """
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from flwr_regs.client.batches import resolve_device
    from flwr_regs.experiments import data, models, report
    from flwr_regs.flower.network import GridNetwork
    from flwr_regs.flower.strategy import RegStrategy
    from flwr_regs.server.population import Population

    job.check()  # before any client starts
    dataset = data.load(job.dataset, job.data_dir)
    model = models.build(job.dataset, job.model, job.seed)
    device = resolve_device("auto")
    clients = len(Population(1, None, 120.0).refresh(GridNetwork(grid)))
    parts = job.parts(dataset.train_y, clients)  # an impossible partition is refused here
    x, y = dataset.test_x, dataset.test_y
    if job.held_out_clients:
        held_out = np.concatenate(parts[clients:])
        x, y = dataset.train_x[held_out], dataset.train_y[held_out]
    elif job.held_out_share:
        held_out = np.concatenate([job.split(p)[0] for p in parts[:clients]])
        x, y = dataset.train_x[held_out], dataset.train_y[held_out]
    test_x, test_y = torch.from_numpy(x).to(device), torch.from_numpy(y).to(device)
    history: dict[str, Any] = {
        "job": {k.replace("_", "-"): v for k, v in vars(job).items()},
        "clients": clients,
        "notes": [],
        "methods": {},
    }
    if clients != job.num_clients:
        note = (
            f"this run has {clients} SuperNodes, but num-clients asks for {job.num_clients}: the data "
            f"is split over {clients} clients. Flower starts 2 by default; use "
            f"`flwr-regs run`, or: flwr run . --stream --federation-config "
            f'"num-supernodes={job.num_clients} client-resources-num-cpus=1"'
        )
        history["notes"].append(note)
        say(f"NOTE: {note}")

    shares = np.stack(  # each client's class shares
        [np.bincount(dataset.train_y[p], minlength=10) / len(p) for p in parts[:clients]]
    )

    @torch.no_grad()
    def outputs(arrays: ArrayRecord) -> torch.Tensor:
        model.load_state_dict(arrays.to_torch_state_dict())
        model.to(device).eval()
        return torch.cat([model(batch) for batch in torch.split(test_x, 1000)])

    def accuracy(arrays: ArrayRecord) -> tuple[float, float]:
        output = outputs(arrays)
        loss = torch.nn.functional.cross_entropy(output, test_y)
        return float(loss), float((output.argmax(1) == test_y).double().mean())

    def on_clients(entry: dict[str, Any], metric: str = "accuracy") -> np.ndarray:
        """Return the clients' `metric` in one round's evaluation, each on its own test data."""
        by_client = entry["evaluate"]["clients"]
        return np.array([by_client[pid][metric] for pid in sorted(by_client)])

    def per_client(strategy: RegStrategy) -> dict[str, Any]:
        """Return the clients' accuracies, measured or expected from their label distributions."""
        if job.tested_on_clients:
            tested = [e for e in strategy.history if "evaluate" in e]
            return spread(on_clients(tested[-1])) if tested else {}
        right = (outputs(strategy.arrays).argmax(1) == test_y).double()
        by_class = np.array(
            [
                float(right[test_y == c].mean()) if bool((test_y == c).any()) else 0.0
                for c in range(10)
            ]
        )
        return spread(shares @ by_class)

    def spread(each: np.ndarray) -> dict[str, Any]:
        numbers = {"mean": each.mean(), "std": each.std(), "worst": each.min()}
        return {"clients": each.tolist(), **{k: float(v) for k, v in numbers.items()}}

    start = ArrayRecord(model.state_dict())
    for method in job.method_names:
        curve: list[dict[str, float]] = []
        strategy = job.strategy(method)

        def test(
            server_round: int,
            arrays: ArrayRecord,
            method: str = method,
            curve: list[dict[str, float]] = curve,
            strategy: RegStrategy = strategy,
        ) -> MetricRecord | None:
            if not job.tested_on_clients:
                loss, share = accuracy(arrays)
            elif server_round == 0:
                return None
            else:  # Flower has just evaluated on them
                last = strategy.history[-1]
                loss, share = (float(on_clients(last, m).mean()) for m in ("loss", "accuracy"))
            curve.append({"round": server_round, "loss": loss, "accuracy": share})
            if folder:
                say(f"{method:<10} round {server_round:>4}/{job.rounds}   accuracy {share:7.2%}")
            return MetricRecord({"loss": loss, "accuracy": share})

        began = time.monotonic()
        entry: dict[str, Any] = {"settings": strategy.term.config(), "test": curve}
        history["methods"][method] = entry
        try:
            strategy.start(
                grid=grid,
                initial_arrays=start,
                num_rounds=job.rounds,
                train_config=ConfigRecord(job.train_config),
                evaluate_config=ConfigRecord(job.evaluate_config),
                evaluate_fn=test,
            )
        except BaseException as error:
            entry["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            entry |= {"seconds": time.monotonic() - began, "rounds": strategy.history}
            if strategy.history:
                entry["per_client"] = per_client(strategy)
            if folder:
                if strategy.history:
                    state = strategy.arrays.to_torch_state_dict()
                    save_file(state, folder / f"{method}.safetensors")
                report.write(history, folder)
    if folder:
        say(report.table(history))
        say(f"results: {folder}")
    return history


def say(text: str) -> None:
    """Print without delay: Flower forwards the server's output to ``flwr run --stream``."""
    print(text, flush=True)
