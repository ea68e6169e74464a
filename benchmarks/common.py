"""What the studies share: data, models, one training, and a file with a line for each finished run.

A study lists its runs, and `Results.finish` does those that its file does not hold yet: a study that was
stopped goes on where it was. A run is one training by the package's Strategy, NumPyClients and grid.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import logging
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from PIL import Image
from scipy.stats import t as student
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import flwr_regs as fr
from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.models import models
from flwr_regs.experiments.partition.partitions import partition
from flwr_regs.experiments.report.drawing import Look, Picture, style
from flwr_regs.experiments.settings import Settings

NOT_FINITE = r"NaN|nan|infinity|inf\b|beyond"
"""What the server says of a reply, or a step, that has left the numbers: the training diverges."""
LAST = 5
"""The accuracy of a run is the mean over its last rounds, this many."""
TUNING_SEED = 101
"""Learning rates are chosen with this seed, which no result uses."""
HELD_OUT = 0.2
"""... and on this share of each client's data, which it does not train on then."""
BLUE, RED, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "0.5"


@dataclass(frozen=True)
class Setting:
    """What is the same for all methods that are compared; `lr` is the middle of the grid for it."""

    name: str
    data: str
    steps: int
    lr: float
    clients: int = 20
    cohort: int = 20
    dirichlet: float = 0.1  # 0: a fifth of the data IID, the rest sorted by label and cut in order
    momentum: float = 0.0
    weight_decay: float = 0.0
    adam: bool = False
    rounds: int = 40
    batch_size: int = 32

    @property
    def who(self) -> str:
        """The cohort in words."""
        return (
            f"all {self.clients}"
            if self.cohort == self.clients
            else f"{self.cohort} of {self.clients}"
        )


