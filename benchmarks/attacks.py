"""Hostile clients against each aggregator and several methods: the tables of docs/robustness.md.

``python -m benchmarks.attacks measure`` trains what ``docs/studies/attacks.jsonl.gz`` lacks, on the bundled
digits; ``python -m benchmarks.attacks report`` writes the page's tables. Two of ten clients are hostile.
Nothing is tuned: one learning rate, one setting of each method and of each aggregator.
"""

from __future__ import annotations

import argparse
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import flwr_regs as fr
from benchmarks.common import NOT_FINITE, filled, read_lines, table, write_lines
from flwr_regs.experiments.data import datasets as data
from flwr_regs.experiments.models import models
from flwr_regs.experiments.partition.partitions import partition
from flwr_regs.experiments.settings import Settings

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "studies" / "attacks.jsonl.gz"
PAGE = ROOT / "docs" / "robustness.md"
CLIENTS, HOSTILE, ROUNDS, SEEDS = 10, 2, 10, (1, 2, 3)
TRAIN = {"lr": 0.2, "local-steps": 8}
BATCH, DIRICHLET = 16, 1.0
FACTOR = 10.0
"""How many times as long as its own is an update that is flipped, or noise."""
CLAIM = 10**15
"""The largest number of examples that the server takes a client's word for."""

ATTACKS = {
    "none": "nobody is hostile",
    "flip": "the update, turned round and ten times as long; uploads too",
    "noise": "Gaussian noise, ten times as long as the update; uploads too",
    "labels": "trains on labels 9 − y",
    "claim": "trains on labels 9 − y, and claims 10¹⁵ examples",
}
AGGREGATORS: dict[str, dict[str, Any]] = {
    "Mean()": {},
    "Mean(), max_weight=0.1": {"max_weight": 0.1},
    "CoordinateMedian()": {"aggregator": fr.CoordinateMedian()},
    "TrimmedMean(0.2)": {"aggregator": fr.TrimmedMean(0.2)},
    "Krum(2)": {"aggregator": fr.Krum(2)},
    "Krum(2, keep=6)": {"aggregator": fr.Krum(2, keep=6)},
    "GeometricMedian()": {"aggregator": fr.GeometricMedian()},
    "NormBound()": {"aggregator": fr.NormBound()},
    "CenteredClipping(0.5)": {"aggregator": fr.CenteredClipping(0.5)},
}
METHODS: dict[str, Callable[..., Any]] = {
    "FedAvg": fr.FedAvg,
    "FedProx": lambda **k: fr.FedProx(0.1, **k),
    "FedFOR": fr.FedFOR,
    "FedADC": lambda **k: fr.FedADC(0.6, **k),
    "EFL": lambda **k: fr.EFL(0.1, fisher_samples=30, **k),
    "RFedAvgPlus": lambda **k: fr.RFedAvgPlus(0.1, **k),
    "SCAFFOLD": fr.SCAFFOLD,
}
FEW_AGGREGATORS = ("Mean()", "CoordinateMedian()", "Krum(2, keep=6)", "GeometricMedian()")
FEW_ATTACKS = ("none", "flip", "labels")
Key = tuple[str, str, str, int]


def runs() -> Iterator[Key]:
    """Yield (method, aggregator, attack, seed) of every run, the first seed first."""
    for seed in SEEDS:
        for aggregator in AGGREGATORS:
            for attack in ATTACKS:
                yield "FedAvg", aggregator, attack, seed
        for method in list(METHODS)[1:]:
            for aggregator in FEW_AGGREGATORS:
                for attack in FEW_ATTACKS:
                    yield method, aggregator, attack, seed


@lru_cache(maxsize=1)
def digits() -> data.Data:
    """Return the data."""
    return data.load("digits")


def hostile(seed: int) -> set[int]:
    """Return the hostile clients of a seed."""
    return {int(k) for k in np.random.default_rng(seed).choice(CLIENTS, HOSTILE, replace=False)}


def loaders(seed: int, flipped: set[int]) -> list[DataLoader[Any]]:
    """Return the clients' data; that of the `flipped` ones has labels 9 − y."""
    loaded, out = digits(), []
    split = {"partition": "dirichlet", "dirichlet-alpha": DIRICHLET, "seed": seed}
    parts = partition(loaded.train_y, Settings.of(split), CLIENTS)
    for k, part in enumerate(parts):
        y = loaded.train_y[part]
        dataset = TensorDataset(
            torch.from_numpy(loaded.train_x[part]), torch.from_numpy(9 - y if k in flipped else y)
        )
        sampler = BatchSampler(RandomSampler(dataset), BATCH, drop_last=False)
        out.append(DataLoader(dataset, batch_size=None, sampler=sampler))  # a batch is one indexing
    return out


def lying(attack: str, liars: set[int], seed: int) -> Callable[..., Message]:
    """Return a mod that changes the replies of the `liars`."""

    def mod(message: Message, context: Context, call_next: Any) -> Message:
        k = int(context.node_config["partition-id"])
        sent = message.content.array_records.get("arrays", {})
        start = {name: a.numpy() for name, a in sent.items()}
        number = int(message.content["config"]["server-round"]) if sent else 0
        reply: Message = call_next(message, context)
        kind = message.metadata.message_type.partition(".")[0]
        if k not in liars or reply.has_error() or kind == "evaluate":
            return reply
        if attack == "claim" and "metrics" in reply.content:
            reply.content["metrics"]["num-examples"] = CLAIM
        if attack in ("flip", "noise"):
            rng = np.random.default_rng([seed, k, number])
            for name, record in list(reply.content.array_records.items()):
                base = start if name == "arrays" else {}
                reply.content[name] = ArrayRecord(
                    {
                        n: Array(changed(attack, n, a.numpy(), base.get(n, 0.0), rng))
                        for n, a in record.items()
                    }
                )
        return reply

    return mod


