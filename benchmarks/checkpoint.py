"""Size and time of checkpoints: FedADC with 5 million parameters, 4 clients in one process.

``python benchmarks/checkpoint.py [--parameters 5000000] [--rounds 5]``. Each row is one run; its times are
the medians over the rounds after the first. Clients "elsewhere" are not in the checkpoint, as those of
SuperNodes.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

import flwr_regs as fr
from flwr_regs.server.checkpoint.checkpoint import latest


class Elsewhere(fr.InProcessGrid):
    """Its clients are not in the checkpoint."""

    snapshot = None  # type: ignore[assignment]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    width = round((args.parameters / 4) ** 0.5)
    x, y = torch.randn(64, width), torch.randint(0, 10, (64,))

    def model() -> nn.Module:
        layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def client_fn(_: Any) -> Any:
        return fr.FedADCClient(model(), [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)])

    def row(name: str, grid: Any, **settings: Any) -> Iterable[str]:
        with tempfile.TemporaryDirectory() as folder:
            arrays = ArrayRecord(model().state_dict())
            size = sum(len(a.data) for a in arrays.values())
            strategy = fr.FedADC(
                0.9, seed=1, fraction_evaluate=0.0, checkpoint_dir=folder, **settings
            )
            strategy.start(
                grid(fr.client_app(client_fn), 4),
                arrays,
                num_rounds=args.rounds,
                train_config=ConfigRecord({"lr": 0.01, "local-epochs": 1}),
            )
            held = latest(Path(folder)).path.stat().st_size
        seconds = [entry["seconds"] for entry in strategy.history[1:]]
        saving = median(s["checkpoint"] for s in seconds)
        others = median(sum(s.values()) - s["checkpoint"] for s in seconds)
        yield f"| {name} | {held / 1e6:.0f} MB | {held / size:.2f} | {others:.2f} | {saving:.2f} |"

    print("| FedADC | checkpoint | models | seconds of a round | to save it |")
    print("|---|---|---|---|---|")
    print(*row('`downlink="model"`, clients elsewhere', Elsewhere), flush=True)
    print(*row('`downlink="model"`, one process', fr.InProcessGrid), flush=True)
    print(*row('`downlink="delta"`, one process', fr.InProcessGrid, downlink="delta"), flush=True)


if __name__ == "__main__":
    main()
