"""The clients. On a SuperNode each message starts a new process: torch is imported only to train."""

from typing import Any

from flwr.app import Context

import flwr_regs


def client_fn(context: Context) -> Any:
    """Return the client of one partition: the method's own, with this node's data."""
    from task import build, load

    name = str(context.run_config["method"]).partition("(")[0]
    return getattr(flwr_regs, f"{name}Client")(build(), *load(context.node_config))


app = flwr_regs.client_app(client_fn)
