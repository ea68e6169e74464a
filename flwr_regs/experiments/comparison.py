"""A comparison: each method on the same cohorts and seed, then a report."""

from __future__ import annotations

import os
import re
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from flwr_regs.experiments.job import Job
from flwr_regs.flower.strategy import RegStrategy


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

    History and model are written after every method. If one fails, they are written as far as it got.
    With no folder, nothing is written or printed.
    """
    from safetensors.torch import save_file

    from flwr_regs.experiments import report

    comparison = Comparison(job, grid)
    history = comparison.history
    for note in history["notes"]:
        say(f"NOTE: {note}")
    for method in job.method_names:
        strategy = job.strategy(method)
        try:
            comparison.train(method, strategy, verbose=folder is not None)
        finally:
            if folder:
                if strategy.history:
                    state = strategy.arrays.to_torch_state_dict()
                    save_file(state, folder / f"{file_name(method)}.safetensors")
                report.write(history, folder)
    if folder:
        say(report.table(history))
        say(f"results: {folder}")
    return history


def file_name(method: str) -> str:
    """Return a method's label without what file systems refuse; a long or changed one ends in a number."""
    plain = re.sub(r"[^\w.+=,()-]+", "_", method)[:100]
    return plain if plain == method else f"{plain}-{zlib.crc32(method.encode()):08x}"


class Comparison:
    """A job's data and clients, and the history of its methods.

    Raises ValueError for settings or a partition that are impossible, before any client starts.
    """

    def __init__(self, job: Job, grid: Grid) -> None:
        import torch

        from flwr_regs.client.batches import resolve_device
        from flwr_regs.experiments import data, models
        from flwr_regs.flower.network import GridNetwork
        from flwr_regs.server.population import Population

        job.check()
        self.job, self.grid = job, grid
        dataset = data.load(job.dataset, job.data_dir, job.code_dir)
        self.model = models.build(job.dataset, job.model, job.seed, job.data_dir, job.code_dir)
        self.start = ArrayRecord(self.model.state_dict())
        clients = len(Population(1, None, 120.0).refresh(GridNetwork(grid)))
        notes = []
        if clients != job.num_clients:
            notes.append(
                f"this run has {clients} SuperNodes, but num-clients asks for {job.num_clients}: the data "
                f"is split over {clients} clients. Flower starts 2 unless told otherwise; use "
                f"`flwr-regs run`, or: flwr run . --stream --federation-config "
                f'"num-supernodes={job.num_clients} client-resources-num-cpus=1"'
            )
        try:
            parts = job.parts(dataset.train_y, clients)
        except ValueError as error:
            raise ValueError(". NOTE: ".join([str(error), *notes])) from error
        x, y = dataset.test_x, dataset.test_y
        held_out = None
        if job.held_out_clients:
            held_out = np.concatenate(parts[clients:])
        elif job.held_out_share:
            held_out = np.concatenate([job.split(p)[0] for p in parts[:clients]])
        if held_out is not None:
            x, y = dataset.train_x[held_out], dataset.train_y[held_out]
        self.device = resolve_device("auto")
        self.test_x = torch.from_numpy(x).to(self.device)
        self.test_y = torch.from_numpy(y).to(self.device)
        self.num_classes = dataset.num_classes
        counts = [
            np.bincount(dataset.train_y[p], minlength=self.num_classes) for p in parts[:clients]
        ]
        self.shares = np.stack([c / c.sum() for c in counts])  # each client's class shares
        self.history: dict[str, Any] = {
            "job": {k.replace("_", "-"): v for k, v in vars(job).items()},
            "clients": clients,
            "notes": notes,
            "methods": {},
        }

    def train(self, method: str, strategy: RegStrategy, verbose: bool) -> None:
        """Train one method; its entry in the history is as complete as it got, also after an error."""
        job, curve = self.job, list[dict[str, float]]()

        def test(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            if not job.tested_on_clients:
                loss, share = self._measured(arrays)
            elif server_round == 0:
                return None
            else:  # the clients have just evaluated
                last = strategy.history[-1]
                loss, share = (float(np.mean(_on_clients(last, m))) for m in ("loss", "accuracy"))
            curve.append({"round": server_round, "loss": loss, "accuracy": share})
            if verbose:
                say(f"{method:<10} round {server_round:>4}/{job.rounds}   accuracy {share:7.2%}")
            return MetricRecord({"loss": loss, "accuracy": share})

        entry: dict[str, Any] = {"settings": strategy.term.config(), "test": curve}
        self.history["methods"][method] = entry
        began = time.monotonic()
        try:
            strategy.start(
                grid=self.grid,
                initial_arrays=self.start,
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
                entry["per_client"] = self._per_client(strategy)

    def _outputs(self, arrays: ArrayRecord) -> Any:
        """Return a model's outputs on the test data."""
        import torch

        self.model.load_state_dict(arrays.to_torch_state_dict())
        self.model.to(self.device).eval()
        with torch.no_grad():
            return torch.cat([self.model(batch) for batch in torch.split(self.test_x, 1000)])

    def _measured(self, arrays: ArrayRecord) -> tuple[float, float]:
        """Return (mean loss, accuracy) of a model on the test data."""
        import torch

        output = self._outputs(arrays)
        loss = torch.nn.functional.cross_entropy(output, self.test_y)
        return float(loss), float((output.argmax(1) == self.test_y).double().mean())

    def _per_client(self, strategy: RegStrategy) -> dict[str, Any]:
        """Return each client's accuracy, or the expected one on new data of its label distribution."""
        if self.job.tested_on_clients:
            tested = [e for e in strategy.history if "evaluate" in e]
            return _spread(_on_clients(tested[-1])) if tested else {}
        right = (self._outputs(strategy.arrays).argmax(1) == self.test_y).double()
        classes = [right[self.test_y == c] for c in range(self.num_classes)]
        by_class = [float(each.mean()) if len(each) else 0.0 for each in classes]
        return _spread(self.shares @ by_class)


def _on_clients(entry: dict[str, Any], metric: str = "accuracy") -> Any:
    """Return each client's metric on its own test data, where the clients test the model."""
    by_client = entry["evaluate"]["clients"]
    return np.array([by_client[pid][metric] for pid in sorted(by_client)])


def _spread(each: Any) -> dict[str, Any]:
    numbers = {"mean": each.mean(), "std": each.std(), "worst": each.min()}
    return {"clients": each.tolist(), **{k: float(v) for k, v in numbers.items()}}


def say(text: str) -> None:
    """Print without delay: Flower forwards the server's output to ``flwr run --stream``."""
    print(text, flush=True)
