"""The clients of a project of Flower's Message API: a train and an evaluate function."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import Net, load_data, test
from task import train as fit

app = ClientApp()


def prepared(message: Message, context: Context):
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    node = context.node_config
    return model, load_data(node["partition-id"], node["num-partitions"])


@app.train()
def train(message: Message, context: Context) -> Message:
    model, (loader, _) = prepared(message, context)
    loss = fit(model, loader, context.run_config["local-epochs"], message.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    model, (_, loader) = prepared(message, context)
    loss, accuracy = test(model, loader)
    numbers = {"loss": loss, "accuracy": accuracy, "num-examples": len(loader.dataset)}
    return Message(RecordDict({"metrics": MetricRecord(numbers)}), reply_to=message)
