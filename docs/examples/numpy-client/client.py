"""A Flower client without torch and without flwr-regs: it takes part in a FedAvg or FedFOR run.

docs/protocol.md explains each message and key. The model is a softmax regression, ``nn.Linear(4, 3)``.
"""

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


def load(partition):
    """Return a client's batches: inputs (8, 4), and labels (8,) of three classes."""
    rng = np.random.default_rng(partition)
    inputs = rng.normal(partition, 1, (4, 8, 4)).astype("float32")
    return [(x, (x[:, :3] + rng.normal(size=(8, 3))).argmax(1)) for x in inputs]


def loss_and_gradient(model, x, y):
    """Return the mean cross-entropy of a batch, and its gradient by name."""
    logits, rows = x @ model["weight"].T + model["bias"], np.arange(len(y))
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[rows, y]).mean()
    p[rows, y] -= 1
    return loss, {"weight": p.T @ x / len(y), "bias": p.mean(0)}


@app.query("flwr_regs")
def identify(message, context):
    """Say which partition this node serves."""
    mine = {key: int(context.node_config[key]) for key in ("partition-id", "num-partitions")}
    config = ConfigRecord({**mine, "regs.protocol": 4})
    return Message(RecordDict({"config": config}), reply_to=message)


@app.train()
def train(message, context):
    """Train from the global model; reply with the local one."""
    config = dict(message.content["config"])
    if config.get("regs.protocol") != 4 or config["regs.method"] not in ("FedAvg", "FedFOR"):
        raise ValueError("this client speaks protocol 4 of flwr-regs, and FedAvg and FedFOR")
    if own := {"optimizer", "momentum", "weight-decay", "clip-norm", "regs.wire-dtype"} & {*config}:
        raise ValueError(f"this client runs plain SGD in float32, but the config has {sorted(own)}")
    if "regs.frozen-digest" in config:
        raise ValueError("this client holds no frozen parameters")
    if config.get("regs.downlink", "model") != "model":  # it keeps no model
        lacks = ConfigRecord({"regs.memory": ["lost model"]})
        return Message(RecordDict({"config": lacks}), reply_to=message)
    start = {name: array.numpy() for name, array in message.content["arrays"].items()}
    batches = load(context.node_config["partition-id"])
    steps = config.get("local-steps") or config["local-epochs"] * len(batches)
    alpha = config.get("first-order.alpha", 2 / steps)
    last = message.content.array_records.get("first-order.broadcast", {})  # FedFOR's, from round 2
    v, total = dict(start), 0.0
    for step in range(steps):
        loss, gradient = loss_and_gradient(v, *batches[step % len(batches)])
        total += loss
        for name in last:
            g = last[name].numpy()
            gradient[name] = gradient[name] + alpha * g * (g * (v[name] - start[name]) > 0)
        v = {name: v[name] - config["lr"] * gradient[name] for name in v}
    arrays = {name: Array(v[name].astype(start[name].dtype)) for name in v}
    counts = {"num-examples": 8 * len(batches), "local-steps": steps, "planned-steps": steps}
    metrics = MetricRecord({**counts, "train-loss": float(total / steps)})
    whose = {key: config[key] for key in ("regs.method", "regs.start", "server-round")}
    content = {"arrays": ArrayRecord(arrays), "metrics": metrics, "config": ConfigRecord(whose)}
    return Message(RecordDict(content), reply_to=message)
