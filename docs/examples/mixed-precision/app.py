"""FedFOR in a training loop of one's own: mixed precision, clipped gradients, AdamW.

``flwr run docs/examples/mixed-precision``; the four lines that are the method's are marked. scikit-learn's
handwritten digits, two label-sorted shards for each client.
"""

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_regs import ClientRound, FedFOR, FedFORClient, RegClientApp, load_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def data_of(context: Context) -> TensorDataset:
    """Two label-sorted shards; on a SuperNode without a ``partition-id``, its ``data-path``."""
    if "partition-id" not in context.node_config:
        local = np.load(str(context.node_config["data-path"]))  # an .npz file of the same arrays
        x, y = local["x"], local["y"]
    else:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        pid = int(context.node_config["partition-id"])
        n = int(context.node_config["num-partitions"])
        shards = np.array_split(np.argsort(y, kind="stable"), 2 * n)
        mine = np.concatenate([shards[pid], shards[pid + n]])
        x, y = x[mine], y[mine]
    return TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))


app = RegClientApp()  # Flower's ClientApp, and the method's bookkeeping


@app.train()
def train(message: Message, context: Context) -> Message:
    model = build()
    loader = DataLoader(data_of(context), batch_size=32, shuffle=True)
    loop = ClientRound(message, FedFORClient, model, loader, device=DEVICE)  # 1: loads the model
    optimizer = torch.optim.AdamW(model.parameters(), lr=loop.lr, weight_decay=0.01)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=DEVICE.type == "cuda")
    half = torch.float16 if DEVICE.type == "cuda" else torch.bfloat16
    with loop.seeded():
        for inputs, targets in loop.batches():
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, dtype=half):
                output = model(inputs)
                loss = nn.functional.cross_entropy(output, targets)
            loss = loop.loss(loss, inputs, targets, output)  # 2: the method's share of the loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            loop.correct()  # 3: the method's share of the gradients
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
    return loop.reply()  # 4


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = build().to(DEVICE)
    load_model(message, FedFORClient, model)
    inputs, targets = (t.to(DEVICE) for t in data_of(context).tensors)
    with torch.no_grad():
        output = model.eval()(inputs)
    metrics = {
        "loss": float(nn.functional.cross_entropy(output, targets)),
        "accuracy": float((output.argmax(1) == targets).double().mean()),
        "num-examples": len(targets),
    }
    return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedFOR(alpha=0.1, seed=7)
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
