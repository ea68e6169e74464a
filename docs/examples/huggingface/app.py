"""Flower's Hugging Face quickstart with FedProx: the model returns its own loss.

``flwr run docs/examples/huggingface``; made-up reviews with a good or a bad majority of words. The model is
built here, with random weights; yours may be ``from_pretrained``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from flwr_regs import FedProx, FedProxClient, client_app


def build() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=12,
        num_labels=2,
    )
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


def load_data(node_config: Mapping[str, Any]) -> tuple[Any, Any]:
    """A partition's made-up reviews; without one, those in the .npz file of the node's ``data-path``."""
    if "partition-id" in node_config:
        rows = made_up(int(node_config["partition-id"]))
    else:
        local = np.load(str(node_config["data-path"]))
        rows = [
            {name: torch.tensor(local[name][i]) for name in local.files}
            for i in range(len(local["labels"]))
        ]
    split = len(rows) * 4 // 5
    trainloader = DataLoader(rows[:split], batch_size=32, shuffle=True)
    return trainloader, DataLoader(rows[split:], batch_size=32)


def made_up(seed: int) -> list[dict[str, torch.Tensor]]:
    """Reviews of up to 12 words; the words 1 to 20 are good, those from 21 to 40 bad, 0 is padding."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(200):
        length = int(rng.integers(5, 13))
        words = np.zeros(12, np.int64)
        words[:length] = rng.integers(1, 60, length)
        good, bad = ((words > 0) & (words <= 20)).sum(), ((words > 20) & (words <= 40)).sum()
        mask = np.arange(12) < length
        rows.append(
            {
                "input_ids": torch.tensor(words),
                "attention_mask": torch.tensor(mask.astype(np.int64)),
                "labels": torch.tensor(int(good > bad)),
            }
        )
    return rows


def client_fn(context: Context) -> FedProxClient:
    trainloader, testloader = load_data(context.node_config)
    return FedProxClient(
        build(), trainloader, testloader, loss_fn=None, optimizer=torch.optim.AdamW
    )


app = client_app(client_fn)

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedProx(mu=0.01, seed=7)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(build().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        train_config=ConfigRecord({"lr": 0.005, "local-epochs": 2}),
    )
    for entry in strategy.history:
        clients = entry["evaluate"]["clients"].values()
        mean = np.mean([m["accuracy"] for m in clients])
        print(f"round {entry['round']}: mean accuracy on the clients {mean:.1%}", flush=True)
