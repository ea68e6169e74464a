"""Bytes of δ for each client and round, from real messages: the paper's Table III.

``python benchmarks/rfedavg_bytes.py [--clients 20,500] [--features 512]``. What is counted is what a
client receives and sends in round 3 beyond the same client under FedAvg, full participation.
"""

from __future__ import annotations

import argparse
import logging
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord
from torch import nn

import flwr_regs as fr

METHODS = {
    "FedAvg": (lambda **kw: fr.FedAvg(**kw), fr.FedAvgClient),
    "RFedAvg": (lambda **kw: fr.RFedAvg(lam=0.001, **kw), fr.RFedAvgClient),
    "RFedAvgPlus": (lambda **kw: fr.RFedAvgPlus(lam=0.1, **kw), fr.RFedAvgPlusClient),
}


def bytes_of(name: str, clients: int, features: int) -> tuple[float, float]:
    """Return the mean bytes (down, up) of a client in round 3."""
    build, client = METHODS[name]
    strategy = build(seed=1, fraction_evaluate=0.0)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, features), nn.Linear(features, 2))

    def client_fn(context: Any) -> Any:
        return client(model(), [(torch.ones(2, 4), torch.tensor([0, 1]))], device="cpu")

    strategy.start(
        grid=fr.InProcessGrid(fr.client_app(client_fn), clients),
        initial_arrays=ArrayRecord(model().state_dict()),
        num_rounds=3,
        train_config=ConfigRecord({"lr": 0.01, "local-steps": 1}),
    )
    entry = strategy.history[-1]
    down, up = (float(np.mean(list(entry[k].values()))) for k in ("bytes_down", "bytes_up"))
    return down, up


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default="20,500")
    parser.add_argument("--features", type=int, default=512)
    args = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print("| method | N | bytes down | bytes up |\n|---|---|---|---|")
    for clients in map(int, args.clients.split(",")):
        base = bytes_of("FedAvg", clients, args.features)
        for name in ("RFedAvg", "RFedAvgPlus"):
            down, up = bytes_of(name, clients, args.features)
            print(
                f"| {name} | {clients} | {down - base[0]:,.0f} | {up - base[1]:,.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