@dataclass(frozen=True)
class Run:
    """One training: a method's name and arguments in a setting, or its tuning on held-out examples."""

    setting: Setting
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 1
    lr: float = 0.1
    tuning: bool = False

    @property
    def key(self) -> str:
        """The run as a line of JSON, the same for the same run."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def cost(self) -> float:
        """The expected seconds, up to a factor that is about the same for all runs of a study."""
        step = {"digits": 0.4, "mnist": 0.7, "cifar10": 5.0}[self.setting.data]
        return self.setting.rounds * self.setting.cohort * (5 + step * self.setting.steps)


def model(name: str, seed: int) -> nn.Module:
    """Return a data set's model: a perceptron with 64 hidden units; for CIFAR-10 after two convolutions."""
    if name == "digits":
        return models.build("digits", "mlp", seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name == "mnist":
            return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
        return nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2048, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


@lru_cache(maxsize=2)
def clients_data(
    setting: Setting, seed: int, tuning: bool, data_dir: str
) -> tuple[list[DataLoader[Any]], torch.Tensor, torch.Tensor]:
    """Return each client's batches, and the images and labels that accuracy is measured on."""
    loaded = data.load(setting.data, data_dir)
    split: dict[str, Any] = {"partition": "similarity", "similarity": 20}
    if setting.dirichlet:
        split = {"partition": "dirichlet", "dirichlet-alpha": setting.dirichlet}
    parts = partition(loaded.train_y, Settings.of({**split, "seed": seed}), setting.clients)
    test_x, test_y = loaded.test_x, loaded.test_y
    if tuning:
        order = [np.random.default_rng((seed, k)).permutation(p) for k, p in enumerate(parts)]
        cuts = [int(HELD_OUT * len(p)) for p in parts]
        held_out = np.concatenate([p[:n] for p, n in zip(order, cuts, strict=True)])
        parts = [p[n:] for p, n in zip(order, cuts, strict=True)]
        test_x, test_y = loaded.train_x[held_out], loaded.train_y[held_out]
    loaders = []
    for p in parts:
        dataset = TensorDataset(
            torch.from_numpy(loaded.train_x[p]), torch.from_numpy(loaded.train_y[p])
        )
        sampler = BatchSampler(RandomSampler(dataset), setting.batch_size, drop_last=False)
        loaders.append(
            DataLoader(dataset, batch_size=None, sampler=sampler)
        )  # a batch is one indexing
    return loaders, torch.from_numpy(test_x), torch.from_numpy(test_y)


def optimizer(setting: Setting) -> Any:
    """Return what makes the clients' optimiser."""
    if setting.adam:
        return partial(torch.optim.Adam, weight_decay=setting.weight_decay)
    return partial(torch.optim.SGD, momentum=setting.momentum, weight_decay=setting.weight_decay)


def train(run: Run, data_dir: str = "", **settings: Any) -> dict[str, Any]:
    """Train once and return the run with its outcome; `own` are other settings of the clients.

    ``accuracy`` is the mean over the last rounds, as a fraction. It is None for a training that
    ``diverged``: its replies left the numbers, so that it stopped, or the outputs of its last models did.
    ``refused`` counts the replies that the server left out.
    """
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    setting, began = run.setting, time.monotonic()
    loaders, x, y = clients_data(setting, run.seed, run.tuning, data_dir)
    net = model(setting.data, run.seed)
    client = getattr(fr, f"{run.method}Client")

    def client_fn(context: Any) -> Any:
        batches = loaders[int(context.node_config["partition-id"])]
        return client(net, batches, **{"optimizer": optimizer(setting), **settings}, device="cpu")

    @torch.no_grad()
    def test(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if number <= setting.rounds - LAST:
            return None
        net.load_state_dict(arrays.to_torch_state_dict())
        net.eval()
        outputs = torch.cat([net(part) for part in x.split(1000)])
        correct = float((outputs.argmax(1) == y).float().mean())
        return MetricRecord({"accuracy": correct if bool(outputs.isfinite().all()) else -1.0})

    strategy = getattr(fr, run.method)(
        **run.arguments,
        seed=run.seed,
        fraction_train=setting.cohort / setting.clients,
        fraction_evaluate=0.0,
    )
    accuracies: list[float] = []
    try:
        result = strategy.start(
            grid=fr.InProcessGrid(fr.client_app(client_fn), setting.clients),
            initial_arrays=ArrayRecord(net.state_dict()),
            num_rounds=setting.rounds,
            train_config=ConfigRecord({"lr": run.lr, "local-steps": setting.steps}),
            evaluate_fn=test,
        )
        accuracies = [float(m["accuracy"]) for m in result.evaluate_metrics_serverapp.values()]  # type: ignore[arg-type]
    except fr.RoundFailed as error:
        if not re.search(NOT_FINITE, str(error)):
            raise
    refused = [why for entry in strategy.history for why in entry["failures"].values()]
    if others := [why for why in refused if not re.search(NOT_FINITE, why)]:
        raise RuntimeError(f"{run.key}: {others[0]}")
    diverged = len(accuracies) < LAST or min(accuracies) < 0
    return {
        **asdict(run),
        "accuracy": None if diverged else round(float(np.mean(accuracies)), 6),
        "diverged": diverged,
        "refused": len(refused),
        "seconds": round(time.monotonic() - began, 2),
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a study's compressed file, none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a study's file, as a whole or not at all; equal lines give equal bytes."""
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    part = path.with_name(f".{path.name}")
    part.write_bytes(gzip.compress(text.encode(), mtime=0))
    part.replace(path)


class Results:
    """The finished runs of a file, one JSON line each; `finish` adds to it, but not with no `processes`."""

    def __init__(
        self,
        path: Path,
        data_dir: str = "",
        processes: int = 1,
        trains: Callable[[Any, str], dict[str, Any]] | None = None,
    ) -> None:
        self.path, self.data_dir, self.processes = path, data_dir, processes
        self._train = trains or train
        self.lines: dict[str, dict[str, Any]] = {}
        for line in read_lines(path):
            self.lines[_key_of(line)] = line
        self._began, self._done = time.monotonic(), 0.0

    def __getitem__(self, run: Run) -> dict[str, Any]:
        return self.lines[run.key]

    def __contains__(self, run: Run) -> bool:
        return run.key in self.lines

    def finish(self, runs: Iterable[Run]) -> None:
        """Do those of `runs` that the file lacks, and say how long the rest will take."""
        waiting = {run.key: run for run in runs if run not in self}
        left = sum(run.cost for run in waiting.values())
        if not waiting:
            return
        if not self.processes:
            raise LookupError(
                f"{self.path} lacks {len(waiting)} runs, such as {next(iter(waiting))}"
            )
        if self.processes == 1:
            for run in waiting.values():
                left -= run.cost
                self._keep(run, self._train(run, self.data_dir), left)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.processes, mp_context=context) as pool:
            futures = {
                pool.submit(self._train, run, self.data_dir): run for run in waiting.values()
            }
            for future in as_completed(futures):
                left -= futures[future].cost
                self._keep(futures[future], future.result(), left)

    def _keep(self, run: Run, line: dict[str, Any], left: float) -> None:
        self.lines[run.key] = line
        write_lines(self.path, self.lines.values())
        self._done += run.cost
        minutes = (time.monotonic() - self._began) / self._done * left / 60
        reached = "diverged" if line["diverged"] else f"{line['accuracy']:.2%}"
        print(
            f"{run.setting.name}: {run.method} {dict(run.arguments)}, lr {run.lr:.3g}, seed {run.seed}",
            f"{'(tuning)' if run.tuning else ''}: {reached} in {line['seconds']:.0f} s,",
            f"{minutes:.0f} min left",
            flush=True,
        )

    def tuned(self, setting: Setting) -> tuple[float, dict[float, float]]:
        """Return FedAvg's best learning rate, and the accuracy of each that was tried.

        The grid is lr/3, lr and 3 lr; while the best is at an end, it grows there. Ties go to the smaller.
        """
        tried: dict[float, float] = {}
        powers = [-1, 0, 1]
        while True:
            rates = {p: float(f"{setting.lr * 3.0**p:.3g}") for p in powers}
            runs = {lr: Run(setting, "FedAvg", {}, TUNING_SEED, lr, True) for lr in rates.values()}
            self.finish(runs.values())
            tried |= {lr: self[run]["accuracy"] or 0.0 for lr, run in runs.items()}
            best = max(powers, key=lambda p: tried[rates[p]])
            if best == min(powers):
                powers = [best - 1, *powers]
            elif best == max(powers):
                powers = [*powers, best + 1]
            else:
                return rates[best], dict(sorted(tried.items()))


def percent(accuracies: Sequence[float | None]) -> str:
    """Return the mean of accuracies in per cent, or how many runs of how many diverged."""
    if diverged := sum(a is None for a in accuracies):
        return f"diverged ({diverged} of {len(accuracies)})"
    return f"{100 * np.mean([a for a in accuracies if a is not None]):.2f}"


def bounds(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of paired differences and its one-sided 95 % bounds below and above (Student's t)."""
    n, mean = len(differences), float(np.mean(differences))
    half = float(student.ppf(0.95, n - 1) * np.std(differences, ddof=1) / np.sqrt(n))
    return mean, mean - half, mean + half


@contextmanager
def picture(path: Path, width: float, height: float) -> Iterator[Picture]:
    """Give an empty figure, its size in inches, in the style of the package's pictures; then write it."""
    look = Look(size=(width, height))
    with style(look):
        made = Picture(look)
        yield made
        write_picture(made, path)


def write_picture(made: Picture, path: Path) -> None:
    """Write a figure of 120 dots per inch for a page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(small_webp(Image.open(io.BytesIO(made.rendered("png", 120)))))


def small_webp(image: Image.Image) -> bytes:
    """Return an image as a lossless WebP, with fewer colours where few pixels have them: at edges.

    They lie on 16 steps of each channel; greys, at the edges of letters, on 8.
    """
    pixels = np.asarray(image.convert("RGB")).astype(int)
    packed = pixels.reshape(-1, 3) @ [65536, 256, 1]
    _, colour, counts = np.unique(packed, return_inverse=True, return_counts=True)
    share = (counts / len(packed))[colour].reshape(*pixels.shape[:2], 1)
    rounded = np.where(share < 0.002, np.round(pixels / 17) * 17, pixels)
    grey = np.ptp(rounded, axis=-1, keepdims=True) == 0
    on_eight = (np.round(rounded / 255 * 7) / 7 * 255).round()
    rounded = np.where(grey & (share < 0.01), on_eight, rounded)
    out = io.BytesIO()
    Image.fromarray(rounded.astype(np.uint8)).save(
        out, "webp", lossless=True, quality=100, method=6
    )
    return out.getvalue()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def filled(page: str, mark: str, tables: Mapping[str, str]) -> str:
    """Return a page with these tables between their marks, ``<!-- mark: name -->`` and ``<!-- end -->``.

    Raises LookupError if a table has not one place.
    """
    for name, made in tables.items():
        parts = re.split(rf"(<!-- {mark}: {name} -->\n).*?(?=<!-- end -->)", page, flags=re.S)
        if len(parts) != 3:
            places = len(parts) // 2
            raise LookupError(f"the page has {places} places for the table {name!r}, not one")
        page = f"{parts[0]}{parts[1]}{made}\n{parts[2]}"
    return page


def _key_of(line: Mapping[str, Any]) -> str:
    outcome = ("accuracy", "diverged", "refused", "seconds")
    return json.dumps({k: v for k, v in line.items() if k not in outcome}, sort_keys=True)


def parser(doc: str, out: Path) -> argparse.ArgumentParser:
    """Return the options that the studies share."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--data-dir", default="", help="the folder with MNIST/raw and cifar10")
    made.add_argument("--out", type=Path, default=out, help="the file of finished runs")
    made.add_argument("--processes", type=int, default=1)
    made.add_argument(
        "--settings", default="", help="only settings whose name begins so; several by commas"
    )
    made.add_argument("--seeds", default="", help="only these seeds, by commas")
    made.add_argument(
        "--report", action="store_true", help="print the tables and draw, train nothing"
    )
    return made


def chosen(settings: Sequence[Setting], text: str) -> list[Setting]:
    """Return the settings that ``--settings`` names."""
    beginnings = tuple(text.split(","))
    selected = [s for s in settings if s.name.startswith(beginnings)]
    if not selected:
        sys.exit(f"--settings {text}: no such setting; there are {[s.name for s in settings]}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return selected
