"""LoRA with FedProx: only the adapters and the output layer travel.

``flwr run docs/examples/lora``; made-up messages on four topics, half of a client's on one topic. The
transformer is built here, with random weights; yours may be ``from_pretrained``. Every client must build
it from the same weights.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from flwr_regs import FedProx, FedProxClient, client_app, trainable

TOPICS, WORDS, LENGTH = 4, 81, 16


def build() -> nn.Module:
    torch.manual_seed(0)
    backbone = BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=LENGTH,
            num_labels=TOPICS,
            initializer_range=0.1,
        )
    )
    adapters = LoraConfig(r=4, target_modules=["query", "value"], modules_to_save=["classifier"])
    return get_peft_model(backbone, adapters)


def load_data(node_config: Mapping[str, Any]) -> tuple[Any, Any]:
    """A partition's made-up messages; without one, those in the .npz file of the node's ``data-path``."""
    if "partition-id" in node_config:
        rows = made_up(int(node_config["partition-id"]))
    else:
        local = np.load(str(node_config["data-path"]))
        rows = [
            {"input_ids": torch.tensor(words), "labels": int(topic)}
            for words, topic in zip(local["input_ids"], local["labels"], strict=True)
        ]
    split = len(rows) * 4 // 5
    trainloader = DataLoader(rows[:split], batch_size=30, shuffle=True)
    return trainloader, DataLoader(rows[split:], batch_size=30)


def made_up(partition_id: int) -> list[dict[str, Any]]:
    """Messages of 16 words: 0 begins each, and 11 are from the topic's own twenty."""
    rng = np.random.default_rng(partition_id)
    rows: list[dict[str, Any]] = []
    for i in range(150):
        topic = partition_id % TOPICS if i % 2 else int(rng.integers(TOPICS))
        own = rng.integers(1 + 20 * topic, 21 + 20 * topic, 11)
        words = rng.permutation(np.concatenate([own, rng.integers(1, WORDS, LENGTH - 12)]))
        rows.append({"input_ids": torch.tensor([0, *words]), "labels": topic})
    return rows


def client_fn(context: Context) -> FedProxClient:
    trainloader, testloader = load_data(context.node_config)
    return FedProxClient(
        build(),
        trainloader,
        testloader,
        loss_fn=None,  # the model returns it
        optimizer=partial(torch.optim.AdamW, weight_decay=0.01),
    )


app = client_app(client_fn)

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = FedProx(mu=0.01, seed=7)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(trainable(build())),  # adapters and the output layer
        num_rounds=int(config.get("num-server-rounds") or config["rounds"]),
        train_config=ConfigRecord(
            {
                "lr": float(config.get("learning-rate", 0.01)),
                "local-epochs": int(config.get("local-epochs", 2)),
            }
        ),
    )
    for entry in strategy.history:
        clients = entry["evaluate"]["clients"].values()
        mean = np.mean([m["accuracy"] for m in clients])
        down, up = (max(entry[k].values()) / 1000 for k in ("bytes_down", "bytes_up"))
        print(
            f"round {entry['round']}: {down:.1f} kB down, {up:.1f} kB up, mean accuracy {mean:.1%}",
            flush=True,
        )
