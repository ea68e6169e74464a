"""The clients. On a SuperNode each message starts a new process: torch is imported only to train."""

from typing import Any

from flwr.app import Context

import flwr_regs


def client_fn(context: Context) -> Any:
    """Return the client of one partition: the method's own, with this node's data."""
    from task import build, load

    node, config = context.node_config, context.run_config
    name = str(config["method"]).partition("(")[0]
    data = load(int(node["partition-id"]), int(node["num-partitions"]))
    return getattr(flwr_regs, f"{name}Client")(build(), *data)


app = flwr_regs.client_app(client_fn)
