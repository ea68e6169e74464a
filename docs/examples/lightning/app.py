"""FedADC in PyTorch Lightning: the Trainer runs the loop, three hooks call the method.

``flwr run docs/examples/lightning``; scikit-learn's handwritten digits, two label-sorted shards a client.
"""

import lightning
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flwr_regs import ClientRound, FedADC, FedADCClient, RegClientApp, load_model

CLIP: float | None = 5.0


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Classifier(lightning.LightningModule):
    """An ordinary module of a Lightning project; what the method adds is marked."""

    def __init__(self, model: nn.Module, loop: ClientRound) -> None:
        super().__init__()
        self.model = model
        self.loop = loop

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.loop.optimizer(torch.optim.SGD)  # 1: FedADC has a say in it

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        output = self.model(inputs)
        loss = nn.functional.cross_entropy(output, targets)
        return self.loop.loss(loss, inputs, targets, output)  # 2: the method's share of the loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.loop.correct()  # 3: of the gradients; after unscaling, before clipping


def trainer_for(loop: ClientRound) -> lightning.Trainer:
    return lightning.Trainer(
        max_steps=loop.num_steps,
        gradient_clip_val=CLIP,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


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
    loop = ClientRound(message, FedADCClient, model, loader)  # loads the model
    if loop.num_steps:
        with loop.seeded():
            trainer_for(loop).fit(Classifier(model, loop), loader)
    return loop.reply()


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model = build()
    load_model(message, FedADCClient, model)
    inputs, targets = data_of(context).tensors
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
    strategy = FedADC(beta=0.7, seed=7)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(build().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        train_config=ConfigRecord({"lr": 0.05, "local-epochs": 2}),
    )
    for entry in strategy.history:
        clients = entry["evaluate"]["clients"].values()
        mean = np.mean([m["accuracy"] for m in clients])
        print(f"round {entry['round']}: mean accuracy on the clients {mean:.1%}", flush=True)