def changed(attack: str, name: str, value: np.ndarray, base: Any, rng: Any) -> np.ndarray:
    """Return a hostile array in place of `value`, counted from `base`."""
    update = value - base
    if attack == "flip":
        moved = -FACTOR * update
    else:
        moved = FACTOR * np.sqrt(np.mean(update**2)) * rng.normal(size=value.shape)
    if name.startswith("U."):  # negative squares would be refused
        moved = np.abs(moved)
    return np.asarray(base + moved, dtype=value.dtype)


def train(method: str, aggregator: str, attack: str, seed: int) -> dict[str, Any]:
    """Train once; return the final model's accuracy, or None if the training diverged."""
    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    began, liars = time.monotonic(), hostile(seed) if attack != "none" else set()
    batches = loaders(seed, liars if attack in ("labels", "claim") else set())
    net = models.build("digits", "mlp", seed)
    client = getattr(fr, f"{method}Client")

    def client_fn(context: Context) -> Any:
        return client(net, batches[int(context.node_config["partition-id"])], device="cpu")

    strategy = METHODS[method](seed=seed, fraction_evaluate=0.0, **AGGREGATORS[aggregator])
    try:
        strategy.start(
            grid=fr.InProcessGrid(
                fr.client_app(client_fn, mods=[lying(attack, liars, seed)]), CLIENTS
            ),
            initial_arrays=ArrayRecord(net.state_dict()),
            num_rounds=ROUNDS,
            train_config=ConfigRecord(TRAIN),
        )
        accuracy: float | None = accuracy_of(net, strategy.arrays)
    except fr.RoundFailed:
        accuracy = None
    refused = [why for entry in strategy.history for why in entry["failures"].values()]
    if others := [why for why in refused if not re.search(NOT_FINITE, why)]:
        raise RuntimeError(f"a reply was refused: {others[0]}")
    return {
        "method": method,
        "aggregator": aggregator,
        "attack": attack,
        "seed": seed,
        "accuracy": accuracy,
        "seconds": round(time.monotonic() - began, 2),
    }


@torch.no_grad()
def accuracy_of(net: Any, arrays: ArrayRecord) -> float | None:
    """Return the test accuracy of a global model; None if its outputs are no numbers."""
    net.load_state_dict(arrays.to_torch_state_dict())
    net.eval()
    outputs = net(torch.from_numpy(digits().test_x))
    if not bool(outputs.isfinite().all()):
        return None
    right = outputs.argmax(1) == torch.from_numpy(digits().test_y)
    return round(float(right.float().mean()), 5)


def read(path: Path = OUT) -> dict[Key, dict[str, Any]]:
    """Return the finished runs of a file."""
    return {(x["method"], x["aggregator"], x["attack"], x["seed"]): x for x in read_lines(path)}


def measure(path: Path = OUT) -> None:
    """Train what the file lacks."""
    done = read(path)
    for key in runs():
        if key not in done:
            line = done[key] = train(*key)
            write_lines(path, done.values())
            print(*key, line["accuracy"], f"{line['seconds']} s", flush=True)


def cell(results: Mapping[Key, dict[str, Any]], method: str, aggregator: str, attack: str) -> str:
    """Return the mean and standard deviation over the seeds, in per cent; it says if some are missing."""
    keys = [(method, aggregator, attack, seed) for seed in SEEDS]
    values = [results[key]["accuracy"] for key in keys if key in results]
    if not values:
        return "–"
    if len(values) < len(SEEDS) and None not in values:
        return f"{100 * np.mean(values):.1f} (n = {len(values)})"
    if gone := sum(v is None for v in values):
        return f"diverged ({gone} of {len(values)})"
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values, ddof=1):.1f}"


def tables(results: Mapping[Key, dict[str, Any]]) -> dict[str, str]:
    """Return the page's tables by name."""
    fedavg = [
        [f"`{a}`", *(cell(results, "FedAvg", a, attack) for attack in ATTACKS)] for a in AGGREGATORS
    ]
    methods = [
        [m, f"`{a}`", *(cell(results, m, a, attack) for attack in FEW_ATTACKS)]
        for m in list(METHODS)[1:]
        for a in FEW_AGGREGATORS
    ]
    return {
        "attacks": table(
            ["attack", "what a hostile client does"], [[f"`{k}`", v] for k, v in ATTACKS.items()]
        ),
        "fedavg": table(["aggregator", *(f"`{a}`" for a in ATTACKS)], fedavg),
        "methods": table(["method", "aggregator", *(f"`{a}`" for a in FEW_ATTACKS)], methods),
    }


def main() -> None:
    """Run a command."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("command", choices=("measure", "report"))
    if arguments.parse_args().command == "measure":
        measure()
    else:
        PAGE.write_text(filled(PAGE.read_text(), "attacks", tables(read())))


if __name__ == "__main__":
    main()
