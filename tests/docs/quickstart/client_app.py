"""The client of an app like Flower's PyTorch quickstart: a train and an evaluate function."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import Net, load_data
from task import test as test_fn
from task import train as train_fn

app = ClientApp()


def loaders(context: Context):
    node = context.node_config
    return load_data(node["partition-id"], node["num-partitions"], context.run_config["batch-size"])


@app.train()
def train(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    trainloader, _ = loaders(context)
    device = torch.device("cpu")
    train_loss = train_fn(
        model,
        trainloader,
        context.run_config["local-epochs"],
        msg.content["config"]["lr"],
        device,
    )
    model_record = ArrayRecord(model.state_dict())
    counted = {"train_loss": train_loss, "num-examples": len(trainloader.dataset)}
    metric_record = MetricRecord(counted)
    content = RecordDict({"arrays": model_record, "metrics": metric_record})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context):
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loss, accuracy = test_fn(model, loaders(context)[1], torch.device("cpu"))
    metrics = {"eval_loss": loss, "eval_acc": accuracy, "num-examples": 8}
    return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=msg)
